// Vercel's AI SDK: loops of tools, objects beside tools and streams, over chats, responses, Anthropic's messages and
// Ollama's chats.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const url = process.argv[2];
const [THOUGHT, TEXT] = ["They ask for the weather.", "It is 21 degrees in Paris."];
const own = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(own);
const thinking = { anthropic: { thinking: { type: "enabled", budgetTokens: 500 } } };
const effort = { openai: { reasoningEffort: "high", reasoningSummary: "auto", forceReasoning: true, store: false } };
const cases = {
  compatible: [
    createOpenAICompatible({ name: "own", ...own, supportsStructuredOutputs: true })("default"),
    { own: { reasoningEffort: "high" } },
  ],
  responses: [openai.responses("default"), effort],
  anthropic: [createAnthropic(own)("default"), thinking],
  ollama: [createOllama({ baseURL: `${url}/api` })("default"), { ollama: { think: true } }],
};
const prompt = "What is the weather in Paris?";
for (const [name, [model, providerOptions]] of Object.entries(cases)) {
  let asked = 0;
  const tools = {
    weather: tool({
      description: "Tells the weather.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => ((asked += 1), assert.equal(city, "Paris"), "21 degrees"),
    }),
  };
  const options = {
    model, prompt, tools, providerOptions, stopWhen: stepCountIs(3), maxRetries: 0,
    // The provider for Ollama sends it under a name that Ollama does not know.
    ...(name === "ollama" ? {} : { maxOutputTokens: 900 }),
  };
  const whole = await generateText(options);
  assert.equal(whole.text, TEXT, name);
  assert.equal(whole.steps[0].reasoningText, THOUGHT, name);
  let inputs = 0;
  let failure;
  const stream = streamText({
    ...options,
    onError: ({ error }) => (failure = error),
    onChunk: ({ chunk }) => (inputs += chunk.type === "tool-input-delta" ? 1 : 0),
  });
  await stream.consumeStream();
  assert.equal(failure, undefined, name);
  assert.equal(await stream.text, TEXT, name);
  assert.equal(asked, 2, name);
  // Ollama's format has a call's arguments as an object.
  assert.ok(inputs > (name === "ollama" ? 0 : 1), `${name}: ${inputs}`);
  if (name === "anthropic" || name === "ollama") continue;
  const schema = z.object({ city: z.string(), degrees: z.number().int() });
  const typed = await generateText({ ...options, output: Output.object({ schema }) });
  assert.deepEqual(typed.output, { city: "Paris", degrees: 21 }, name);
}
