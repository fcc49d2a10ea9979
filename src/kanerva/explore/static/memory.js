// The map and the stored images: two views of the same cells, linked both ways.

import { $, ask, say } from "./api.js";
import { about, bytes, count, imageData, make, picture } from "./paint.js";

export const memory = { held: [], rows: 1, columns: 1, capacity: null, blocks: {}, block: [1, 1] };
let chosen = null;
let use = () => {};
let changed = () => {};

export function onUse(callback) {
  use = callback;
}
export function onChange(callback) {
  changed = callback;
}
export const find = (handle) => memory.held.find((one) => one.handle === handle);
export const at = (cell) => memory.held.find((one) => one.cell === cell);

export async function change(name, body = {}) {
  try {
    const state = await ask(name, body);
    accept(state);
    return state;
  } catch (error) {
    say(error.message);
    return null;
  }
}

export function accept(state) {
  const before = new Set(memory.held.map((one) => one.handle));
  Object.assign(memory, state);
  if (!find(chosen)) chosen = null;
  drawMap();
  drawHeld(before);
  const held = memory.held.length;
  const room = memory.capacity ? ` of ${memory.capacity}` : "";
  $("memory-size").textContent = `${held}${room} held · ${count(memory.bits)} bits`;
  $("undo").disabled = !memory.undo;
  $("redo").disabled = !memory.redo;
  $("empty").hidden = !held;
  $("changed").textContent = note(state);
  choose(chosen);
  changed();
}

function note(state) {
  if (!state.changed || !memory.capacity) return "";
  const rest = memory.capacity - state.changed.length;
  const cells = state.changed.length === 1 ? "1 cell changed" : `${state.changed.length} cells changed`;
  return `${cells}; ${rest === memory.capacity ? "all" : `the other ${rest}`} are the same, bit for bit.`;
}

export function drawMap() {
  const canvas = $("map");
  const [h, w] = memory.block;
  const zoom = Math.max(1, Math.ceil(48 / w)); // so that gaps are thin, however few numbers a block has
  const gap = memory.rows > 1 ? Math.max(1, Math.round(0.07 * w * zoom)) : 0;
  canvas.width = memory.columns * (w * zoom + gap) + gap;
  canvas.height = memory.rows * (h * zoom + gap) + gap;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--cell");
  const small = new OffscreenCanvas(w, h);
  for (let cell = 0; cell < memory.rows * memory.columns; cell++) {
    const x = gap + (cell % memory.columns) * (w * zoom + gap);
    const y = gap + Math.floor(cell / memory.columns) * (h * zoom + gap);
    if (memory.blocks[cell]) {
      small.getContext("2d").putImageData(imageData(bytes(memory.blocks[cell]), [3, h, w], true), 0, 0);
      pen.drawImage(small, x, y, w * zoom, h * zoom);
    } else if (memory.capacity === null || cell < memory.capacity) pen.fillRect(x, y, w * zoom, h * zoom);
  }
}

function drawHeld(before) {
  const grid = $("held");
  const whole = memory.capacity === null;
  const columns = whole ? Math.max(1, Math.ceil(Math.sqrt(memory.held.length))) : memory.columns;
  grid.style.gridTemplateColumns = `repeat(${columns}, 1fr)`;
  grid.style.gridTemplateRows = `repeat(${whole ? columns : memory.rows}, 1fr)`;
  const focused = document.activeElement?.dataset?.handle;
  const cells = whole ? memory.held : Array.from({ length: memory.capacity }, (_, cell) => at(cell));
  grid.replaceChildren(...cells.map((one) => (one ? heldButton(one, !before.has(one.handle)) : make("div"))));
  if (focused !== undefined) (grid.querySelector(`[data-handle="${focused}"]`) ?? grid.querySelector("button"))?.focus();
}

function heldButton(one, fresh) {
  const button = make("button", fresh ? "fresh" : "");
  button.type = "button";
  button.dataset.handle = one.handle;
  button.setAttribute("aria-label", `Image ${one.handle}, cell ${one.cell + 1}, ${count(one.bits)} bits`);
  button.append(picture(one.image));
  if (memory.columns <= 8) button.append(make("span", "", one.handle));
  button.addEventListener("click", () => {
    choose(one.handle);
    use(bytes(one.image));
  });
  button.addEventListener("pointerenter", () => ring(one.cell));
  button.addEventListener("focus", () => (choose(one.handle), ring(one.cell)));
  button.addEventListener("pointerleave", () => choose(chosen));
  return button;
}

export function choose(handle) {
  chosen = handle;
  const one = find(handle);
  for (const button of $("held").querySelectorAll("button"))
    button.classList.toggle("on", one !== undefined && Number(button.dataset.handle) === handle);
  ring(one ? one.cell : null);
  $("free").hidden = !one || !about.can.free;
  const bits = one?.bits ? ` · ${count(one.bits)} bits` : "";
  $("chosen-text").textContent = one
    ? `Image ${one.handle}${memory.capacity ? ` · cell ${one.cell + 1}` : ""}${bits}`
    : memory.held.length
      ? "Choose an image to see it, damage it or free it."
      : "Nothing is written yet.";
}

function ring(cell) {
  const box = $("ring");
  box.hidden = cell === null || memory.capacity === null;
  if (box.hidden) return;
  box.style.left = `${((cell % memory.columns) / memory.columns) * 100}%`;
  box.style.top = `${(Math.floor(cell / memory.columns) / memory.rows) * 100}%`;
  box.style.width = `${100 / memory.columns}%`;
  box.style.height = `${100 / memory.rows}%`;
}

export function hover(cell) {
  const one = at(cell);
  for (const button of $("held").querySelectorAll("button"))
    button.classList.toggle("on", one !== undefined && Number(button.dataset.handle) === one.handle);
}
export const unhover = () => choose(chosen);

export const freeChosen = () => chosen !== null && about.can.free && change("free", { handles: [chosen] });
$("free").addEventListener("click", freeChosen);
$("empty").addEventListener("click", () => change("clear"));
$("undo").addEventListener("click", () => change("undo"));
$("redo").addEventListener("click", () => change("redo"));
