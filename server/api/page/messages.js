// One message as an article, and what a user can do with it. `act` has the actions: of the playground, which
// changes the conversation; here is only how they look.

import { button, copy, make, setOpen } from "./dom.js";
import { textOf } from "./exchange.js";
import { figureList } from "./figures.js";
import { markdownView, plainView } from "./growing.js";
import { tokenView } from "./logprobs.js";

// versions: the versions of this message, itself included.
export function questionView(node, versions, act) {
  const said = make("div", { class: "said" }, node.text);
  const element = make("article", { class: "question", "aria-label": "Question" }, said);
  const row = make("div", { class: "tools" }, ...versionButtons(node, versions, act));
  row.append(copyButton(node), button("Edit", () => {
    edit({ place: said, text: node.text, label: "Question", done: "Send", onDone: (text) => act.editQuestion(node, text) });
  }));
  element.append(row);
  return { node, element };
}

// The results of tool calls.
export function resultsView(node) {
  const items = node.results.map(({ name, content }) => make("div", {}, make("strong", {}, name), make("pre", { tabindex: "0", role: "group", "aria-label": `Result of ${name}` }, content)));
  return { node, element: make("article", { class: "results", "aria-label": "Tool results" }, ...items) };
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
  const isPlain = node.settings.response_format || act.isCompletion(node);
  content.classList.toggle("plain", Boolean(isPlain));
  let view = (isPlain ? plainView : markdownView)(content, onShow);
  const update = () => {
    const hasText = Boolean(node.text || node.toolCalls.length);
    element.classList.toggle("waiting", !hasText);
    reasoning.grow(node.reasoning, !hasText);
    if (node.text) view.grow(node.text);
  };
  const showSource = (isSource) => {
    content.classList.toggle("plain", isSource || Boolean(isPlain));
    view = (isSource || isPlain ? plainView : markdownView)(content, () => {});
    view.finish(node.text);
  };
  const finish = () => {
    element.classList.remove("waiting", "running");
    view.finish(node.text);
    reasoning.finish(node.reasoning);
    calls.replaceChildren(...node.toolCalls.map(callView));
    if (node.toolCalls.length) calls.append(resultForm(node, act));
    foot.replaceChildren(...footOf());
  };
  const footOf = () => {
    const parts = [];
    const note = node.note ?? (node.finish ? null : "Not finished: the page was closed or loaded again.");
    if (note) parts.push(make("p", node.isFailed ? { class: "error", role: "alert" } : { class: "stopped" }, note));
    if (node.figures) parts.push(figureList(node.figures, node.finish));
    const row = make("div", { class: "tools" }, ...versionButtons(node, versions, act));
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
    if (node.text && !isPlain) row.append(toggle("Source", showSource));
    if (node.logprobs?.length) parts.push(panel(row, "Tokens", "tokens-panel", () => [tokenView(node.logprobs)]));
    parts.push(panel(row, "curl", "curl", () => curlParts(curl())));
    return parts;
  };
  if (isRunning) {
    element.classList.add("running");
    update();
  } else finish();
  return { node, element, update, finish };
}

// A button in `row` that opens the panel it returns, which is filled when it is first opened.
function panel(row, name, kind, parts) {
  const box = make("div", { class: kind, hidden: "" });
  row.append(toggle(name, (isOpen) => {
    if (!box.firstChild) box.append(...parts());
    box.hidden = !isOpen;
  }));
  return box;
}

function toggle(name, onToggle) {
  const element = button(name, () => {
    const isOpen = element.getAttribute("aria-expanded") !== "true";
    element.setAttribute("aria-expanded", String(isOpen));
    onToggle(isOpen);
  });
  element.setAttribute("aria-expanded", "false");
  return element;
}

function curlParts(command) {
  const line = make("pre", { tabindex: "0", role: "group", "aria-label": "The request as a curl command" }, command);
  return [line, button("Copy curl", (element) => copy(command, element))];
}

function copyButton(node) {
  return button("Copy", (element) => copy(textOf(node), element));
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

// Content that is shown only when it is opened; hidden while there is none.
function foldedView(name, kind, makeView) {
  const summary = make("summary", {}, name);
  const body = make("div");
  const element = make("details", { class: kind, hidden: "" }, summary, body);
  let [view, text, isWhole] = [null, "", false];
  const show = () => {
    if (!element.open || !text) return;
    view ??= makeView(body);
    if (isWhole) view.finish(text);
    else view.grow(text);
  };
  element.addEventListener("toggle", show);
  return {
    element,
    grow: (all, isGoingOn) => {
      summary.classList.toggle("going-on", isGoingOn);
      if (all === text) return;
      text = all;
      element.hidden = false;
      show();
    },
    finish: (all) => {
      [text, isWhole] = [all, true];
      element.hidden = !text;
      summary.classList.remove("going-on");
      show();
    },
  };
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

// Puts an editor in the place of an element until it is used or cancelled.
function edit({ place, text, label, done, onDone }) {
  if (place.hidden) return;
  const area = make("textarea", { "aria-label": label, rows: String(Math.min(14, text.split("\n").length + 1)) });
  area.value = text;
  const form = make("form", { class: "editor" }, area, make("button", { type: "submit", class: "primary small" }, done));
  const close = () => {
    form.remove();
    place.hidden = false;
  };
  form.append(button("Cancel", close));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    // False while another answer is running.
    if (area.value.trim() && onDone(area.value) !== false) close();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation(); // it would stop an answer
      close();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  place.hidden = true;
  place.before(form);
  area.focus();
}
