// OpenAI's JavaScript client, under node's own test runner.
//
// What it requires that others do not: in `.stream()`, `index` in every delta of a tool call, and ids
// and names once only, as in Python; in `runTools`, that the server accepts its own message sent back
// unchanged (with `parsed`, `refusal` and `annotations`); that `abort()` frees the sequence at once;
// errors whose class depends on the status alone.

import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const MODEL = "penstock-demo";
const MESSAGES = [{ role: "user", content: "Who are you?" }];
const client = clientOf(process.env.PENSTOCK_DEMO);
const scripted = clientOf(process.env.PENSTOCK_SCRIPTED);

const Person = z.object({
  name: z.string().max(12),
  age: z.number().int().min(0).max(120),
  kind: z.enum(["human", "robot"]),
});
const City = z.object({ city: z.string().max(12) });

function clientOf(url, options = {}) {
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, ...options });
}

/** The demo model calls no tool by itself: the first turn forces a call, the next forbids one. */
async function withOneCall(url, init) {
  const body = JSON.parse(init.body);
  const has = (body.messages ?? []).some((message) => message.role === "tool");
  body.tool_choice = has ? "none" : "required";
  const headers = new Headers(init.headers);
  headers.delete("content-length");
  return fetch(url, { ...init, headers, body: JSON.stringify(body) });
}

async function metric(url, name) {
  const text = await (await fetch(`${url}/metrics`)).text();
  const line = text.split("\n").find((line) => line.startsWith(`penstock_${name} `));
  return Number(line?.split(" ").at(-1) ?? 0);
}

test("the models are listed and one is retrieved", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.ok(ids.includes(MODEL));
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

test("a chat completion has text, a finish reason, usage and a request id", async () => {
  const answer = await client.chat.completions.create({
    model: MODEL, messages: MESSAGES, temperature: 0,
  });
  assert.match(answer.choices[0].message.content, /Penstock/);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.ok(answer.usage.completion_tokens > 0);
  assert.ok(answer._request_id);
});

test("a chat stream adds up to the unstreamed text and ends with usage", async () => {
  const fields = { model: MODEL, messages: MESSAGES, temperature: 0 };
  const plain = await client.chat.completions.create(fields);
  const stream = await client.chat.completions.create({
    ...fields, stream: true, stream_options: { include_usage: true },
  });
  let text = "", last;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  assert.equal(text, plain.choices[0].message.content);
  assert.deepEqual(last.choices, []);
  assert.equal(last.usage.completion_tokens, plain.usage.completion_tokens);
});

test("the stream helper gives content, snapshots and the end", async () => {
  const seen = { content: 0, chunk: 0, end: 0, finalContent: 0 };
  const stream = client.chat.completions.stream({
    model: MODEL, messages: MESSAGES, stream_options: { include_usage: true },
  });
  for (const name of Object.keys(seen)) stream.on(name, () => seen[name]++);
  const final = await stream.finalChatCompletion();
  await stream.done();
  assert.ok(seen.content > 1 && seen.chunk > seen.content);
  assert.equal(seen.end, 1);
  assert.equal(seen.finalContent, 1);
  assert.equal(await stream.finalContent(), final.choices[0].message.content);
  assert.ok((await stream.totalUsage()).completion_tokens > 0);
});

test("parse builds an object by a zod schema", async () => {
  const answer = await client.chat.completions.parse({
    model: MODEL, messages: MESSAGES, response_format: zodResponseFormat(Person, "person"),
  });
  Person.parse(answer.choices[0].message.parsed);
});

test("the stream helper builds an object by a zod schema", async () => {
  const final = await client.chat.completions.stream({
    model: MODEL, messages: MESSAGES, response_format: zodResponseFormat(Person, "person"),
  }).finalChatCompletion();
  Person.parse(final.choices[0].message.parsed);
});

test("the stream helper joins the arguments of a tool", async () => {
  let done = 0;
  const stream = client.chat.completions.stream({
    model: MODEL, messages: MESSAGES, tool_choice: "required", parallel_tool_calls: false,
    tools: [zodFunction({ name: "get_weather", parameters: City })],
  }).on("tool_calls.function.arguments.done", () => done++);
  const [call] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
  City.parse(call.function.parsed_arguments);
  assert.equal(call.function.name, "get_weather");
  assert.match(call.id, /^call_/);
  assert.equal(done, 1);
});

for (const stream of [false, true]) {
  test(`runTools calls the function and continues, stream: ${stream}`, async () => {
    const looping = clientOf(process.env.PENSTOCK_DEMO, { fetch: withOneCall });
    const cities = [];
    const runner = looping.chat.completions.runTools({
      model: MODEL, messages: MESSAGES, stream, temperature: 0, max_tokens: 200,
      tools: [zodFunction({
        name: "get_weather", parameters: City,
        function: ({ city }) => (cities.push(city), "sunny"),
      })],
    });
    assert.ok((await runner.finalContent()).length > 0);
    assert.equal(cities.length, 1);
    assert.deepEqual(runner.messages.map((m) => m.role), ["user", "assistant", "tool", "assistant"]);
  });
}

test("a text completion streams", async () => {
  const fields = { model: MODEL, prompt: "Once upon a time", max_tokens: 8, temperature: 0 };
  const plain = await client.completions.create(fields);
  let text = "";
  for await (const chunk of await client.completions.create({ ...fields, stream: true })) {
    text += chunk.choices[0].text;
  }
  assert.equal(text, plain.choices[0].text);
});

test("a response has text and continues another", async () => {
  const first = await client.responses.create({
    model: MODEL, input: "My name is Ada.", temperature: 0,
  });
  const second = await client.responses.create({
    model: MODEL, input: "What is my name?", previous_response_id: first.id, temperature: 0,
  });
  assert.match(second.output_text, /Ada/);
  assert.equal((await client.responses.retrieve(second.id)).id, second.id);
});

test("the responses stream helper gives every event", async () => {
  const stream = client.responses.stream({ model: MODEL, input: "Who are you?" });
  let text = "";
  const kinds = [];
  for await (const event of stream) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  assert.equal((await stream.finalResponse()).output_text, text);
});

test("responses.parse builds an object by a zod schema", async () => {
  const answer = await client.responses.parse({
    model: MODEL, input: "Somebody.", text: { format: zodTextFormat(Person, "person") },
  });
  Person.parse(answer.output_parsed);
});

test("embeddings come as floats", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: ["one", "two"] });
  assert.equal(answer.data.length, 2);
  assert.ok(answer.data[0].embedding.every(Number.isFinite));
});

