// The Vercel AI SDK with its `@ai-sdk/openai-compatible` provider, under node's own test runner.
//
// What it requires that others do not: it validates each chunk with its own zod schema and reads
// `reasoning_content` by that name; a tool call's first delta must have `id` and `function.name`; it
// reads usage in streams only with `includeUsage`, from the last chunk; error bodies must have OpenAI's
// shape, or its APICallError has no message.

import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError, embedMany, generateObject, generateText, Output, stepCountIs, streamObject,
  streamText, tool,
} from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "penstock", baseURL: `${process.env.PENSTOCK_DEMO}/v1`, apiKey: "none",
  includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider("penstock-demo");
const request = { model, prompt: "Who are you?", temperature: 0, maxRetries: 0 };
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });

test("generateText gives text, a finish reason and usage", async () => {
  const { text, finishReason, usage } = await generateText(request);
  assert.match(text, /Penstock/);
  assert.equal(finishReason, "stop");
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
});

test("streamText adds up to the unstreamed text and ends with usage", async () => {
  const { text } = await generateText(request);
  const result = streamText(request);
  let joined = "";
  for await (const piece of result.textStream) joined += piece;
  assert.equal(joined, text);
  assert.equal(await result.finishReason, "stop");
  assert.ok((await result.usage).outputTokens > 0);
});

test("generateObject and streamObject follow a zod schema", async () => {
  Person.parse((await generateObject({ ...request, schema: Person })).object);
  const result = streamObject({ ...request, schema: Person });
  for await (const _ of result.partialObjectStream);
  Person.parse(await result.object);
});

for (const [name, run] of [["generateText", generateText], ["streamText", streamText]]) {
  test(`${name} calls a tool and continues`, async () => {
    const cities = [];
    const get_weather = tool({
      description: "The weather in a city.",
      inputSchema: z.object({ city: z.string().max(12) }),
      execute: async ({ city }) => (cities.push(city), "sunny"),
    });
    const result = await run({
      ...request, tools: { get_weather }, stopWhen: stepCountIs(3), maxOutputTokens: 200,
      // The demo model calls no tool by itself: the first step forces a call.
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    assert.ok((await result.text).length > 0);
    assert.equal((await result.steps).length, 2);
    assert.equal(cities.length, 1);
  });
}

test("generateText calls a tool and then gives an object", async () => {
  const get_weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string().max(12) }),
    execute: async () => "sunny",
  });
  const result = await generateText({
    ...request, tools: { get_weather }, stopWhen: stepCountIs(3), maxOutputTokens: 200,
    output: Output.object({ schema: Person }),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  });
  assert.equal(result.steps[0].finishReason, "tool-calls");
  if (result.finishReason === "stop") Person.parse(result.output);
});

test("embedMany gives a vector for each text", async () => {
  const embedder = provider.embeddingModel("penstock-demo");
  const { embeddings } = await embedMany({ model: embedder, values: ["one", "two"] });
  assert.equal(embeddings.length, 2);
});

test("an error has the server's own message", async () => {
  await assert.rejects(
    generateText({ ...request, model: provider("gpt-4o") }),
    (e) => APICallError.isInstance(e) && e.statusCode === 404 && /gpt-4o/.test(e.message),
  );
});
