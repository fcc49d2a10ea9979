// The memory's answer for the image: which stored image it is, with a probability, or none.

import { $, ask, latest } from "./api.js";
import { cue, isBlank } from "./canvas.js";
import { find, memory } from "./memory.js";
import { about, bytes, count, erase, make, paint, percent, picture } from "./paint.js";

const SHOWN = 5;
let answered = () => {};
let searched = () => {};
let best = null;
let steps = [];
let playing = 0;
let later = 0;

export function onAnswer(callback) {
  answered = callback;
}
export function onSearch(callback) {
  searched = callback;
}

// If there is a store, search it first.
export function offerStore(offered) {
  $("source").hidden = !offered;
  document.querySelector(`input[name=source][value=${offered ? "store" : "memory"}]`).checked = true;
}
for (const choice of document.querySelectorAll("input[name=source]")) choice.addEventListener("change", () => update());

export const asksStore = () => document.querySelector("input[name=source]:checked").value === "store";
const something = () => asksStore() || memory.held.length > 0;

export const update = latest(async () => {
  clearTimeout(later);
  $("reading").hidden = !about.can.recall || isBlank() || !memory.held.length || asksStore();
  if (isBlank() || !something()) return quiet();
  const asked = cue();
  if (asksStore()) {
    const begun = performance.now();
    const found = await ask("search", asked);
    paint($("cue"), found.cue);
    show(found.none, found.hits.map((hit) => ({ ...hit, name: `no. ${hit.id}` })));
    $("details").replaceChildren();
    searched(found, begun);
    answered(found);
    return;
  }
  if (!about.can.find) {
    $("bars").replaceChildren();
    const read = await ask("steps", { ...asked, count: 8 });
    paint($("cue"), read.cue);
    paint($("recalled"), read.steps.at(-1));
    verdict("Recalled", "after eight readings; this model keeps no separate blocks to choose from");
  } else {
    const found = await ask("find", asked);
    paint($("cue"), found.cue);
    const known = found.hits.filter((hit) => find(hit.handle));
    show(found.none, known.map((hit) => ({ ...hit, name: `image ${hit.handle}`, image: find(hit.handle).image })));
    answered(found);
    best = found.hits[0]?.handle;
  }
  later = setTimeout(() => explain(asked), 120);
});

// Slower requests wait until the user pauses, so that the bars keep up with the hand.
const explain = latest(async (asked) => {
  const found = await ask("details", asked);
  if (isBlank() || asksStore() || !memory.held.length) return;
  showDetails(found);
  if ($("reading").open) await read(asked);
});

function quiet() {
  const text = something() ? "Draw something, or choose an image." : "Nothing is written yet.";
  const hint = something() ? "" : "Draw an image and write it, or write the examples.";
  verdict(text, hint);
  if (isBlank()) erase($("cue"));
  else paint($("cue"), bytes(cue().image));
  erase($("recalled"));
  $("recalled-caption").textContent = "recalled";
  $("bars").replaceChildren();
  $("details").replaceChildren();
}

function verdict(text, hint, none = false) {
  const line = $("verdict");
  const wanted = `${text}|${hint}`;
  if (line.dataset.shown === wanted) return; // otherwise a screen reader would repeat it at every stroke
  line.dataset.shown = wanted;
  line.replaceChildren(text);
  if (hint) line.append(make("small", "", hint));
  line.classList.toggle("none", none);
  mini.text = hint && something() ? `${text} ${hint}` : "";
  showMini();
}

// On a phone the answer may be out of sight: then a line at the foot of the screen repeats it.
const mini = { text: "", away: false };
function showMini() {
  $("mini-text").textContent = mini.text;
  $("mini").classList.toggle("on", mini.away && mini.text !== "");
}
new IntersectionObserver(([seen]) => {
  mini.away = !seen.isIntersecting;
  showMini();
}).observe($("bars"));
$("mini").addEventListener("click", () => $("answer").scrollIntoView({ behavior: "smooth" }));

