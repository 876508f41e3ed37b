// The playground: one question at a time, its streamed answer, and its timings.

import { curlLine, events, request } from "./api.js";
import { button, byId, copy, growingText, make, setOpen } from "./dom.js";
import { readSettings, SettingsError, startSettings } from "./settings.js";

const SUGGESTIONS = ["Who are you?", "What is continuous batching?", "Tell me a little story."];
const NEAR_END_PX = 80;

let model = null;
let running = null; // the AbortController of the running request
let isFollowing = true; // whether to scroll to the end, until the user scrolls away from it
let turns = []; // {question, answer} of the chat, if completed or stopped

export function startPlayground({ onKeyNeeded }) {
  startSettings();
  byId("settings-open").addEventListener("click", () => {
    setOpen(byId("settings-open"), byId("settings"), byId("settings").hidden);
  });
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send(onKeyNeeded);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send(onKeyNeeded);
  });
  byId("prompt").addEventListener("input", fitPrompt);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("conversation").addEventListener("scroll", () => {
    const { scrollHeight, scrollTop, clientHeight } = byId("conversation");
    isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  });
  byId("stop-answer").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  byId("copy-all").addEventListener("click", () => copy(asText(), byId("copy-all")));
  for (const text of SUGGESTIONS) {
    byId("suggestions").append(button(text, () => {
      byId("prompt").value = text;
      send(onKeyNeeded);
    }));
  }
  return { use: (name) => { model = name; } };
}

async function send(onKeyNeeded) {
  const question = byId("prompt").value;
  if (running || !question.trim()) return;
  const view = addTurn(question);
  byId("prompt").value = "";
  fitPrompt();
  setRunning(new AbortController());
  try {
    const { path, body } = requestFor(question);
    view.curl(curlLine(path, body));
    const figures = await answer(path, body, view);
    view.end(figures);
    remember(question, view.text());
  } catch (error) {
    onFailure(error, question, view, onKeyNeeded);
  } finally {
    setRunning(null);
    followEnd();
  }
}

function onFailure(error, question, view, onKeyNeeded) {
  if (error.name === "AbortError") {
    view.end(null, "Stopped");
    remember(question, view.text());
    return;
  }
  if (!error.status && !(error instanceof SettingsError)) console.warn(error.message);
  view.fail(error.message);
  if (!byId("prompt").value) byId("prompt").value = question; // to be corrected and sent again
  fitPrompt();
  if (error instanceof SettingsError) {
    setOpen(byId("settings-open"), byId("settings"), true);
    byId(error.field).focus();
  }
  if (error.status === 401) onKeyNeeded();
}

function remember(question, answer) {
  if (!isCompletion()) turns.push({ question, answer });
}

function requestFor(question) {
  if (!model) throw new SettingsError("The model is not ready yet; wait until its name appears above.", "prompt");
  const { system, ...fields } = readSettings();
  const body = { model, ...fields };
  if (body.stream) body.stream_options = { include_usage: true };
  if (isCompletion()) return { path: "v1/completions", body: { ...body, prompt: question } };
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    messages.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.answer });
  }
  messages.push({ role: "user", content: question });
  return { path: "v1/chat/completions", body: { ...body, messages } };
}

function isCompletion() {
  return document.querySelector("input[name=mode]:checked").value === "completion";
}

// Fills the view; returns the figures of the answer.
async function answer(path, body, view) {
  const startMs = performance.now();
  const response = await request(path, { body, signal: running.signal });
  if (!body.stream) {
    const whole = await response.json();
    take(whole.choices[0], view);
    return { ...usageOf(whole), finish: whole.choices[0].finish_reason, totalMs: performance.now() - startMs };
  }
  const figures = {};
  for await (const event of events(response)) {
    const choice = event.choices[0];
    if (choice && take(choice, view)) {
      figures.lastMs = performance.now();
      figures.firstMs ??= figures.lastMs;
    }
    if (choice?.finish_reason) figures.finish = choice.finish_reason;
    if (event.usage) Object.assign(figures, usageOf(event));
  }
  return { ...figures, ttftMs: figures.firstMs - startMs, totalMs: performance.now() - startMs };
}

// Returns whether there was text in it.
function take(choice, view) {
  const part = choice.delta ?? choice.message ?? { content: choice.text };
  if (part.reasoning_content) view.reason(part.reasoning_content);
  if (part.content) view.write(part.content);
  return Boolean(part.reasoning_content || part.content);
}

