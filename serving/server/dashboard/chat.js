// A chat box over /v1/chat/completions: streams an answer, and tells its plan, level and times.

import { $, el } from "./draw.js";
import { ms } from "./panels.js";
import { headers, readEvents } from "./stream.js";

let messages = [];
let running = null;
let model = null;

const atEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

function add(kind, text) {
  const log = $("chat-log");
  log.querySelector(".empty")?.remove();
  const turn = el("div", { class: kind }, text);
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return turn;
}

function empty() {
  messages = [];
  $("chat-log").replaceChildren(el("p", { class: "empty" },
    "Ask the model something. An objective asks for a share of the time that the whole model takes: the service answers with the largest level that is in time."));
  $("chat-clear").hidden = true;
}

/** What the service said of an answer, as words. */
function told(facts, usage) {
  const parts = [];
  if (facts.level !== undefined) parts.push(`level ${facts.level} %`);
  if (facts.source !== undefined) parts.push(`plan ${facts.source}`);
  const prompt = facts.prompt_tokens ?? usage?.prompt_tokens;
  if (facts.kept_tokens !== undefined && prompt) parts.push(`kept ${facts.kept_tokens} of ${prompt} tokens`);
  if (facts.reused_tokens) parts.push(`reused ${facts.reused_tokens}`);
  if (facts.ttft_ms !== undefined) parts.push(`first token ${ms(facts.ttft_ms)}`);
  if (facts.tpot_ms) parts.push(`${ms(facts.tpot_ms)} per token`);
  if (usage?.completion_tokens) parts.push(`${usage.completion_tokens} tokens`);
  const line = el("p", { class: "told faint" }, parts.join(" · "));
  if (typeof facts.met === "boolean") {
    line.append(" · ", el("span", { class: facts.met ? "met" : "late" }, facts.met ? "in time" : "late"));
  }
  return line;
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The service answered with status ${response.status}.`;
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  add("turn user", text);
  const turn = add("turn assistant waiting", "");
  running = new AbortController();
  const slo = $("chat-slo").value;
  const body = { model: model.name, messages, stream: true, stream_options: { include_usage: true }, ...(slo ? { slo } : {}) };
  let answer = "", facts = {}, usage, failure;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), signal: running.signal,
      headers: headers({ "Content-Type": "application/json" }),
    });
    if (!response.ok) throw new Error(await messageOf(response));
    await readEvents(response, (_, data) => {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) failure = chunk.error.message;
      const stay = atEnd($("chat-log"));
      answer += chunk.choices?.[0]?.delta?.content ?? "";
      turn.textContent = answer;
      usage = chunk.usage ?? usage;
      facts = { ...facts, ...(chunk.jaxllm ?? chunk.usage?.jaxllm ?? {}) };
      if (stay) $("chat-log").scrollTop = $("chat-log").scrollHeight;
    });
    if (failure) throw new Error(failure);
    $("chat-log").append(told(facts, usage));
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!answer) turn.textContent = stopped ? "Stopped." : error.message;
    else add("told faint", stopped ? "Stopped." : error.message);
    turn.classList.toggle("failed", !stopped);
  } finally {
    turn.classList.remove("waiting");
    running = null;
    // A question that was not answered is not part of the conversation.
    if (answer) messages.push({ role: "assistant", content: answer });
    else messages.pop();
    $("chat-log").scrollTop = $("chat-log").scrollHeight;
  }
}

function buttons() {
  $("chat-send").textContent = running ? "Stop" : "Send";
  $("chat-send").disabled = !model?.has_chat_template;
  $("chat-clear").hidden = !messages.length || running !== null;
}

async function send(event) {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const field = $("chat-text");
  const text = field.value.trim();
  if (!text || !model?.has_chat_template) return;
  field.value = "";
  const answered = ask(text);
  buttons();
  await answered;
  buttons();
}

/** Says which model answers; null while it is loading. */
export function setModel(facts) {
  model = facts;
  const field = $("chat-text");
  field.disabled = Boolean(model && !model.has_chat_template);
  field.placeholder = field.disabled ? "This model has no chat template: it cannot answer conversations." : "Ask something";
  buttons();
}

export function startChat() {
  empty();
  buttons();
  $("chat-form").addEventListener("submit", send);
  $("chat-clear").addEventListener("click", () => {
    empty();
    $("chat-text").focus();
  });
  $("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !running) send(event);
  });
}
