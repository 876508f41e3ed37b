// opencode, the coding agent: `opencode run` with a provider of its configuration.
//
// What it requires that others do not: it always streams and asks for usage, beside a second request
// for the session's title; it sends the schemas of ten tools with `tool_choice: "auto"`; a prompt
// that is too long has to be refused with the code `context_length_exceeded`, by which it knows to
// compact the conversation; the provider `@ai-sdk/openai` uses the Responses API, and
// `@ai-sdk/anthropic` the Messages API. It fetches a list of models unless it is told not to.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";
import test, { after } from "node:test";

const MODEL = "penstock-demo";
const PACKAGES = ["@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"];
const here = import.meta.dirname;
const home = mkdtempSync(path.join(tmpdir(), "opencode-"));
after(() => rmSync(home, { recursive: true, force: true }));

const plugin = path.join(here, "opencode_plugin.mjs");
// The demo model calls no tool by itself: the first turn forces a call, the next forbids one.
writeFileSync(plugin, `
import { z } from "zod";
export const OneCall = async () => {
  const send = globalThis.fetch;
  globalThis.fetch = (url, init) => {
    const isObject = typeof init?.body === "string" && init.body[0] === "{";
    const body = isObject ? JSON.parse(init.body) : {};
    if (body.tools?.length !== 1) return send(url, init);
    body.tool_choice = body.messages.some((m) => m.role === "tool") ? "none" : "required";
    return send(url, { ...init, body: JSON.stringify(body) });
  };
  const args = { city: z.string().max(12) };
  const execute = async ({ city }) => "sunny in " + city;
  return { tool: { get_weather: { description: "The weather in a city.", args, execute } } };
};`);

function provider(npm, url, context, output) {
  const limit = { context, output };
  return {
    npm,
    options: { baseURL: `${url}/v1`, apiKey: "none" },
    models: { [MODEL]: { tool_call: true, limit }, "gpt-none": {} },
  };
}

function agent(permission) {
  return { mode: "primary", prompt: "Be short.", temperature: 0, permission };
}

const config = path.join(home, "opencode.json");
writeFileSync(config, JSON.stringify({
  provider: {
    scripted: provider(PACKAGES[0], process.env.PENSTOCK_SCRIPTED, 32768, 64),
    ...Object.fromEntries(
      PACKAGES.map((npm, i) => [`demo${i}`, provider(npm, process.env.PENSTOCK_DEMO, 2048, 256)]),
    ),
  },
  agent: {
    short: agent({ "*": "deny" }),
    weather: agent({ "*": "deny", get_weather: "allow" }),
  },
  model: `demo0/${MODEL}`,
  small_model: `demo0/${MODEL}`,
  plugin: [`file://${plugin}`],
  share: "disabled",
  autoupdate: false,
}));

/** The events that it writes, and its exit code. */
function run(...options) {
  const env = {
    ...process.env,
    HOME: home, XDG_CONFIG_HOME: "", XDG_DATA_HOME: "", XDG_STATE_HOME: "", XDG_CACHE_HOME: "",
    OPENCODE_CONFIG: config,
    OPENCODE_DISABLE_MODELS_FETCH: "1",
    OPENCODE_DISABLE_LSP_DOWNLOAD: "1",
    OPENCODE_DISABLE_AUTOCOMPACT: "1",
  };
  const command = path.join(here, "node_modules", ".bin", "opencode");
  return new Promise((resolve) => {
    const done = (error, out, errors) => {
      const lines = out.split("\n").filter((line) => line.startsWith("{"));
      resolve({ events: lines.map(JSON.parse), code: error?.code ?? 0, errors });
    };
    const settings = { cwd: home, env, timeout: 60_000 };
    execFile(command, ["run", "--format", "json", ...options], settings, done).stdin.end();
  });
}

const partsOf = (events, type) => events.filter((e) => e.type === type).map((e) => e.part);
const textOf = (events) => partsOf(events, "text").map((part) => part.text).join("");

for (const [i, npm] of PACKAGES.entries()) {
  test(`an agent's answer and usage arrive through ${npm}`, async () => {
    const { events, code, errors } = await run(
      "--agent", "short", "-m", `demo${i}/${MODEL}`, "Who are you?",
    );
    assert.equal(code, 0, errors);
    assert.match(textOf(events), /model/);
    const { reason, tokens } = partsOf(events, "step_finish").at(-1);
    assert.equal(reason, "stop");
    assert.ok(tokens.output > 0 && tokens.input + tokens.cache.read > 0);
  });
}

test("a session goes on with what was said", async () => {
  await run("--agent", "short", "My name is Ada.");
  const { events } = await run("--agent", "short", "--continue", "What is my name?");
  assert.match(textOf(events), /Ada/);
});

test("an agent calls its tool and ends with the model's answer", async () => {
  const { events, code, errors } = await run("--agent", "weather", "How is the weather?");
  assert.equal(code, 0, errors);
  const [call, ...others] = partsOf(events, "tool_use");
  assert.equal(others.length, 0);
  assert.equal(call.tool, "get_weather");
  assert.equal(call.state.output, `sunny in ${call.state.input.city}`);
  const reasons = partsOf(events, "step_finish").map((part) => part.reason);
  assert.deepEqual(reasons, ["tool-calls", "stop"]);
  assert.ok(textOf(events));
});

test("the agent that it comes with sends its whole prompt and its tools", async () => {
  const { events, code, errors } = await run("-m", `scripted/${MODEL}`, "Who are you?");
  assert.equal(code, 0, errors);
  const { reason, tokens } = partsOf(events, "step_finish").at(-1);
  assert.deepEqual([reason, tokens.output], ["length", 64]);
  assert.ok(tokens.input + tokens.cache.read > 5000 && textOf(events));
});

test("a prompt that is too long is known as such", async () => {
  const { events, code } = await run("Who are you?");
  assert.deepEqual([code, events.at(-1).error.name], [1, "ContextOverflowError"]);
});

test("an error has the server's own message", async () => {
  const { events, code } = await run("--agent", "short", "-m", "demo0/gpt-none", "Who are you?");
  assert.equal(code, 1);
  assert.match(events.at(-1).error.data.message, /'gpt-none' does not exist on this server/);
});
