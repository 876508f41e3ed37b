// The conversation that is open: what is asked, what is shown, and what is running.

import { curlLine } from "../api.js";
import { receive, requestFor } from "./answering.js";
import { find, remove, removeMessage, save } from "./conversations.js";
import { answerOf } from "../dialog.js";
import { button, byId, copy, setOpen } from "../dom.js";
import { toMarkdown } from "./exchange.js";
import { hasPictures, startPictures, takePictures } from "./pictures.js";
import { answerView, questionView, resultsView, unansweredView } from "./messages.js";
import { isCompletion, readSettings, SettingsError, startSettings } from "./settings.js";
import { addNode, newConversation, nodesBelow, pathOf, removeLeaf, showBranch, versionsOf } from "./tree.js";

const SUGGESTIONS = ["Who are you?", "What is continuous batching?", "Tell me a little story."];
const NEAR_END_PX = 80;
// A reload loses at most this much of an answer.
const SAVE_PERIOD_MS = 1000;
// Of an imported answer that has none.
const DEFAULT_SETTINGS = { stream: true };
const NAMES = { user: "question", assistant: "answer", tool: "tool results" };

let model = null;
let open = newConversation();
let views = []; // of the path that is shown
let isFollowing = true; // whether to scroll to the end, until the user scrolls away from it
let hooks = {};
const runs = new Map(); // id of a conversation -> {controller, node, view}
const failures = new WeakMap(); // question without an answer -> why

// Called by the buttons of a message.
const act = {
  isCompletion: (answer) => open.nodes[answer.parent]?.mode === "completion",
  answerLast: () => ask(() => pathOf(open).at(-1)),
  regenerate: (answer) => ask(() => open.nodes[answer.parent]),
  continueAnswer: (answer) => ask(() => answer),
  editQuestion: (question, text) => ask(() => addNode(open, open.nodes[question.parent], { role: "user", text, images: question.images, mode: question.mode })),
  sendResults: (answer, results) => ask(() => addNode(open, answer, { role: "tool", results, text: "" })),
  editAnswer: (answer, text) => {
    const { id, parent, atMs, figures, logprobs, ...fields } = answer;
    addNode(open, open.nodes[parent], { ...fields, text, figures: null, finish: null, note: "Edited", isFailed: false });
    save(open);
    show();
  },
  showVersion: (node) => {
    showBranch(open, node);
    save(open);
    show();
  },
  deleteMessage: (node) => attempt(() => deleteMessage(node)),
};

// onKeyNeeded(), onUnreachable(): called after a request failed so. onOpen(): another conversation is shown.
export function startPlayground(given) {
  hooks = given;
  startSettings();
  startPictures();
  byId("settings-open").addEventListener("click", () => {
    setOpen(byId("settings-open"), byId("settings"), byId("settings").hidden);
  });
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("input", fitPrompt);
  document.addEventListener("keydown", (event) => {
    // Else it closes what is open.
    if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) stop(open);
  });
  byId("conversation").addEventListener("scroll", () => {
    const { scrollHeight, scrollTop, clientHeight } = byId("conversation");
    isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  });
  byId("conversation").addEventListener("click", ({ target }) => {
    if (target.classList.contains("copy-code")) copy(target.closest(".code-block").querySelector("code").textContent, target);
  });
  byId("stop-answer").addEventListener("click", () => stop(open));
  byId("copy-all").addEventListener("click", () => copy(toMarkdown(open), byId("copy-all")));
  for (const text of SUGGESTIONS) {
    byId("suggestions").append(button(text, () => {
      byId("prompt").value = text;
      send();
    }));
  }
  addEventListener("pagehide", () => {
    for (const id of runs.keys()) saveKept(find(id));
  });
  show();
}

export function useModel(name) {
  model = name;
}

export function openId() {
  return open.id;
}

export function isRunning(conversation) {
  return runs.has(conversation.id);
}

// A new one if none is given.
export function openConversation(conversation = newConversation()) {
  open = conversation;
  for (const { element } of views) element.remove();
  views = [];
  show();
  scrollToEnd();
  hooks.onOpen();
  if (matchMedia("(pointer: fine)").matches) byId("prompt").focus(); // no keyboard over the answers on a phone
}

export function stop(conversation) {
  runs.get(conversation.id)?.controller.abort();
}

function send() {
  const text = byId("prompt").value;
  if (!text.trim() && !hasPictures()) return;
  const isAsked = ask(() => {
    const leaf = pathOf(open).at(-1);
    // A question without an answer is replaced: many models take only turns that alternate.
    const parent = leaf?.role === "user" ? open.nodes[leaf.parent] : leaf;
    if (isCompletion()) return addNode(open, parent, { role: "user", text, mode: "completion" });
    return addNode(open, parent, { role: "user", text, images: takePictures(), mode: "chat" });
  });
  if (!isAsked) return;
  byId("prompt").value = "";
  fitPrompt();
}

// asked(): the node to answer, or the answer to continue. Nothing changes if the settings are wrong.
function ask(asked) {
  return attempt(() => {
    if (!model) throw new SettingsError("The model is not ready yet; wait until its name appears above.", "prompt");
    const settings = readSettings();
    start(asked(), settings);
  });
}