function usageOf({ usage }) {
  return {
    numIn: usage.prompt_tokens,
    numOut: usage.completion_tokens,
    numCached: usage.prompt_tokens_details?.cached_tokens ?? 0,
  };
}

function addTurn(question) {
  byId("welcome").hidden = true;
  const text = growingText(followEnd);
  const reasoning = growingText(followEnd);
  const details = make("details", { class: "reasoning" }, make("summary", {}, "Reasoning"), make("div", {}, reasoning.node));
  const content = make("div", { class: "content" }, text.node);
  const foot = make("div", { class: "foot" });
  const answerView = make("article", { class: "answer waiting", "aria-label": "Answer" }, content, foot);
  byId("conversation").append(make("article", { class: "question", "aria-label": "Question" }, question), answerView);
  scrollToEnd();
  let command = null;
  const finish = () => {
    answerView.classList.remove("waiting");
    text.show();
    reasoning.show();
    foot.append(...tools(text.whole(), command));
    updateButtons();
  };
  return {
    text: text.whole,
    curl: (line) => { command = line; },
    write: (more) => { text.add(more); answerView.classList.remove("waiting"); },
    reason: (more) => {
      if (!details.isConnected) content.before(details);
      reasoning.add(more);
    },
    end: (figures, note) => {
      foot.append(figures ? figureList(figures) : make("p", { class: "stopped" }, note));
      finish();
    },
    fail: (message) => {
      answerView.classList.add("failed");
      foot.before(make("p", { class: "error", role: "alert" }, message));
      finish();
    },
  };
}

function tools(text, command) {
  const row = make("div", { class: "tools" });
  if (text) row.append(button("Copy", (element) => copy(text, element)));
  const parts = [row];
  if (command) {
    const line = make("pre", { tabindex: "0", role: "group", "aria-label": "The request as a curl command" }, command);
    const box = make("div", { class: "curl", hidden: "" }, line, button("Copy curl", (element) => copy(command, element)));
    const opener = button("curl", (element) => setOpen(element, box, box.hidden));
    opener.setAttribute("aria-expanded", "false");
    row.append(opener);
    parts.push(box);
  }
  return parts;
}

function figureList(figures) {
  const { numIn, numCached, numOut, finish } = figures;
  const decodeMs = figures.lastMs - figures.firstMs;
  const list = make("dl", { class: "figures" });
  const add = (name, value, tip) => list.append(make("div", { title: tip }, make("dt", {}, name), make("dd", {}, value)));
  if (figures.ttftMs) add("TTFT", ms(figures.ttftMs), "From sending the question to the first text of the answer, as measured by this page.");
  if (numOut > 1 && decodeMs > 0) {
    add("TPOT", ms(decodeMs / (numOut - 1)), "The mean time per token after the first.");
  }
  add("Speed", `${rate((numOut / figures.totalMs) * 1e3)} tok/s`, "Tokens of the answer divided by the total time, queueing included.");
  add("Total", ms(figures.totalMs), "From sending the question to the end of the answer.");
  add("In", numCached ? `${numIn} (${numCached} cached)` : `${numIn}`, "Tokens of the prompt, and how many of them were in the prefix cache.");
  add("Out", `${numOut}`, "Tokens of the answer.");
  add("End", finish === "length" ? "length" : "stop", finish === "length"
    ? "The answer reached max tokens or the end of the model's context." : "The model or a stop string ended the answer.");
  return list;
}

function ms(value) {
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(value >= 10 ? 3 : 2)} ms`;
}

function rate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

function setRunning(controller) {
  running = controller;
  byId("conversation").setAttribute("aria-busy", String(Boolean(controller)));
  byId("send").hidden = Boolean(controller);
  byId("stop-answer").hidden = !controller;
  updateButtons();
}

function updateButtons() {
  const isEmpty = !byId("conversation").querySelector("article");
  byId("copy-all").disabled = isEmpty;
  byId("clear").disabled = isEmpty || Boolean(running);
}

function clear() {
  turns = [];
  for (const element of byId("conversation").querySelectorAll("article")) element.remove();
  byId("welcome").hidden = false;
  updateButtons();
  byId("prompt").focus();
}

function asText() {
  const articles = [...byId("conversation").querySelectorAll("article")];
  return articles.map((article) => (article.querySelector(".content") ?? article).textContent).join("\n\n");
}

function fitPrompt() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function scrollToEnd() {
  isFollowing = true;
  byId("conversation").scrollTop = byId("conversation").scrollHeight;
}

function followEnd() {
  if (isFollowing) scrollToEnd();
}
