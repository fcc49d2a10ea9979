// Four first steps, ticked off as they are done; help; code; light and dark.

import { $, ask, say } from "./api.js";
import { asksStore } from "./answer.js";
import { cue, isBlank, show } from "./canvas.js";
import { drawMap } from "./memory.js";
import { readTheme, repaint } from "./paint.js";

const done = new Set();

export function tick(step) {
  if (done.has(step)) return;
  done.add(step);
  document.querySelector(`#tour [data-step=${step}]`).classList.add("done");
}
function showTour(on) {
  $("tour").hidden = !on;
  localStorage.setItem("kanerva-tour", on ? "" : "seen");
}
$("tour").hidden = localStorage.getItem("kanerva-tour") === "seen";
$("tour-close").addEventListener("click", () => showTour(false));
$("help").addEventListener("click", () => $("about").showModal());
$("tour-again").addEventListener("click", () => {
  $("about").close();
  showTour(true);
});
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());

$("python").addEventListener("click", async () => {
  try {
    const { text } = await ask("python", { cue: isBlank() ? null : cue(), store: asksStore() });
    $("code-text").textContent = text;
    $("code").showModal();
  } catch (error) {
    say(error.message);
  }
});
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("code-text").textContent);
    say("Copied.");
  } catch {
    getSelection().selectAllChildren($("code-text"));
    say("Selected: copy it with Ctrl C.");
  }
});

const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  readTheme();
}
setTheme(localStorage.getItem("kanerva-theme") ?? (dark.matches ? "dark" : "light"));
function retheme(name) {
  setTheme(name);
  repaint();
  show();
  drawMap();
}
$("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("kanerva-theme", name);
  retheme(name);
});
dark.addEventListener("change", () => localStorage.getItem("kanerva-theme") ?? retheme(dark.matches ? "dark" : "light"));