// Returns whether act() was done. What keeps it from being done is shown.
function attempt(act) {
  byId("ask-error").hidden = true;
  try {
    if (runs.has(open.id)) throw new SettingsError("An answer is still arriving; stop it first, or wait for its end.", "prompt");
    act();
    return true;
  } catch (error) {
    if (!(error instanceof SettingsError)) throw error;
    byId("ask-error").textContent = error.message;
    byId("ask-error").hidden = false;
    const field = byId(error.field);
    if (byId("settings").contains(field)) setOpen(byId("settings-open"), byId("settings"), true);
    field.focus();
    return false;
  }
}

function start(asked, settings) {
  const begun = asked.role === "assistant" ? asked : null;
  const before = begun ? open.nodes[begun.parent] : asked;
  failures.delete(before);
  const sent = requestFor(model, pathOf(open, before.id), settings, begun);
  const node = begun ?? addNode(open, before, { role: "assistant", text: "", reasoning: "", toolCalls: [], figures: null, finish: null });
  Object.assign(node, { model, settings, note: null, isFailed: false });
  if (begun) open.leaf = node.id;
  run(open, node, sent);
}

async function run(conversation, node, sent) {
  const current = { controller: new AbortController(), node, view: null };
  runs.set(conversation.id, current);
  show(node);
  scrollToEnd();
  save(conversation);
  let savedMs = performance.now();
  try {
    await receive(sent, node, current.controller.signal, () => {
      current.view?.update();
      if (performance.now() < savedMs + SAVE_PERIOD_MS) return;
      savedMs = performance.now();
      saveKept(conversation);
    });
  } catch (error) {
    onFailure(error, conversation, node);
  }
  runs.delete(conversation.id);
  saveKept(conversation);
  if (conversation !== open) return;
  if (open.nodes[node.id]) current.view?.finish();
  byId("ask-error").hidden = true;
  show();
  followEnd();
}

// And all messages that follow it: they would answer what is not there.
async function deleteMessage(node) {
  const conversation = open;
  const numBelow = nodesBelow(conversation.nodes, node.id).length;
  const isAll = numBelow + 1 === Object.keys(conversation.nodes).length;
  const below = numBelow ? ` and ${numBelow === 1 ? "the message" : `the ${numBelow} messages`} after it` : "";
  const question = `Delete this ${NAMES[node.role]}${below}?${isAll ? " The conversation has no other messages, so it is deleted too." : ""} This cannot be undone.`;
  if (await answerOf(question, "Delete") === null) return;
  if (isAll) await remove(conversation);
  else await removeMessage(conversation, node);
  if (conversation !== open) return;
  if (isAll) openConversation();
  else show();
  byId("conversation").focus();
}

// Another tab has deleted messages of a conversation.
export function showRemoval(conversation) {
  const current = runs.get(conversation.id);
  if (current && !conversation.nodes[current.node.id]) current.controller.abort();
  if (conversation === open) show();
}

// Unless it was deleted while its answer arrived.
function saveKept(conversation) {
  if (conversation && find(conversation.id)) save(conversation);
}

function onFailure(error, conversation, node) {
  if (!conversation.nodes[node.id]) return; // deleted by another tab
  const isStopped = error.name === "AbortError";
  if (!isStopped && !error.status) console.warn(error.message);
  node.note = isStopped ? "Stopped" : error.message;
  node.isFailed = !isStopped;
  node.figures = null;
  if (!node.text && !node.reasoning && !node.toolCalls.length) {
    failures.set(conversation.nodes[node.parent], isStopped ? "Stopped before the answer began." : error.message);
    removeLeaf(conversation, node);
  }
  if (error.status === 401) hooks.onKeyNeeded();
  if (error.status === 0) hooks.onUnreachable();
}

// Shows the path to the leaf. Messages that are shown already stay, but for `changed` and what follows it.
function show(changed = null) {
  const path = pathOf(open);
  let numKept = 0;
  while (views[numKept]?.node && views[numKept].node === path[numKept] && path[numKept] !== changed) numKept += 1;
  for (const { element } of views.splice(numKept)) element.remove();
  for (const node of path.slice(numKept)) views.push(viewOf(node));
  const last = path.at(-1);
  if (last && last.role !== "assistant") views.push(unansweredView(failures.get(last), act));
  byId("conversation").append(...views.slice(numKept).map(({ element }) => element));
  byId("welcome").hidden = Boolean(last);
  showRunning();
}

function viewOf(node) {
  const versions = versionsOf(open, node);
  if (node.role === "user") return questionView(node, versions, act);
  if (node.role === "tool") return resultsView(node, act);
  const current = runs.get(open.id);
  const isCurrent = current?.node === node;
  const before = open.nodes[node.parent];
  const view = answerView(node, {
    versions,
    isRunning: isCurrent,
    // One that the model did not end itself; a grammar would start again.
    canContinue: () => node.text && node.finish !== "stop" && !node.toolCalls.length && !node.settings.response_format,
    curl: () => {
      const { path, body } = requestFor(node.model, pathOf(open, before?.id), { ...DEFAULT_SETTINGS, ...node.settings });
      return curlLine(path, body);
    },
    onShow: followEnd,
  }, act);
  if (isCurrent) current.view = view;
  return view;
}

function showRunning() {
  const isBusy = runs.has(open.id);
  byId("conversation").setAttribute("aria-busy", String(isBusy));
  byId("send").hidden = isBusy;
  byId("stop-answer").hidden = !isBusy;
  byId("copy-all").disabled = !open.leaf;
  byId("new").disabled = !open.leaf;
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
