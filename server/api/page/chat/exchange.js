// Conversations as files: JSON that this page reads again, and Markdown for people.

import { isPicture } from "./pictures.js";
import { nodesBelow, pathOf } from "./tree.js";

const FORMAT = "penstock-conversations";
const VERSION = 1;
const FIGURES = ["numIn", "numOut", "numCached", "totalMs"];
const ROLES = new Set(["user", "assistant", "tool"]);

export class ImportError extends Error {}

export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

// Throws ImportError. Only the fields of tree.js are taken over.
export function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new ImportError(`The file is not valid JSON (${error.message}); choose a file that this page has exported.`);
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new ImportError("The file has no conversations of Penstock; choose a JSON file that this page has exported.");
  }
  if (data.version !== VERSION) {
    throw new ImportError(`The file has version ${data.version} of the format and this page reads version ${VERSION}; export it again.`);
  }
  return data.conversations.map(checkedConversation);
}

function isId(value) {
  return typeof value === "string" && /^[0-9a-z]{1,64}$/.test(value);
}

function checkedConversation(given, i) {
  const name = `conversations[${i}]`;
  require(isId(given?.id), `${name}.id is not an id`);
  require(given.nodes && typeof given.nodes === "object", `${name}.nodes is not an object`);
  const nodes = {};
  for (const node of Object.values(given.nodes)) {
    const checked = checkedNode(node, name);
    nodes[checked.id] = checked;
  }
  // Parents that are in a circle would hang the page.
  require(nodesBelow(nodes, null).length === Object.keys(nodes).length, `${name} has a message whose parent is missing`);
  const leaf = nodes[given.leaf] ? given.leaf : Object.keys(nodes).at(-1) ?? null;
  const numberOr = (value, otherwise) => (Number.isFinite(value) ? value : otherwise);
  const createdMs = numberOr(given.createdMs, Date.now());
  return { id: given.id, title: String(given.title ?? ""), createdMs, changedMs: numberOr(given.changedMs, createdMs), leaf, nodes };
}

function checkedNode(node, name) {
  require(isId(node?.id), `${name} has a message without an id`);
  require(ROLES.has(node.role), `${name} has a message of the role ${node.role}`);
  require(Number.isFinite(node.atMs), `${name} has a message without a time`);
  const { id, role, atMs } = node;
  const common = { id, role, atMs, parent: node.parent ?? null };
  require(role === "user" || common.parent, `${name} has a message of the role ${role} that answers nothing`);
  if (role === "tool") return { ...common, results: listOf(node.results, ["id", "name", "content"], name) };
  require(typeof node.text === "string", `${name} has a message without a text`);
  if (role === "user") {
    const images = Array.isArray(node.images) ? node.images.filter(isPicture) : [];
    return { ...common, text: node.text, images, mode: node.mode === "completion" ? "completion" : "chat" };
  }
  return {
    ...common,
    text: node.text,
    reasoning: String(node.reasoning ?? ""),
    toolCalls: listOf(node.toolCalls ?? [], ["id", "name", "arguments"], name),
    model: String(node.model ?? ""),
    settings: node.settings && typeof node.settings === "object" ? node.settings : {},
    figures: checkedFigures(node.figures),
    finish: node.finish ? String(node.finish) : null,
    note: node.note ? String(node.note) : null,
    isFailed: Boolean(node.isFailed),
  };
}

function checkedFigures(given) {
  if (!FIGURES.every((name) => Number.isFinite(given?.[name]))) return null;
  const optional = ["ttftMs", "decodeMs"].filter((name) => Number.isFinite(given[name]));
  return Object.fromEntries([...FIGURES, ...optional].map((name) => [name, given[name]]));
}

function listOf(value, members, name) {
  require(Array.isArray(value), `${name} has a message with tool calls that are not a list`);
  return value.map((each) => Object.fromEntries(members.map((member) => [member, String(each?.[member] ?? "")])));
}

function require(isGood, problem) {
  if (!isGood) throw new ImportError(`The file cannot be imported: ${problem}.`);
}

// The branch that is shown.
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  for (const node of pathOf(conversation)) parts.push(`## ${headingOf(node)}`, textOf(node));
  return `${parts.join("\n\n")}\n`;
}

function headingOf(node) {
  if (node.role === "assistant") return node.model || "Answer";
  return node.role === "tool" ? "Tool results" : "Question";
}

export function textOf(node) {
  if (node.role === "tool") return node.results.map(({ name, content }) => `${name}: ${content}`).join("\n\n");
  const calls = (node.toolCalls ?? []).map((call) => `${call.name}(${call.arguments})`);
  const pictures = node.images?.length ? `[${node.images.length === 1 ? "a picture" : `${node.images.length} pictures`}]` : "";
  return [pictures, node.text, ...calls].filter(Boolean).join("\n\n");
}

export function download(name, type, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// A title as the name of a file.
export function fileName(title, ending) {
  const plain = title.normalize("NFKC").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 50);
  return `${plain || "conversation"}.${ending}`;
}
