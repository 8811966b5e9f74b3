// The packages `openai`, `@anthropic-ai/sdk` and `ollama` of npm.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";

const url = process.argv[2];
const [THOUGHT, TEXT] = ["They ask for the weather.", "It is 21 degrees in Paris."];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const schema = { type: "object", properties: { degrees: { type: "integer" } }, required: ["degrees"] };
const fn = { name: "weather", description: "Tells the weather.", parameters };
const asked = [{ role: "user", content: "What is the weather in Paris?" }];

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chat = { model: "default", tools: [{ type: "function", function: fn }], reasoning_effort: "high" };
const streamed = openai.chat.completions.stream({ ...chat, messages: asked });
// Of fields that it does not know the class keeps the last piece.
let reasoning = "";
streamed.on("chunk", (chunk) => (reasoning += chunk.choices[0]?.delta.reasoning_content ?? ""));
const first = (await streamed.finalChatCompletion()).choices[0].message;
assert.equal(reasoning, THOUGHT);
const [call] = first.tool_calls;
assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
const said = { role: "assistant", content: null, reasoning_content: THOUGHT };
const turns = [
  ...asked,
  { ...said, tool_calls: [{ id: call.id, type: "function", function: { name: "weather", arguments: "{}" } }] },
  { role: "tool", tool_call_id: call.id, content: "21 degrees" },
];
const format = { type: "json_schema", json_schema: { name: "report", schema } };
const typed = await openai.chat.completions.create({ ...chat, messages: turns, response_format: format });
assert.deepEqual(JSON.parse(typed.choices[0].message.content), { degrees: 21 });
const events = [];
const response = { model: "default", tools: [{ type: "function", ...fn }], reasoning: { effort: "high" } };
for await (const event of await openai.responses.create({ ...response, input: asked, stream: true })) {
  events.push(event.type);
}
assert.ok(events.filter((each) => each === "response.reasoning_text.delta").length > 1, events);
assert.equal(events.at(-1), "response.completed");

const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = {
  model: "default", max_tokens: 900, thinking: { type: "enabled", budget_tokens: 500 },
  tools: [{ name: "weather", input_schema: parameters }],
};
const message = await anthropic.messages.stream({ ...messages, messages: asked }).finalMessage();
const [thought, use] = message.content;
assert.deepEqual([thought.thinking, use.input], [THOUGHT, { city: "Paris" }]);
const result = { type: "tool_result", tool_use_id: use.id, content: "21 degrees" };
const last = await anthropic.messages.create({
  ...messages,
  messages: [...asked, { role: "assistant", content: message.content }, { role: "user", content: [result] }],
});
assert.equal(last.content.at(-1).text, TEXT);

const ollama = new Ollama({ host: url });
const local = { model: "default", tools: [{ type: "function", function: fn }], think: true };
let thinking = "";
let calls = [];
for await (const part of await ollama.chat({ ...local, messages: asked, stream: true })) {
  thinking += part.message.thinking ?? "";
  calls = calls.concat(part.message.tool_calls ?? []);
}
assert.equal(thinking, THOUGHT);
assert.deepEqual(calls[0].function.arguments, { city: "Paris" });
const told = [
  ...asked,
  { role: "assistant", content: "", thinking, tool_calls: calls },
  { role: "tool", tool_name: "weather", content: "21 degrees" },
];
assert.equal((await ollama.chat({ ...local, messages: told })).message.content, TEXT);
assert.equal((await ollama.chat({ ...local, messages: told, format: schema })).message.content, '{"degrees": 21}');

// All other methods of the package.
{
  const options = { num_gpu: 1, num_ctx: 1 << 20 };
  const first = await ollama.generate({ model: "default", prompt: "Hi", options });
  assert.deepEqual([first.response, first.context.length > 0], ["Hello there.", true]);
  const next = await ollama.generate({ model: "default", prompt: "And?", context: first.context, keep_alive: "5m" });
  assert.deepEqual(next.context.slice(0, first.context.length), first.context);
  assert.equal((await ollama.generate({ model: "default", prompt: "", keep_alive: 0 })).done_reason, "unload");
  assert.equal((await ollama.chat({ model: "default", messages: [] })).done_reason, "load");
  assert.equal((await ollama.embed({ model: "default", input: ["a", "b"] })).embeddings.length, 2);
  assert.equal((await ollama.embeddings({ model: "default", prompt: "a" })).embedding.length, 2);
  const [[listed], [running]] = [(await ollama.list()).models, (await ollama.ps()).models];
  assert.deepEqual([running.name, running.digest], [listed.name, listed.digest]);
  assert.ok((await ollama.show({ model: "default" })).capabilities.includes("tools"));
  assert.equal((await ollama.pull({ model: "default" })).status, "success");
  for await (const part of await ollama.pull({ model: "default", stream: true })) assert.ok(part.status);
  assert.ok((await ollama.version()).version);
  for (const refused of [
    () => ollama.pull({ model: "llama3.2" }), () => ollama.push({ model: "default" }),
    () => ollama.create({ model: "x", from: "default" }), () => ollama.delete({ model: "default" }),
    () => ollama.copy({ source: "default", destination: "x" }),
  ]) {
    await assert.rejects(refused, /one model/);
  }
}