function show(none, hits) {
  if (!hits.length) return verdict("It is not here.", "nothing is held", true);
  const first = hits[0];
  const [down, right] = first.shift;
  const moved = [right && `${Math.abs(right)} px ${right > 0 ? "right" : "left"}`, down && `${Math.abs(down)} px ${down > 0 ? "down" : "up"}`];
  const how = moved.some(Boolean) ? `, moved ${moved.filter(Boolean).join(" and ")}` : "";
  if (none >= 0.5) verdict("It is not here.", `${percent(none)} sure that none of these was shown`, true);
  else if (first.p >= 0.5) verdict(`It is ${first.name}${how}.`, `${percent(first.p)} sure`);
  else verdict(`Perhaps ${first.name}${how}.`, `${percent(first.p)}, the likeliest of all`);
  paint($("recalled"), first.image);
  paint($("mini-picture"), first.image);
  $("recalled-caption").textContent = none >= 0.5 ? "nearest it has" : first.name;
  const rows = hits.slice(0, SHOWN).map((hit) => bar(picture(hit.image), hit.name, hit.p));
  const rest = 1 - none - hits.slice(0, SHOWN).reduce((sum, hit) => sum + hit.p, 0);
  if (hits.length > SHOWN) rows.push(bar(null, asksStore() ? "others" : `${hits.length - SHOWN} others`, Math.max(0, rest)));
  rows.push(bar(null, "not here", none, "none"));
  $("bars").replaceChildren(...rows);
}

function bar(icon, name, p, className = "") {
  const row = make("li", className);
  const track = make("div", "track");
  const fill = make("div", "fill");
  fill.style.width = `${100 * p}%`;
  track.append(fill);
  row.append(icon ?? make("span"), make("span", "", name), track, make("span", "p", percent(p)));
  return row;
}

function showDetails({ familiarity, bound, nearest }) {
  const rows = [];
  const row = (name, text, title, className = "") => {
    const term = make("dt", "", name);
    term.title = title;
    rows.push(term, make("dd", className, text));
  };
  const nats = (value) => (value === null ? "∞" : `${Math.abs(value) > 999 ? count(value) : value.toFixed(1)} nats`.replace("-", "−"));
  if (about.can.find) row("familiarity", familiarity === null ? "–" : nats(familiarity), "How much better a block explains your image than no block does. Above zero: it was written.");
  if (nearest) {
    const other = about.can.find && nearest.handle !== best;
    row("nearest pixels say", `image ${nearest.handle}`, "What a search for the least squared error on visible pixels would give; it cannot say that an image is not here.", other ? "differs" : "");
  }
  if (bound) {
    row("your image costs", nats(bound.total), "An upper bound on -ln p(image | memory). Low for what is held.");
    row("= pixels + KL z + KL y", `${[bound.log_likelihood, bound.readout_kl, bound.key_kl].map((v) => (v === null ? "∞" : v.toFixed(1))).join(" + ")}`, "The three terms of the bound");
  }
  $("details").replaceChildren(...rows);
}

// Iterative reading, step by step

async function read(asked = cue()) {
  const found = await ask("steps", { ...asked, count: 8, sample: $("sample").checked });
  steps = [found.cue, ...found.steps];
  $("steps").replaceChildren(...steps.map(picture));
  $("scrub").max = steps.length - 1;
  if (!playing) scrub(steps.length - 1);
}

function scrub(step) {
  $("scrub").value = step;
  $("scrub-out").textContent = step === 0 ? "cue" : `step ${step}`;
  [...$("steps").children].forEach((canvas, index) => canvas.classList.toggle("on", index === step));
  if (steps[step]) paint($("recalled"), steps[step]);
  $("recalled-caption").textContent = step === 0 ? "the cue" : `step ${step}`;
}

function stop() {
  clearInterval(playing);
  playing = 0;
  $("play").textContent = "Play";
}
$("play").addEventListener("click", () => {
  if (playing) return stop();
  $("play").textContent = "Pause";
  if (Number($("scrub").value) >= steps.length - 1) scrub(0);
  playing = setInterval(() => {
    const step = Number($("scrub").value) + 1;
    if (step >= steps.length) return stop();
    scrub(step);
  }, 350);
});
$("scrub").addEventListener("input", () => (stop(), scrub(Number($("scrub").value))));
$("sample").addEventListener("change", () => update());
$("reading").addEventListener("toggle", () => ($("reading").open ? update() : (stop(), update())));
