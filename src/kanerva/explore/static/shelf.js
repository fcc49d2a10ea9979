// A store of thousands of images: search it with the image on the easel, or browse it.

import { $, ask, latest, say } from "./api.js";
import { cue, isBlank } from "./canvas.js";
import { bytes, count, make, percent, picture } from "./paint.js";

let mode = "browse";
let page = 0;
let use = () => {};
let each = 12;
let turned = 0;

export function onUse(callback) {
  use = callback;
}

const load = latest(async () => {
  show(await (mode === "search" ? ask("search", { ...cue(), page }) : ask("browse", { page })));
});

function show(found) {
  const rows = found.hits.map((hit) => {
    const button = make("button");
    button.type = "button";
    const label = hit.p === undefined ? `no. ${hit.id}` : `no. ${hit.id} · ${percent(hit.p)}`;
    button.title = hit.text;
    button.setAttribute("aria-label", `${label} ${hit.text}`);
    button.append(picture(hit.image), make("span", "", label), make("span", "", hit.text));
    button.addEventListener("click", () => use(bytes(hit.image)));
    return button;
  });
  $("shelf-hits").replaceChildren(...rows);
  $("shelf-page").textContent = `${mode === "search" ? "likeliest, " : ""}page ${page + 1}`;
  $("shelf-back").disabled = page === 0;
  $("shelf-next").disabled = rows.length < each || (mode === "search" && page >= 20);
}

// The hits of the answer are the first page here, unless the user has turned pages meanwhile.
export function showSearch(found, begun) {
  if (turned > begun) return;
  mode = "search";
  page = 0;
  show(found);
}

export function start(store) {
  $("shelf").hidden = !store;
  document.documentElement.toggleAttribute("data-store", Boolean(store));
  if (!store) return;
  each = store.each;
  $("shelf-title").textContent = store.name;
  $("shelf-size").textContent = `${count(store.images)} images`;
  turn(0, "browse");
}
function turn(to, kind = mode) {
  turned = performance.now();
  page = to;
  mode = kind;
  load();
}
$("shelf-search").addEventListener("click", () => (isBlank() ? say("Draw something, or choose an image, then search.") : turn(0, "search")));
$("shelf-browse").addEventListener("click", () => turn(0, "browse"));
$("shelf-back").addEventListener("click", () => turn(Math.max(0, page - 1)));
$("shelf-next").addEventListener("click", () => turn(page + 1));
