// The page as a whole: start, write, files, keyboard.

import { $, ask, hasSession, latest, leave, Refused, say, setSession } from "./api.js";
import * as answer from "./answer.js";
import * as easel from "./canvas.js";
import * as dream from "./dream.js";
import * as memory from "./memory.js";
import { about, bytes, make, picture } from "./paint.js";
import * as shelf from "./shelf.js";
import { tick } from "./tour.js";

const EXAMPLES = 12;
const LARGEST = 12e6;
const served = { first: "", store: null, models: [], version: "" };
let examples = [];
let seed = 0;

async function start(model = null) {
  let begun = null;
  if (model === null && hasSession()) begun = await ask("resume").catch(() => null);
  begun ??= await ask("start", model === null ? {} : { model });
  if (model !== null) await ask("end").catch(() => null); // the session of the previous model
  setSession(begun.session);
  Object.assign(about, begun.about);
  $("model").value = about.name;
  document.documentElement.style.setProperty("--shape", `${about.image[2]} / ${about.image[1]}`);
  $("shrink").hidden = !about.can.shrink;
  $("set").replaceChildren(...about.sets.map((name) => new Option(name.replace("_", "-"), name)));
  $("set").parentElement.hidden = about.sets.length < 2;
  const mine = about.name === served.first ? served.store : null; // a store belongs to its model
  answer.offerStore(mine);
  easel.reset();
  dream.reset();
  memory.accept(begun.state);
  shelf.start(mine);
  await showExamples();
}

const showExamples = latest(async () => {
  examples = about.sets.length ? (await ask("examples", { set: $("set").value, count: EXAMPLES, seed })).images : [];
  const buttons = examples.map((image, index) => {
    const button = make("button");
    button.type = "button";
    button.setAttribute("aria-label", `Example ${index + 1}`);
    button.append(picture(image));
    button.addEventListener("click", () => use(bytes(image)));
    return button;
  });
  $("examples").replaceChildren(...buttons);
  $("write-all").disabled = $("more").disabled = !examples.length;
});

async function write(images) {
  const state = await memory.change("write", { images });
  if (state) tick("write");
  return state;
}
async function writeDrawn() {
  if (easel.isBlank()) return say("Draw something first, or choose an example.");
  const state = await write([easel.image()]);
  if (state?.new) memory.choose(state.new.at(-1));
}
async function writeExamples() {
  const room = memory.memory.capacity === null ? EXAMPLES : memory.memory.capacity - memory.memory.held.length;
  if (room < 1) return say("The memory is full: free something first.");
  await write(examples.slice(0, room));
}

async function takeFiles(files) {
  const images = [];
  for (const file of files) {
    if (/\.(kanerva|safetensors)$/.test(file.name)) return openMemory(file);
    if (file.size > LARGEST) {
      say(`${file.name}: a file has at most 12 MB.`);
      continue;
    }
    try {
      images.push((await ask("decode", file)).image);
    } catch (error) {
      say(`${file.name}: ${error.message}`);
    }
  }
  if (!images.length) return;
  easel.put(bytes(images.at(-1)));
  await write(images);
}
async function openMemory(file) {
  if (file.size > LARGEST) return say("That is larger than any memory.");
  if (await memory.change("open", file)) say(`Opened ${file.name}.`);
}
async function save() {
  try {
    const link = make("a");
    link.href = URL.createObjectURL(await ask("save", {}, true));
    link.download = "memory.kanerva";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  } catch (error) {
    say(error.message);
  }
}

// The parts do not know each other; they are connected here.
easel.onChange(() => {
  if (easel.isDamaged() && !easel.isBlank()) tick("damage");
  answer.update();
});
function use(image) {
  easel.heal();
  easel.put(image);
}
memory.onUse(use);
shelf.onUse(use);
memory.onChange(() => {
  if (!shrinking) {
    $("bits").value = 100; // the slider does not show later writes, frees and undos
    showBits();
  }
  answer.update();
  dream.refresh();
});
answer.onAnswer(() => easel.isDamaged() && tick("find"));
dream.onDream(() => tick("forget"));
answer.onSearch(shelf.showSearch);

$("write").addEventListener("click", writeDrawn);
$("write-all").addEventListener("click", writeExamples);
$("tour-write").addEventListener("click", writeExamples);
$("tour-damage").addEventListener("click", () => {
  const held = memory.memory.held;
  if (easel.isBlank() && held.length) {
    memory.choose(held[0].handle);
    easel.put(bytes(held[0].image));
  }
  if (easel.isBlank()) return say("Write something first.");
  easel.hide("lower");
});
$("blank").addEventListener("click", () => (easel.reset(), answer.update()));
$("more").addEventListener("click", () => ((seed += 1), showExamples()));
$("set").addEventListener("change", showExamples);
$("free").addEventListener("click", () => tick("forget"));
$("save").addEventListener("click", save);
$("open").addEventListener("click", () => $("memory-file").click());
$("files").addEventListener("click", () => $("image-files").click());
$("memory-file").addEventListener("change", (event) => event.target.files[0] && openMemory(event.target.files[0]).then(() => (event.target.value = "")));
$("image-files").addEventListener("change", (event) => takeFiles([...event.target.files]).then(() => (event.target.value = "")));
$("model").addEventListener("change", () =>
  start($("model").value).catch((error) => {
    $("model").value = about.name; // keep the old model
    say(error.message);
  }),
);

let shrinking = false;
const shrink = latest(async (bits) => {
  shrinking = true;
  await memory.change("shrink", { bits, again: true });
  shrinking = false;
});
function showBits() {
  const bits = Math.round(2 ** (Number($("bits").value) / 10) - 1);
  $("bits-out").textContent = bits >= 1023 ? "all" : String(bits);
  return bits >= 1023 ? 65535 : bits;
}
$("bits").addEventListener("input", () => shrink(showBits()));

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]") || event.target.matches("select, input:not([type=radio], [type=checkbox])")) return;
  const key = event.key.toLowerCase();
  if ((event.ctrlKey || event.metaKey) && key === "z") memory.change(event.shiftKey ? "redo" : "undo");
  else if ((event.ctrlKey || event.metaKey) && key === "y") memory.change("redo");
  else if (event.ctrlKey || event.metaKey || event.altKey) return;
  else if (key === "w") writeDrawn();
  else if (key === "c") $("blank").click();
  else if (key === "delete" || key === "backspace") memory.freeChosen();
  else if ("deh".includes(key)) document.querySelector(`input[value=${{ d: "ink", e: "paper", h: "hide" }[key]}]`).click();
  else if (key === "?") $("help").click();
  else return;
  event.preventDefault();
});
for (const name of ["dragover", "dragleave", "drop"])
  addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("on", name === "dragover");
    if (name === "drop") takeFiles([...event.dataTransfer.files]);
  });

addEventListener("pagehide", () => hasSession() && leave());

function fail(error) {
  const hint = error instanceof Refused && error.status === 401 ? "Open the whole address that kanerva explore printed: its end is a token." : error.message;
  $("verdict").textContent = hint;
  say(hint);
}
try {
  Object.assign(served, await ask("about"));
  $("version").textContent = `kanerva ${served.version}`;
  $("model").replaceChildren(...served.models.map((name) => new Option(name, name)));
  await start();
  document.documentElement.dataset.ready = "true";
} catch (error) {
  fail(error);
}
