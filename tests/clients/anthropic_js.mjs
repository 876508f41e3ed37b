// Anthropic's JavaScript client, against `/v1/messages`, under node's own test runner.
//
// What it requires that others do not: named events in pairs, as in Python; tool input whose deltas
// concatenate to JSON, since it parses `fine-grained` input at every delta; errors of Anthropic's shape;
// that `beta=true` in the query changes nothing. `zodOutputFormat` removes the bounds from a schema
// before sending it.

import assert from "node:assert/strict";
import test from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const MODEL = "penstock-demo";
const MESSAGES = [{ role: "user", content: "Who are you?" }];
const WEATHER = {
  name: "get_weather",
  description: "The weather in a city.",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", maxLength: 12 } },
    required: ["city"],
  },
};
const ONE_CALL = { type: "any", disable_parallel_tool_use: true };
const client = clientOf(process.env.PENSTOCK_DEMO);
const scripted = clientOf(process.env.PENSTOCK_SCRIPTED);

function clientOf(baseURL, options = {}) {
  return new Anthropic({ baseURL, apiKey: "none", maxRetries: 0, ...options });
}

/** The demo model calls no tool by itself: the first turn forces a call, the next forbids one. */
async function withOneCall(url, init) {
  const body = JSON.parse(init.body);
  const isFirst = body.messages.length === MESSAGES.length;
  body.tool_choice = isFirst ? ONE_CALL : { type: "none" };
  const headers = new Headers(init.headers);
  headers.delete("content-length");
  return fetch(url, { ...init, headers, body: JSON.stringify(body) });
}

function textOf(message) {
  return message.content.filter((b) => b.type === "text").map((b) => b.text).join("");
}

test("a message has text, a stop reason, usage and a request id", async () => {
  const message = await client.messages.create({
    model: MODEL, max_tokens: 200, messages: MESSAGES, temperature: 0,
  });
  assert.match(textOf(message), /Penstock/);
  assert.equal(message.stop_reason, "end_turn");
  assert.ok(message.usage.output_tokens > 0);
});

test("a raw stream is iterated to its end", async () => {
  const kinds = [];
  const stream = await client.messages.create({
    model: MODEL, max_tokens: 200, messages: MESSAGES, stream: true,
  });
  for await (const event of stream) kinds.push(event.type);
  assert.equal(kinds[0], "message_start");
  assert.equal(kinds.at(-1), "message_stop");
});

test("the stream helper gives text and the whole message", async () => {
  const fields = { model: MODEL, max_tokens: 200, messages: MESSAGES, temperature: 0 };
  const plain = await client.messages.create(fields);
  let text = "";
  const stream = client.messages.stream(fields).on("text", (piece) => (text += piece));
  const final = await stream.finalMessage();
  assert.equal(text, textOf(plain));
  assert.equal(textOf(final), text);
  assert.equal(final.usage.output_tokens, plain.usage.output_tokens);
});

test("a streamed tool use is built, and its result accepted", async () => {
  let pieces = "";
  const stream = client.messages.stream({
    model: MODEL, max_tokens: 200, messages: MESSAGES, tools: [WEATHER], tool_choice: ONE_CALL,
  }).on("inputJson", (piece) => (pieces += piece));
  const first = await stream.finalMessage();
  const use = first.content.find((block) => block.type === "tool_use");
  assert.equal(first.stop_reason, "tool_use");
  assert.deepEqual(use.input, JSON.parse(pieces));
  const second = await client.messages.create({
    model: MODEL, max_tokens: 200, tools: [WEATHER],
    messages: [
      ...MESSAGES,
      { role: "assistant", content: first.content },
      { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "sunny" }] },
    ],
  });
  assert.equal(second.role, "assistant");
});

test("the tool runner calls the function and continues", async () => {
  const cities = [];
  const tool = betaZodTool({
    name: "get_weather", description: "The weather.",
    inputSchema: z.object({ city: z.string().max(12) }),
    run: ({ city }) => (cities.push(city), "sunny"),
  });
  const looping = clientOf(process.env.PENSTOCK_DEMO, { fetch: withOneCall });
  const last = await looping.beta.messages.toolRunner({
    model: MODEL, max_tokens: 200, messages: MESSAGES, tools: [tool], temperature: 0, max_iterations: 3,
  });
  assert.equal(cities.length, 1);
  assert.ok(textOf(last));
});

test("parse builds an object by a zod schema", async () => {
  const Person = z.object({ name: z.enum(["Ada", "Bob"]), is_robot: z.boolean() });
  const message = await client.messages.parse({
    model: MODEL, max_tokens: 200, messages: MESSAGES, temperature: 0,
    output_config: { format: zodOutputFormat(Person) },
  });
  assert.equal(typeof message.parsed_output.is_robot, "boolean");
});

test("counted tokens equal the usage of a message", async () => {
  const counted = await client.messages.countTokens({ model: MODEL, messages: MESSAGES });
  const message = await client.messages.create({ model: MODEL, max_tokens: 1, messages: MESSAGES });
  assert.equal(counted.input_tokens, message.usage.input_tokens);
});

test("abort in the middle of a stream ends it", async () => {
  const stream = scripted.messages.stream({ model: MODEL, max_tokens: 1900, messages: MESSAGES });
  stream.on("text", () => stream.abort());
  await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
});

test("errors have their class and Anthropic's shape", async () => {
  await assert.rejects(
    client.messages.create({ model: "claude-opus-4", max_tokens: 4, messages: MESSAGES }),
    (e) => e instanceof Anthropic.NotFoundError && e.error.error.type === "not_found_error",
  );
  await assert.rejects(
    client.messages.create({ model: MODEL, max_tokens: 4, messages: MESSAGES, temperature: -1 }),
    (e) => e instanceof Anthropic.BadRequestError && /temperature/.test(e.message),
  );
  await assert.rejects(
    clientOf(process.env.PENSTOCK_GUARDED).messages.create({
      model: MODEL, max_tokens: 4, messages: MESSAGES,
    }),
    Anthropic.AuthenticationError,
  );
});
