// One message as an article, and what a user can do with it. `act` has the actions: of the playground, which
// changes the conversation; here is only how they look.

import { button, copy, make } from "../dom.js";
import { textOf } from "./exchange.js";
import { figureList } from "./figures.js";
import { markdownView, plainView } from "../text/growing.js";
import { tokenView } from "./logprobs.js";
import { pictureRow } from "./pictures.js";
import { edit, foldedView, panel, toggle } from "../widgets.js";

// versions: the versions of this message, itself included.
export function questionView(node, versions, act) {
  const said = make("div", { class: "said" }, node.text);
  const element = make("article", { class: "question", "aria-label": "Question" }, said);
  if (node.images?.length) said.before(pictureRow(node.images));
  const row = make("div", { class: "tools" }, ...versionButtons(node, versions, act));
  row.append(copyButton(node), button("Edit", () => {
    edit({ place: said, text: node.text, label: "Question", done: "Send", onDone: (text) => act.editQuestion(node, text) });
  }), deleteButton(node, act));
  element.append(row);
  return { node, element };
}

// The results of tool calls.
export function resultsView(node, act) {
  const items = node.results.map(({ name, content }) => make("div", {}, make("strong", {}, name), make("pre", { tabindex: "0", role: "group", "aria-label": `Result of ${name}` }, content)));
  const row = make("div", { class: "tools" }, copyButton(node), deleteButton(node, act));
  return { node, element: make("article", { class: "results", "aria-label": "Tool results" }, ...items, row) };
}

// A question without an answer: its request failed, was stopped early, or was lost with a reload.
export function unansweredView(message, act) {
  const text = make("p", message ? { class: "error", role: "alert" } : { class: "note" }, message ?? "This question has no answer.");
  const row = make("div", { class: "tools" }, button(message ? "Try again" : "Answer", act.answerLast));
  return { node: null, element: make("article", { class: "answer failed", "aria-label": "Answer" }, text, make("div", { class: "foot" }, row)) };
}

// isRunning: whether it still arrives; then `update` is called with each change of the node, and `finish` once.
export function answerView(node, { versions, isRunning, canContinue, curl, onShow }, act) {
  const reasoning = foldedView("Reasoning", "reasoning", (element) => markdownView(element, onShow));
  const content = make("div", { class: "content" });
  const calls = make("div", { class: "calls" });
  const foot = make("div", { class: "foot" });
  const element = make("article", { class: "answer", "aria-label": "Answer" }, reasoning.element, content, calls, foot);
  const isPlain = Boolean(node.settings.response_format) || act.isCompletion(node);
  content.classList.toggle("plain", isPlain);
  const view = (isPlain ? plainView : markdownView)(content, onShow);
  const update = () => {
    const hasText = Boolean(node.text || node.toolCalls.length);
    element.classList.toggle("waiting", !hasText);
    reasoning.grow(node.reasoning, !hasText);
    if (node.text) view.grow(node.text);
  };
  const showSource = (isSource) => {
    content.classList.toggle("plain", isSource);
    (isSource ? plainView : markdownView)(content, () => {}).finish(node.text);
  };
  const finish = () => {
    element.classList.remove("waiting", "running");
    view.finish(node.text);
    reasoning.finish(node.reasoning);
    calls.replaceChildren(...node.toolCalls.map(callView));
    if (node.toolCalls.length) calls.append(resultForm(node, act));
    foot.replaceChildren(...footOf(node, { versions, canContinue, curl, content, showSource: isPlain ? null : showSource }, act));
  };
  if (isRunning) {
    element.classList.add("running");
    update();
  } else finish();
  return { node, element, update, finish };
}

// What went wrong, the figures, and the buttons below an answer. showSource: null if it is shown as it came.
function footOf(node, { versions, canContinue, curl, content, showSource }, act) {
  const row = make("div", { class: "tools" }, ...versionButtons(node, versions, act));
  const parts = [];
  const note = node.note ?? (node.finish ? null : "Not finished: the page was closed or loaded again.");
  if (note) parts.push(make("p", node.isFailed ? { class: "error", role: "alert" } : { class: "stopped" }, note));
  if (node.figures) parts.push(figureList(node.figures, node.finish));
  parts.push(row);
  if (textOf(node)) row.append(copyButton(node));
  if (node.text) {
    row.append(button("Edit", () => {
      edit({ place: content, text: node.text, label: "Answer", done: "Save", onDone: (text) => act.editAnswer(node, text) });
    }));
  }
  row.append(button("Regenerate", () => act.regenerate(node)));
  if (canContinue()) {
    const element = button("Continue", () => act.continueAnswer(node));
    element.classList.add("only-last");
    row.append(element);
  }
  if (node.text && showSource) row.append(toggle("Source", showSource));
  if (node.logprobs?.length) parts.push(panel(row, "Tokens", "tokens-panel", () => [tokenView(node.logprobs)]));
  parts.push(panel(row, "curl", "curl", () => curlParts(curl())));
  row.append(deleteButton(node, act));
  return parts;
}

function curlParts(command) {
  const line = make("pre", { tabindex: "0", role: "group", "aria-label": "The request as a curl command" }, command);
  return [line, button("Copy curl", (element) => copy(command, element))];
}

function copyButton(node) {
  return button("Copy", (element) => copy(textOf(node), element));
}

function deleteButton(node, act) {
  return button("Delete", () => act.deleteMessage(node));
}

function versionButtons(node, versions, act) {
  if (versions.length < 2) return [];
  const at = versions.indexOf(node);
  const step = (text, label, to) => {
    const element = button(text, () => act.showVersion(versions[to]));
    element.setAttribute("aria-label", label);
    element.disabled = !versions[to];
    return element;
  };
  const count = make("span", { class: "count" }, `${at + 1}/${versions.length}`);
  return [make("span", { class: "versions", role: "group", "aria-label": "Versions" }, step("‹", "Previous version", at - 1), count, step("›", "Next version", at + 1))];
}

function callView({ name, arguments: text }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // cut off by max tokens, or no JSON: as it came
  }
  const code = make("pre", { tabindex: "0", role: "group", "aria-label": `Arguments of ${name}` }, shown);
  return make("details", { class: "call", open: "" }, make("summary", {}, "Tool call: ", make("strong", {}, name)), code);
}

// The page runs no tools; its user can say what they would return.
function resultForm(node, act) {
  const fields = node.toolCalls.map(({ name }) => make("textarea", { rows: "2", "aria-label": `Result of ${name}`, placeholder: `What ${name} returns` }));
  const form = make("form", { class: "result-form only-last" }, ...fields, make("button", { type: "submit", class: "primary small" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act.sendResults(node, node.toolCalls.map(({ id, name }, i) => ({ id, name, content: fields[i].value })));
  });
  return form;
}
