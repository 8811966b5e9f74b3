// Follows the service's events and shows them; connects again by itself.

import { setModel, startChat } from "./chat.js";
import { $, callChart, el } from "./draw.js";
import { apps, contexts, experts, memory, ms, plans, tiles } from "./panels.js";
import { follow, useKey } from "./stream.js";

const SECONDS = 300, MOST_CALLS = 300;
let model = null, snapshot = null, calls = [], chosen = null, offset = 0;

const state = (name, text) => {
  $("state").dataset.state = name;
  // Told to screen readers only when it changes.
  if ($("state").textContent !== text) $("state").textContent = text;
};

function age(seconds) {
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  return days ? `${days} d ${hours} h` : hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

const now = () => Date.now() / 1000 + offset;

function health() {
  const { ready, alive, why } = snapshot.health;
  if (alive === false) state("trouble", "Engine does not respond");
  else if (ready) state("ready", "Ready");
  else state("trouble", why ? String(why).slice(0, 60) : "Not ready");
  $("uptime").textContent = model ? `up ${age(Math.max(0, now() - model.opened_s))}` : "";
}

function drawCalls() {
  const shown = calls.filter((call) => now() - call.time_s <= SECONDS);
  const box = $("calls");
  box.classList.toggle("bare", !shown.length);
  if (!shown.length) {
    box.replaceChildren(el("p", { class: "empty" }, "No calls in the last five minutes. Each answer shows here as a mark, by how its time to the first token compares with its objective."));
    $("call").textContent = "";
    return;
  }
  const { width, height } = box.getBoundingClientRect();
  box.replaceChildren(callChart(shown, { width, height, now: now(), seconds: SECONDS, chosen }));
  tell(shown);
}

/** The line below the marks: the chosen call, or the sum of all. */
function tell(shown) {
  const call = shown.find((each) => each.number === chosen);
  let parts;
  if (call) {
    const against = call.ttft_limit_ms ? ` of ${ms(call.ttft_limit_ms)} allowed` : ", no objective";
    parts = [el("strong", {}, call.app), ` · first token ${ms(call.ttft_ms)}${against} · ${ms(call.tpot_ms)} per token, ${call.tokens} tokens`];
    if (call.level !== null) parts.push(` · level ${call.level} %, plan ${call.source}`);
    if (call.reused_tokens) parts.push(` · reused ${call.reused_tokens} of ${call.prompt_tokens} tokens`);
    if (call.met !== null) parts.push(call.met ? " · in time" : " · late");
  } else {
    const late = shown.filter((each) => each.met === false).length;
    parts = [el("strong", {}, `${shown.length} ${shown.length === 1 ? "answer" : "answers"}`), ` in five minutes, ${late} late. Point at a mark, or use the arrow keys, for one call.`];
  }
  const line = el("span", {}, parts);
  if ($("call").textContent !== line.textContent) $("call").replaceChildren(line);
}

function choose(number) {
  chosen = number;
  drawCalls();
}

function listen() {
  const box = $("calls");
  const point = (event) => {
    const near = [...box.querySelectorAll(".mark")].map((mark) => {
      const place = mark.getBoundingClientRect();
      return [Math.hypot(place.x + place.width / 2 - event.clientX, place.y + place.height / 2 - event.clientY), mark];
    }).sort(([one], [other]) => one - other)[0];
    const number = near && near[0] < 24 ? Number(near[1].dataset.number) : null;
    if (number !== chosen) choose(number);
  };
  box.addEventListener("pointermove", point);
  box.addEventListener("pointerdown", point);
  box.addEventListener("pointerleave", (event) => {
    // A finger that is lifted leaves, too, and wants to read.
    if (event.pointerType === "mouse") choose(null);
  });
  box.addEventListener("keydown", (event) => {
    const numbers = calls.filter((call) => now() - call.time_s <= SECONDS).map((call) => call.number);
    const at = numbers.indexOf(chosen);
    const to = {
      ArrowLeft: at < 0 ? numbers.length - 1 : Math.max(0, at - 1), ArrowRight: at < 0 ? numbers.length - 1 : Math.min(numbers.length - 1, at + 1),
      Home: 0, End: numbers.length - 1,
    }[event.key];
    if (event.key === "Escape") choose(null);
    else if (to !== undefined && numbers.length) {
      event.preventDefault();
      choose(numbers[to]);
    }
  });
  new ResizeObserver(drawCalls).observe(box);
}

function draw() {
  const levels = model?.levels ?? [];
  health();
  tiles(snapshot, levels);
  memory(snapshot);
  apps(snapshot);
  plans(snapshot, levels);
  contexts(snapshot);
  experts(snapshot);
  drawCalls();
}

function facts(given) {
  model = given;
  $("model").textContent = model ? model.name : "";
  $("levels").textContent = model && model.levels.length > 1 ? `levels ${model.levels.join(", ")} %` : "";
  document.title = model ? `${model.name} · jaxllm` : "jaxllm";
  setModel(model);
}

function take(name, data) {
  if (name === "hello") {
    calls = data.calls;
  } else if (name === "calls") {
    calls = [...calls, ...data].slice(-MOST_CALLS);
  } else if (name === "snapshot") {
    // The device's clock counts, not the browser's.
    offset = data.time_s - Date.now() / 1000;
    snapshot = data;
    if (JSON.stringify(data.model) !== JSON.stringify(model)) facts(data.model);
    $("main").classList.remove("stale");
    draw();
  }
}

function changed(how) {
  if (how === "open") {
    state("connecting", "Connected");
    return null;
  }
  $("main").classList.add("stale");
  if (how === "lost") {
    state("connecting", "Reconnecting");
    return null;
  }
  state("trouble", how === "key" ? "Key needed" : "Operator's key needed");
  $("key-label").textContent = how === "key" ? "This service asks for a key. It stays in this tab."
    : "This page tells of all apps, and is for operators: use a key made with jaxllm keys add NAME --operator.";
  $("key-form").hidden = false;
  $("key").focus();
  return new Promise((resolve) => {
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      useKey($("key").value);
      $("key-form").hidden = true;
      resolve();
    }, { once: true });
  });
}

startChat();
listen();
drawCalls();
follow("/dashboard/events", take, changed);