test("abort in the middle of a stream frees the sequence", async () => {
  const stream = await scripted.completions.create({
    model: MODEL, prompt: "Once", max_tokens: 1900, stream: true, ignore_eos: true,
  });
  let pieces = 0;
  for await (const _ of stream) {
    if (++pieces === 3) stream.controller.abort();
  }
  assert.ok(pieces >= 3);
  for (let i = 0; i < 100 && await metric(process.env.PENSTOCK_SCRIPTED, "running_sequences"); i++) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  assert.equal(await metric(process.env.PENSTOCK_SCRIPTED, "running_sequences"), 0);
});

test("a signal that aborts the request is an APIUserAbortError", async () => {
  const controller = new AbortController();
  const answer = scripted.completions.create(
    { model: MODEL, prompt: "Once", max_tokens: 1900, ignore_eos: true },
    { signal: controller.signal },
  );
  setTimeout(() => controller.abort(), 20);
  await assert.rejects(answer, OpenAI.APIUserAbortError);
});

test("a short timeout is an APIConnectionTimeoutError", async () => {
  await assert.rejects(
    scripted.completions.create(
      { model: MODEL, prompt: "Once", max_tokens: 1900, ignore_eos: true }, { timeout: 30 },
    ),
    OpenAI.APIConnectionTimeoutError,
  );
});

test("errors have their class, code and param", async () => {
  await assert.rejects(
    client.chat.completions.create({ model: "gpt-4o", messages: MESSAGES }),
    (e) => e instanceof OpenAI.NotFoundError && e.code === "model_not_found",
  );
  await assert.rejects(
    client.chat.completions.create({ model: MODEL, messages: MESSAGES, temperature: -1 }),
    (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature",
  );
  await assert.rejects(
    clientOf(process.env.PENSTOCK_GUARDED).models.list(),
    (e) => e instanceof OpenAI.AuthenticationError && e.code === "invalid_api_key",
  );
});

test("a rejected request is not retried", async () => {
  let tries = 0;
  const counting = clientOf(process.env.PENSTOCK_DEMO, {
    maxRetries: 3, fetch: (url, init) => (tries++, fetch(url, init)),
  });
  await assert.rejects(counting.chat.completions.create({ model: MODEL, messages: [] }));
  assert.equal(tries, 1);
});
