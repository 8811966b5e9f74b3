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

function post(path, body, { address = "", key = "", signal } = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  return fetch(`${address}${path}`, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Whether the model reasons before it answers; not where the service refuses to say. */
export async function thinks(where) {
  const response = await post("/api/show", { model: "default" }, where);
  return response.ok && (await response.json()).capabilities.includes("thinking");
}

/**
 * The answer to a conversation: pieces of its reasoning and of its text, then its facts. `think` switches the
 * reasoning; undefined leaves it to the model. Throws what the service reports.
 */
export async function* ask(messages, { think, ...where } = {}) {
  const max_tokens = think ? 4096 : 512;
  const body = { model: "default", messages, stream: true, max_tokens, enable_thinking: think };
  const response = await post("/v1/chat/completions", body, where);
  if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
  let facts = {};
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    facts = event.jaxllm ?? facts;
    const { reasoning_content: thought, content: text } = event.choices?.[0]?.delta ?? {};
    if (thought) yield { thought };
    if (text) yield { text };
  }
  return facts;
}

function begin() {
  const messages = [];
  const key = () => sessionStorage.getItem("key") ?? "";
  let running = null;

  async function offerThinking() {
    if (at("think-label").hidden)
      at("think-label").hidden = !(await thinks({ key: key() }).catch(() => false));
  }

  function add(role, text) {
    const said = Object.assign(document.createElement("p"), { className: role, textContent: text });
    at("chat").append(said);
    said.scrollIntoView({ block: "nearest" });
    return said;
  }

  /** A fold for the reasoning before `said`: open while it comes. */
  function fold(said) {
    const made = document.createElement("details");
    const summary = Object.assign(document.createElement("summary"), { textContent: "thinking" });
    made.append(summary, document.createElement("p"));
    made.open = true;
    said.before(made);
    return made;
  }

  async function send(text) {
    messages.push({ role: "user", content: text });
    add("user", text);
    const said = add("assistant", "");
    let thinking = null;
    running = new AbortController();
    at("send").textContent = "Stop";
    try {
      const think = at("think-label").hidden ? undefined : at("think").checked;
      const answer = ask(messages, { think, key: key(), signal: running.signal });
      let next = await answer.next();
      for (; !next.done; next = await answer.next()) {
        const { thought = "", text = "" } = next.value;
        if (thought) (thinking ??= fold(said)).lastChild.textContent += thought;
        if (text && thinking && !said.textContent) thinking.open = false;
        said.textContent += text;
      }
      const { ttft_ms: first, tpot_ms: further } = next.value;
      if (further) add("times", `first after ${first.toFixed(0)} ms, then ${(1000 / further).toFixed(0)} tokens/s`);
    } catch (error) {
      if (error.name !== "AbortError") add("times", error.message);
    }
    running = null;
    at("send").textContent = "Send";
    // A question without an answer is asked again, not answered later. The template decides which thoughts
    // the model sees again.
    const thought = thinking && { reasoning_content: thinking.lastChild.textContent };
    if (said.textContent) messages.push({ role: "assistant", content: said.textContent, ...thought });
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
  offerThinking();
  // The service may not have been ready, or not have had a key.
  at("said").addEventListener("focus", offerThinking);
  at("said").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || running) return;
    event.preventDefault();
    at("chat-form").requestSubmit();
  });
}

if (globalThis.document) begin();
