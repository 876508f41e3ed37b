// One request: what is sent for an answer, and how what arrives becomes its node (see tree.js).

import { events, request } from "../api.js";

const NUM_TOP_LOGPROBS = 5;
// OpenAI's default for completions is 16, and a base model may never end.
export const COMPLETION_MAX_TOKENS = 512;

// path: the nodes before the answer. settings: of settings.js. begun: an answer to be continued, or null.
export function requestFor(model, path, settings, begun = null) {
  const { system, tools, reasoning_effort: effort, wantsLogprobs, ...fields } = settings;
  const body = { model, ...fields };
  if (body.stream) body.stream_options = { include_usage: true };
  const question = path.at(-1);
  if (question.mode === "completion") {
    if (wantsLogprobs) body.logprobs = NUM_TOP_LOGPROBS;
    return { path: "v1/completions", body: { max_tokens: COMPLETION_MAX_TOKENS, ...body, prompt: question.text + (begun?.text ?? "") } };
  }
  if (effort) body.reasoning_effort = effort;
  if (tools) body.tools = tools;
  if (wantsLogprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_TOP_LOGPROBS });
  if (begun) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  const messages = system ? [{ role: "system", content: system }] : [];
  messages.push(...chatOf(path).flatMap(messagesOf), ...(begun ? messagesOf(begun) : []));
  return { path: "v1/chat/completions", body: { ...body, messages } };
}

// Completions stand alone: neither they nor their answers are part of the chat.
function chatOf(path) {
  let isChat = true;
  return path.filter((node) => {
    if (node.role === "user") isChat = node.mode !== "completion";
    return isChat;
  });
}

function messagesOf(node) {
  if (node.role === "user") return [{ role: "user", content: contentOf(node) }];
  if (node.role === "tool") return node.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
  const message = { role: "assistant", content: node.text };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.toolCalls.length) {
    message.tool_calls = node.toolCalls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return [message];
}

function contentOf({ text, images = [] }) {
  if (!images.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// Adds what arrives to the node; calls onChange after each part. Throws as `request` and `events` do.
export async function receive({ path, body }, node, signal, onChange) {
  const startMs = performance.now();
  const response = await request(path, { body, signal });
  node.finish = null;
  if (!body.stream) {
    const whole = await response.json();
    take(whole.choices[0], node);
    // Another server may leave it out.
    if (whole.usage) node.figures = { ...usageOf(whole), totalMs: performance.now() - startMs };
    return;
  }
  let [firstMs, lastMs, usage] = [null, null, null];
  for await (const event of events(response)) {
    const choice = event.choices[0];
    if (choice && take(choice, node)) {
      lastMs = performance.now();
      firstMs ??= lastMs;
      onChange();
    }
    if (event.usage) usage = usageOf(event);
  }
  if (!usage) return;
  node.figures = { ...usage, totalMs: performance.now() - startMs };
  if (firstMs) Object.assign(node.figures, { ttftMs: firstMs - startMs, decodeMs: lastMs - firstMs });
}

// Returns whether there was something of the answer in it.
function take(choice, node) {
  const part = choice.delta ?? choice.message ?? { content: choice.text };
  node.reasoning += part.reasoning_content ?? "";
  node.text += part.content ?? "";
  for (const call of part.tool_calls ?? []) takeCall(call, node.toolCalls);
  if (choice.logprobs) (node.logprobs ??= []).push(...logprobsOf(choice.logprobs));
  node.finish = choice.finish_reason ?? node.finish;
  return Boolean(part.reasoning_content || part.content || part.tool_calls?.length);
}

function takeCall({ index, id, function: { name, arguments: text } }, calls) {
  const call = calls[index ?? calls.length] ??= { id: "", name: "", arguments: "" };
  call.id ||= id ?? "";
  call.name += name ?? "";
  call.arguments += text ?? "";
}

// [{token, logprob, top: [[token, logprob], ...]}] of the shapes of chats and of completions.
function logprobsOf({ content, tokens, token_logprobs: logprobs, top_logprobs: top }) {
  if (content) return content.map((each) => ({ token: each.token, logprob: each.logprob, top: each.top_logprobs.map((other) => [other.token, other.logprob]) }));
  return (tokens ?? []).map((token, i) => ({ token, logprob: logprobs[i], top: Object.entries(top?.[i] ?? {}) }));
}

function usageOf({ usage }) {
  return {
    numIn: usage.prompt_tokens,
    numOut: usage.completion_tokens,
    numCached: usage.prompt_tokens_details?.cached_tokens ?? 0,
  };
}
