// The list of conversations: search, rename, export, import, delete.

import { find, isStoring, list, remove, removeAll, save, setStoring } from "./conversations.js";
import { answerOf } from "../dialog.js";
import { byId, make, setOpen } from "../dom.js";
import { download, fileName, fromJson, ImportError, textOf, toJson, toMarkdown } from "./exchange.js";
import { patchChildren } from "../text/patch.js";
import { isRunning, openConversation, openId, stop } from "./playground.js";
import { keep, recall } from "../preferences.js";

const SHOWN = "show-conversations";
const WIDE = matchMedia("(min-width: 1200px)"); // where the list is beside the conversation, not over it
const JSON_TYPE = "application/json";

let chosen = null; // the conversation of the menu

export function startSidebar() {
  const opener = byId("chats-open");
  const show = (isShown) => setOpen(opener, byId("chats"), isShown);
  show(WIDE.matches && recall(SHOWN, true));
  WIDE.addEventListener("change", () => show(WIDE.matches && recall(SHOWN, true)));
  opener.addEventListener("click", () => {
    show(byId("chats").hidden);
    if (WIDE.matches) keep(SHOWN, !byId("chats").hidden);
    else if (!byId("chats").hidden) byId("chats-new").focus();
  });
  byId("chats").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || WIDE.matches) return;
    event.stopPropagation(); // it would stop an answer
    show(false);
    opener.focus();
  });
  for (const id of ["new", "chats-new"]) byId(id).addEventListener("click", () => go());
  byId("chats-find").addEventListener("input", showList);
  byId("storing").checked = isStoring();
  byId("storing").addEventListener("change", () => setStoring(byId("storing").checked));
  byId("export-all").addEventListener("click", () => download("penstock-conversations.json", JSON_TYPE, toJson(list())));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
  byId("delete-all").addEventListener("click", deleteAll);
  document.addEventListener("keydown", onShortcut);
  byId("chats-list").addEventListener("click", ({ target }) => {
    const conversation = find(target.closest("li")?.dataset.id);
    if (!conversation) return;
    if (target.classList.contains("more")) openMenu(conversation, target);
    else go(conversation);
  });
  startMenu();
}

function onShortcut(event) {
  if (!(event.ctrlKey || event.metaKey)) return;
  if (event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    go();
  } else if (!event.shiftKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    setOpen(byId("chats-open"), byId("chats"), true);
    byId("chats-find").focus();
  }
}

function go(conversation) {
  if (!WIDE.matches) setOpen(byId("chats-open"), byId("chats"), false);
  openConversation(conversation);
}

// problem: a sentence, or null.
export function showConversations(problem) {
  byId("chats-note").textContent = problem
    ?? (isStoring() ? "" : "Conversations are kept until this tab is closed. What was stored before stays until you delete it.");
  byId("chats-note").classList.toggle("error", Boolean(problem));
  byId("export-all").disabled = byId("delete-all").disabled = !list().length;
  showList();
}

function showList() {
  const words = byId("chats-find").value.trim().toLowerCase();
  const found = list().filter((each) => !words || contains(each, words));
  patchChildren(byId("chats-list"), found.map(itemOf)); // which keeps the focus, as answers are stored while they arrive
  byId("chats-none").hidden = Boolean(found.length);
  byId("chats-none").textContent = words ? "No conversation has these words." : "No conversations yet.";
}

function contains({ title, nodes }, words) {
  return [title, ...Object.values(nodes).map(textOf)].some((text) => text.toLowerCase().includes(words));
}

function itemOf(conversation) {
  const opener = make("button", { type: "button", class: "chat", title: conversation.title }, conversation.title);
  if (conversation.id === openId()) opener.setAttribute("aria-current", "true");
  if (isRunning(conversation)) opener.classList.add("going-on");
  const more = make("button", { type: "button", class: "quiet more", "aria-label": `More about ${conversation.title}`, "aria-haspopup": "true" }, "⋯");
  return make("li", { "data-id": conversation.id }, opener, more);
}

// One menu for all: the browser closes it on Escape and on a click elsewhere.
function startMenu() {
  const menu = byId("chat-menu");
  const onClick = (id, onChosen) => byId(id).addEventListener("click", () => {
    menu.hidePopover();
    onChosen(chosen);
  });
  onClick("chat-rename", rename);
  onClick("chat-markdown", (it) => download(fileName(it.title, "md"), "text/markdown", toMarkdown(it)));
  onClick("chat-json", (it) => download(fileName(it.title, "json"), JSON_TYPE, toJson([it])));
  onClick("chat-delete", deleteOne);
}

function openMenu(conversation, opener) {
  chosen = conversation;
  const menu = byId("chat-menu");
  menu.showPopover();
  const place = opener.getBoundingClientRect();
  menu.style.left = `${Math.max(4, place.right - menu.offsetWidth)}px`;
  menu.style.top = `${Math.min(place.bottom + 2, innerHeight - menu.offsetHeight - 4)}px`;
  byId("chat-rename").focus();
}

async function rename(conversation) {
  const title = await answerOf("Name of the conversation", "Rename", conversation.title);
  if (title === null || !title.trim()) return;
  conversation.title = title.trim();
  save(conversation);
}

async function deleteOne(conversation) {
  if (await answerOf(`Delete “${conversation.title}”? This cannot be undone.`, "Delete") === null) return;
  stop(conversation);
  await remove(conversation);
  if (conversation.id === openId()) openConversation();
  else byId("chats-new").focus();
}

async function deleteAll() {
  const question = `Delete all ${list().length} conversations from this browser? This cannot be undone; “Export all” keeps a copy.`;
  if (await answerOf(question, "Delete all") === null) return;
  for (const conversation of list()) stop(conversation);
  await removeAll();
  openConversation();
}

// A conversation that is here already gets the messages that it lacks.
async function importFile() {
  const [file] = byId("import-file").files;
  byId("import-file").value = "";
  if (!file) return;
  try {
    const given = fromJson(await file.text());
    for (const conversation of given) {
      const known = find(conversation.id);
      if (known) known.nodes = { ...conversation.nodes, ...known.nodes };
      await save(known ?? conversation, conversation.changedMs);
    }
    showConversations(null);
    byId("chats-note").textContent = `${given.length} ${given.length === 1 ? "conversation was" : "conversations were"} imported.`;
  } catch (error) {
    if (!(error instanceof ImportError)) throw error;
    showConversations(error.message);
  }
}
