// Bytes to canvases. Binary images are ink on paper, in the colours of the theme.

export const about = { image: [1, 28, 28], binary: true, can: {}, sets: [], name: "" };

export function bytes(text) {
  const raw = atob(text);
  return Uint8Array.from(raw, (c) => c.charCodeAt(0));
}
export function text(array) {
  let raw = "";
  for (const value of array) raw += String.fromCharCode(value);
  return btoa(raw);
}

function colour(name) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const full = value.length === 4 ? value.replace(/[0-9a-f]/gi, "$&$&") : value;
  return [1, 3, 5].map((at) => parseInt(full.slice(at, at + 2), 16));
}
let ink = [0, 0, 0];
let sheet = [255, 255, 255];
export function readTheme() {
  ink = colour("--ink");
  sheet = colour("--sheet");
}

export function imageData(values, [channels, height, width] = about.image, plain = false) {
  const size = height * width;
  const data = new ImageData(width, height);
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) {
      const value = values[channels === 3 ? c * size + i : i];
      const mixed = about.binary && !plain ? sheet[c] + ((ink[c] - sheet[c]) * value) / 255 : value;
      data.data[4 * i + c] = mixed;
    }
    data.data[4 * i + 3] = 255;
  }
  return data;
}

export function paint(canvas, image) {
  const values = typeof image === "string" ? bytes(image) : image;
  [, canvas.height, canvas.width] = about.image;
  canvas.getContext("2d").putImageData(imageData(values), 0, 0);
  canvas.painted = values;
  return canvas;
}
export const picture = (image) => paint(document.createElement("canvas"), image);

export function erase(canvas) {
  [, canvas.height, canvas.width] = about.image;
  canvas.painted = null;
}

// After a change of theme everything that was painted is painted again.
export function repaint() {
  readTheme();
  for (const canvas of document.querySelectorAll("canvas")) if (canvas.painted) paint(canvas, canvas.painted);
}

export const make = (tag, className = "", content = "") => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (content !== "") element.textContent = content;
  return element;
};
export const percent = (p) => (p >= 0.9995 ? "100 %" : p < 0.0005 ? "0 %" : `${(100 * p).toFixed(p < 0.1 ? 1 : 0)} %`);
export const count = (n) => Math.round(n).toLocaleString("en");
