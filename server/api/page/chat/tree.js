// A conversation as a tree: editing a question or asking again adds a branch, and nothing is lost until it is deleted.
//
// conversation: {id, title, createdMs, changedMs, leaf, nodes}; nodes by id; the path that is shown ends at `leaf`.
// node: {id, parent (an id or null), role ("user", "assistant" or "tool"), atMs, ...}
//   user: text, images (data: URLs), mode ("chat" or "completion")
//   assistant: text, reasoning, toolCalls, model, settings, figures, finish, note (of what went wrong, if isFailed)
//   tool: results, [{id, name, content}]

const MAX_TITLE_LENGTH = 60;

// crypto.randomUUID is missing where the page is opened over plain HTTP from another machine.
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  const nowMs = Date.now();
  return { id: newId(), title: "", createdMs: nowMs, changedMs: nowMs, leaf: null, nodes: {} };
}

// From the first node to the leaf.
export function pathOf(conversation, leaf = conversation.leaf) {
  const path = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) path.unshift(node);
  return path;
}

// Adds a node below the node `parent` (null: as a first one); it becomes the leaf.
export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent: parent?.id ?? null, atMs: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.title ||= titleOf(fields.text || (fields.images?.length ? "A picture" : ""));
  return node;
}

export function titleOf(text) {
  const [line] = text.trim().split("\n");
  return line.length > MAX_TITLE_LENGTH ? `${line.slice(0, MAX_TITLE_LENGTH - 1).trimEnd()}…` : line;
}

// A leaf that was added last.
export function removeLeaf(conversation, node) {
  delete conversation.nodes[node.id];
  if (conversation.leaf === node.id) conversation.leaf = node.parent;
}

// All nodes below the node `id`, on every branch. Below null is every node that a first one leads to: all, unless
// parents are missing or in a circle.
export function nodesBelow(nodes, id) {
  const byParent = new Map();
  for (const node of Object.values(nodes)) byParent.set(node.parent, [...(byParent.get(node.parent) ?? []), node]);
  const below = [...(byParent.get(id) ?? [])];
  for (const node of below) below.push(...(byParent.get(node.id) ?? []));
  return below;
}

// Removes a node and all below it, which would answer what is not there. If it was shown, then the version beside it
// is shown instead; if there is none, the path ends above it.
export function removeBranch(conversation, node) {
  const versions = versionsOf(conversation, node);
  const at = versions.indexOf(node);
  const beside = versions[at - 1] ?? versions[at + 1];
  for (const { id } of [node, ...nodesBelow(conversation.nodes, node.id)]) delete conversation.nodes[id];
  if (conversation.nodes[conversation.leaf]) return;
  conversation.leaf = node.parent;
  if (beside) showBranch(conversation, beside);
}

// The versions of a message, itself included, oldest first.
export function versionsOf(conversation, node) {
  return childrenOf(conversation, node.parent);
}

// Shows the branch of a node up to its latest message.
export function showBranch(conversation, node) {
  let leaf = node;
  for (let next = node; next; next = childrenOf(conversation, next.id).at(-1)) leaf = next;
  conversation.leaf = leaf.id;
}

function childrenOf(conversation, id) {
  const nodes = Object.values(conversation.nodes).filter(({ parent }) => parent === id);
  return nodes.sort((one, other) => one.atMs - other.atMs);
}
