// Read anywhere on the map: click, drag, or arrow keys; and samples around that place.

import { $, ask, latest } from "./api.js";
import { at, hover, memory, unhover } from "./memory.js";
import { about, make, paint, picture } from "./paint.js";

const AROUND = 16;
let place = null;
let dreamt = () => {};

export function onDream(callback) {
  dreamt = callback;
}
const spread = () => Number($("spread").value) / 100;
const show = (n) => (n < 0 ? "−" : "") + Math.abs(n).toFixed(2);

const showAround = (images) => $("dream-around").replaceChildren(...images.map(picture));

// One queue for all three, so that the answer to the last request stays on the screen.
const dream = latest(async (what) => {
  if (what === "like") {
    const found = await ask("dream", { count: AROUND, seed: Math.floor(Math.random() * 1e9) });
    showAround(found.images);
    return dreamt();
  }
  if (!place) return;
  const [x, y] = place;
  const count = what === "around" ? AROUND + 1 : 1;
  const found = await ask("dream", { x, y, spread: spread(), count, seed: 1 });
  paint($("dream-here"), found.images[0]);
  if (what === "around") showAround(found.images.slice(1));
});

function go(x, y, what) {
  place = [x, y].map((n) => Math.max(-1, Math.min(1, n)));
  const column = Math.min(memory.columns - 1, Math.floor(((place[0] + 1) / 2) * memory.columns));
  const row = Math.min(memory.rows - 1, Math.floor(((place[1] + 1) / 2) * memory.rows));
  const one = at(row * memory.columns + column);
  const found = memory.capacity === null ? "" : one ? `: image ${one.handle}` : ": a free cell";
  $("dream-at").textContent = `reading at ${show(place[0])}, ${show(place[1])}${found}`;
  $("dot").hidden = false;
  $("dot").style.left = `${((place[0] + 1) / 2) * 100}%`;
  $("dot").style.top = `${((place[1] + 1) / 2) * 100}%`;
  if (memory.capacity !== null) hover(row * memory.columns + column);
  dream(what);
  dreamt();
}

const map = $("map");
function point(event) {
  const box = map.getBoundingClientRect();
  return [(2 * (event.clientX - box.left)) / box.width - 1, (2 * (event.clientY - box.top)) / box.height - 1];
}
let down = false;
map.addEventListener("pointerdown", (event) => {
  if (!about.can.place) return;
  map.setPointerCapture(event.pointerId);
  down = true;
  go(...point(event), "here");
});
map.addEventListener("pointermove", (event) => {
  if (down) return go(...point(event), "here");
  if (memory.capacity === null) return;
  const [x, y] = point(event).map((n) => Math.min(0.999, Math.max(0, (n + 1) / 2)));
  hover(Math.floor(y * memory.rows) * memory.columns + Math.floor(x * memory.columns));
});
map.addEventListener("pointerleave", () => !down && unhover());
for (const name of ["pointerup", "pointercancel"])
  map.addEventListener(name, () => {
    if (down) dream("around");
    down = false;
  });
map.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!move || !about.can.place) return;
  event.preventDefault();
  const [x, y] = place ?? [0, 0];
  go(x + move[0] / memory.columns, y + move[1] / memory.rows, "around");
});
$("spread").addEventListener("input", () => {
  $("spread-out").textContent = spread().toFixed(2);
  dream("around");
});
$("dream-like").addEventListener("click", () => dream("like"));

export function refresh() {
  if (place) dream("around");
}
export function reset() {
  place = null;
  $("dot").hidden = true;
  $("dream-at").textContent = about.can.place ? "Drag across the map to read there." : "";
  $("dream-here").hidden = $("spread").parentElement.hidden = !about.can.place;
  $("dream-like").textContent = about.replays ? "Read at random places" : "Samples like what is held";
  $("dream-note").hidden = !about.replays;
  $("dream-around").replaceChildren(...Array.from({ length: AROUND }, () => make("canvas")));
}
