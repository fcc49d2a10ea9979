// Requests: they carry the token from the address and this tab's session; errors are one line.

export const $ = (id) => document.getElementById(id);
let token = location.hash.slice(1) || sessionStorage.getItem("kanerva-token") || "";
if (token) sessionStorage.setItem("kanerva-token", token);
let session = sessionStorage.getItem("kanerva-session") || "";
let slow = 0;

export function setSession(id) {
  session = id;
  sessionStorage.setItem("kanerva-session", id);
}
// The session is gone, because the server was restarted or needed room: reload the page.
function startAgain() {
  setSession("");
  location.reload();
}
export const hasSession = () => session !== "";

let timer = 0;
export function say(text) {
  const toast = $("toast");
  toast.textContent = text;
  toast.classList.add("on");
  clearTimeout(timer);
  timer = setTimeout(() => toast.classList.remove("on"), 4500);
}

// A request that takes longer than a tenth of a second shows that it is working.
function working() {
  let shown = false;
  const timer = setTimeout(() => {
    shown = true;
    slow += 1;
    $("busy").classList.add("on");
  }, 100);
  return () => {
    clearTimeout(timer);
    if (shown) slow -= 1;
    if (slow === 0) $("busy").classList.remove("on");
  };
}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

const headed = () => ({ authorization: `Bearer ${token}`, "x-session": session });

// Send a request without waiting for the answer.
export const leave = () => fetch("api/leave", { method: "POST", headers: headed(), keepalive: true }).catch(() => {});

export async function ask(name, body = {}, raw = false) {
  const done = working();
  try {
    const file = body instanceof Blob;
    const headers = headed();
    headers["content-type"] = file ? "application/octet-stream" : "application/json";
    const sent = name === "about" ? {} : { method: "POST", body: file ? body : JSON.stringify(body) };
    const answer = await fetch(`api/${name}`, { headers, ...sent }).catch(() => {
      throw new Refused(0, "kanerva explore has ended, or cannot be reached.");
    });
    if (answer.status === 410 && name !== "resume") startAgain();
    if (!answer.ok) throw new Refused(answer.status, (await answer.json()).error);
    return raw ? answer.blob() : answer.json();
  } finally {
    done();
  }
}

// One request at a time; while it runs, only the latest further request is kept.
export function latest(work) {
  let running = false;
  let next = null;
  return async function wish(...given) {
    next = given;
    if (running) return;
    running = true;
    try {
      while (next) {
        const now = next;
        next = null;
        await work(...now);
      }
    } catch (error) {
      say(error.message);
    } finally {
      running = false;
    }
  };
}
