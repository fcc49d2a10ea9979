// The image on the easel: draw, erase or hide pixels, by pointer or keyboard.

import { $ } from "./api.js";
import { about, imageData, text } from "./paint.js";

const ZOOM = 12;
const canvas = $("canvas");
const now = { image: null, hidden: null, seed: 1 };
let changed = () => {};
let cursor = null;
let last = null;

const tool = () => document.querySelector("input[name=tool]:checked").value;
export const isBlank = () => !now.image || now.image.every((value) => value === 0);
export const isDamaged = () =>
  now.hidden?.some(Boolean) || Number($("noise").value) > 0 || Number($("right").value) !== 0 || Number($("down").value) !== 0;
export const image = () => text(now.image);

export function onChange(callback) {
  changed = callback;
}

export function reset() {
  const [channels, height, width] = about.image;
  now.image = new Uint8Array(channels * height * width);
  now.hidden = new Uint8Array(height * width);
  heal();
}

export function heal() {
  now.hidden.fill(0);
  for (const id of ["noise", "right", "down"]) $(id).value = 0;
  show();
}

export function put(values) {
  now.image = Uint8Array.from(values, (v) => (about.binary ? (v > 127 ? 255 : 0) : v));
  show();
  changed();
}

export function cue() {
  return {
    image: image(),
    hidden: now.hidden.some(Boolean) ? text(now.hidden) : null,
    noise: Number($("noise").value) ? $("noise-kind").value : "none",
    amount: Number($("noise").value) / 100,
    right: Number($("right").value),
    down: Number($("down").value),
    seed: now.seed,
    mask_given: $("mask-given").checked,
  };
}

export function hide(part) {
  const [, height, width] = about.image;
  now.seed += 1;
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++) {
      const gone = { lower: y >= height / 2, right: x >= width / 2, random: Math.random() < 0.7, none: false }[part];
      now.hidden[y * width + x] = gone ? 255 : 0;
    }
  show();
  changed();
}

export function show() {
  const [, height, width] = about.image;
  const small = new OffscreenCanvas(width, height);
  small.getContext("2d").putImageData(imageData(now.image), 0, 0);
  [canvas.width, canvas.height] = [width * ZOOM, height * ZOOM];
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, canvas.width, canvas.height);
  const style = getComputedStyle(document.documentElement);
  pen.strokeStyle = pen.fillStyle = style.getPropertyValue("--accent");
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++)
      if (now.hidden[y * width + x]) {
        pen.globalAlpha = 1;
        pen.fillStyle = style.getPropertyValue("--tint");
        pen.fillRect(x * ZOOM, y * ZOOM, ZOOM, ZOOM);
        pen.globalAlpha = 0.5;
        pen.beginPath();
        pen.moveTo(x * ZOOM, (y + 1) * ZOOM);
        pen.lineTo((x + 1) * ZOOM, y * ZOOM);
        pen.stroke();
      }
  pen.globalAlpha = 1;
  if (cursor && document.activeElement === canvas) {
    pen.lineWidth = 2;
    pen.strokeRect(cursor[0] * ZOOM + 1, cursor[1] * ZOOM + 1, ZOOM - 2, ZOOM - 2);
    pen.lineWidth = 1;
  }
  canvas.parentElement.classList.toggle("blank", isBlank());
  $("noise-out").textContent = Number($("noise").value) ? `${$("noise").value} %` : "none";
  $("right-out").textContent = `${$("right").value} px`;
  $("down-out").textContent = `${$("down").value} px`;
}

// A stroke from one point to another, in pixels of the image.
function stroke([x0, y0], [x1, y1], kind) {
  const [channels, height, width] = about.image;
  const radius = { ink: 1.15, paper: 1.8, hide: 2.6 }[kind] * Math.max(1, height / 28);
  const steps = Math.ceil(2 * Math.hypot(x1 - x0, y1 - y0)) + 1;
  for (let step = 0; step <= steps; step++) {
    const x = x0 + ((x1 - x0) * step) / steps;
    const y = y0 + ((y1 - y0) * step) / steps;
    for (let row = Math.max(0, Math.floor(y - radius)); row <= Math.min(height - 1, y + radius); row++)
      for (let column = Math.max(0, Math.floor(x - radius)); column <= Math.min(width - 1, x + radius); column++)
        if (Math.hypot(column + 0.5 - x, row + 0.5 - y) <= radius) set(row * width + column, kind, channels, height * width);
  }
}

function set(at, kind, channels, size) {
  if (kind === "hide") now.hidden[at] = 255;
  else for (let c = 0; c < channels; c++) now.image[c * size + at] = kind === "ink" ? 255 : 0;
}

function place(event) {
  const box = canvas.getBoundingClientRect();
  const [, height, width] = about.image;
  return [((event.clientX - box.left) / box.width) * width, ((event.clientY - box.top) / box.height) * height];
}

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  cursor = null;
  last = place(event);
  stroke(last, last, event.button === 2 ? "hide" : tool());
  show();
  changed();
});
canvas.addEventListener("pointermove", (event) => {
  if (!last) return;
  for (const one of event.getCoalescedEvents?.() ?? [event]) {
    const next = place(one);
    stroke(last, next, event.buttons === 2 ? "hide" : tool());
    last = next;
  }
  show();
  changed();
});
for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (last = null));
canvas.addEventListener("contextmenu", (event) => event.preventDefault());
canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && ((cursor ??= about.image.slice(1).reverse().map((n) => n >> 1)), show()));
canvas.addEventListener("blur", show);
canvas.addEventListener("keydown", (event) => {
  const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const [, height, width] = about.image;
  cursor ??= [width >> 1, height >> 1];
  if (move) cursor = [Math.min(width - 1, Math.max(0, cursor[0] + move[0])), Math.min(height - 1, Math.max(0, cursor[1] + move[1]))];
  else if (event.key !== " ") return;
  event.preventDefault();
  if (event.key === " " || event.shiftKey) {
    const at = [cursor[0] + 0.5, cursor[1] + 0.5];
    stroke(at, at, tool());
    changed();
  }
  show();
});
for (const id of ["noise", "right", "down", "noise-kind", "mask-given"])
  $(id).addEventListener("input", () => {
    show();
    changed();
  });
for (const button of document.querySelectorAll("[data-hide]")) button.addEventListener("click", () => hide(button.dataset.hide));
