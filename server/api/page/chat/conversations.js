// The conversations of this page: in memory, and in the store unless the user wants none. Other tabs are told.

import { keep, recall } from "../preferences.js";
import { erase, eraseAll, openStore, readAll, rewrite, write } from "./store.js";
import { removeBranch } from "./tree.js";

const STORING = "store-conversations";
const channel = new BroadcastChannel("penstock-conversations");

const all = new Map();
let storedIds = new Set(); // as last read or written
let listener = () => {};

// onChange(problem): called when the list has changed; problem: a sentence, or null. onRemoval(conversation): called
// when another tab has deleted a message of it.
export async function startConversations(onChange, onRemoval) {
  listener = onChange;
  await guarded(async () => {
    await openStore();
    await refresh();
  });
  channel.addEventListener("message", ({ data }) => guarded(async () => {
    const known = all.get(data.conversationId);
    if (known && removeFrom(known, data.messageId)) {
      onRemoval(known);
      // If this tab has just stored it once more, all others have to remove it again.
      if (await eraseMessage(data)) channel.postMessage(data);
    }
    await refresh();
  }));
}

// A conversation that is open here and was deleted by another tab is stored again when it goes on.
async function refresh() {
  const stored = await readAll();
  for (const each of stored) {
    const known = all.get(each.id);
    if (known) Object.assign(known, { title: each.title, nodes: { ...each.nodes, ...known.nodes } });
    else all.set(each.id, each);
  }
  const ids = new Set(stored.map(({ id }) => id));
  for (const id of storedIds) {
    if (!ids.has(id)) all.delete(id);
  }
  storedIds = ids;
}

async function guarded(act) {
  try {
    await act();
    listener(null);
  } catch (error) {
    listener(error.message);
  }
}

// The latest first.
export function list() {
  return [...all.values()].sort((one, other) => other.changedMs - one.changedMs);
}

export function find(id) {
  return all.get(id);
}

export function isStoring() {
  return recall(STORING, true);
}

// From now on: what is stored already stays until it is deleted.
export function setStoring(isWanted) {
  keep(STORING, isWanted);
  listener(null);
}

export async function save(conversation, changedMs = Date.now()) {
  conversation.changedMs = changedMs;
  all.set(conversation.id, conversation);
  await guarded(async () => {
    if (!isStoring()) return;
    await write(storedForm(conversation));
    storedIds.add(conversation.id);
    channel.postMessage("changed");
  });
}

// Without logprobs, which are hundreds of bytes for each token, and without an answer that has not begun.
function storedForm(conversation) {
  const nodes = {};
  for (const { logprobs, ...node } of Object.values(conversation.nodes)) {
    if (node.role !== "assistant" || node.text || node.reasoning || node.toolCalls.length) nodes[node.id] = node;
  }
  const leaf = nodes[conversation.leaf] ? conversation.leaf : conversation.nodes[conversation.leaf]?.parent;
  return { ...conversation, nodes, leaf: leaf ?? null };
}

// A message and all that follow it, here, in the store, also while nothing new is stored, and in other tabs.
export async function removeMessage(conversation, message) {
  const ids = { conversationId: conversation.id, messageId: message.id };
  removeFrom(conversation, message.id);
  await guarded(async () => {
    await eraseMessage(ids);
    channel.postMessage(ids);
  });
}

// Both return whether it was there.
function eraseMessage({ conversationId, messageId }) {
  return rewrite(conversationId, (stored) => removeFrom(stored, messageId));
}

function removeFrom(conversation, messageId) {
  const message = conversation.nodes[messageId];
  if (message) removeBranch(conversation, message);
  return Boolean(message);
}

export async function remove(conversation) {
  all.delete(conversation.id);
  await guarded(async () => {
    await erase(conversation.id);
    channel.postMessage("changed");
  });
}

export async function removeAll() {
  all.clear();
  await guarded(async () => {
    await eraseAll();
    channel.postMessage("changed");
  });
}
