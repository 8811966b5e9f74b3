// Holds a conversation with the service, which this page alone remembers.

const at = (id) => document.getElementById(id);

/** The data of a stream's server-sent events as they come: objects, without the last, "[DONE]". */
async function* events(body) {
  let rest = "";
  for await (const part of body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + part).split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: {")) yield JSON.parse(line.slice("data: ".length));
  }
}

/** The answer to a conversation: its text in pieces, then its facts. Throws what the service reports. */
export async function* ask(messages, { address = "", key = "", signal } = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const body = JSON.stringify({ model: "default", messages, stream: true, max_tokens: 512 });
  const response = await fetch(`${address}/v1/chat/completions`, { method: "POST", headers, body, signal });
  if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
  let facts = {};
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    facts = event.jaxllm ?? facts;
    const piece = event.choices?.[0]?.delta?.content;
    if (piece) yield piece;
  }
  return facts;
}

function begin() {
  const messages = [];
  let running = null;

  function add(role, text) {
    const said = Object.assign(document.createElement("p"), { className: role, textContent: text });
    at("chat").append(said);
    said.scrollIntoView({ block: "nearest" });
    return said;
  }

  async function send(text) {
    messages.push({ role: "user", content: text });
    add("user", text);
    const said = add("assistant", "");
    running = new AbortController();
    at("send").textContent = "Stop";
    try {
      const answer = ask(messages, { key: sessionStorage.getItem("key") ?? "", signal: running.signal });
      let next = await answer.next();
      for (; !next.done; next = await answer.next()) said.textContent += next.value;
      const { ttft_ms: first, tpot_ms: further } = next.value;
      if (further) add("times", `first after ${first.toFixed(0)} ms, then ${(1000 / further).toFixed(0)} tokens/s`);
    } catch (error) {
      if (error.name !== "AbortError") add("times", error.message);
    }
    running = null;
    at("send").textContent = "Send";
    // A question without an answer is asked again, not answered later.
    if (said.textContent) messages.push({ role: "assistant", content: said.textContent });
    else messages.pop();
  }

  at("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("said").value.trim();
    if (running) running.abort();
    else if (text) {
      at("said").value = "";
      send(text);
    }
  });
  at("said").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || running) return;
    event.preventDefault();
    at("chat-form").requestSubmit();
  });
}

if (globalThis.document) begin();
