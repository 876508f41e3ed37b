// The settings of a request. Empty fields are not sent, so that the model's defaults apply.

import { COMPLETION_MAX_TOKENS } from "./answering.js";
import { isStoring } from "./conversations.js";
import { byId } from "../dom.js";
import { keep, recall } from "../preferences.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
];
const KEPT = "settings";
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

export class SettingsError extends Error {
  // field: the id of the field to change.
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

export function startSettings() {
  const form = byId("settings");
  byId("schema").defaultValue = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
  fill(recall(KEPT, {}));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    byId("ask-error").hidden = true;
    showSchema();
    if (isStoring()) keep(KEPT, values());
  });
  form.addEventListener("reset", () => {
    keep(KEPT, {});
    setTimeout(showSchema); // after the browser has reset the fields
  });
  for (const radio of document.querySelectorAll("input[name=mode]")) {
    radio.addEventListener("change", () => {
      for (const element of document.querySelectorAll(".only-chat")) element.hidden = isCompletion();
      byId("max_tokens").placeholder = isCompletion() ? COMPLETION_MAX_TOKENS : "no limit";
      byId("prompt").placeholder = isCompletion() ? "A text to continue" : "Ask something";
    });
  }
}

export function isCompletion() {
  return document.querySelector("input[name=mode]:checked").value === "completion";
}

function values() {
  return Object.fromEntries([...byId("settings").elements].filter(({ id }) => id).map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]));
}

function fill(kept) {
  for (const field of byId("settings").elements) {
    if (!(field.id in kept)) continue;
    if (field.type === "checkbox") field.checked = kept[field.id];
    else field.value = kept[field.id];
  }
  showSchema();
}

function showSchema() {
  byId("schema-field").hidden = byId("format").value !== "json_schema";
}

// The request's fields, and what `requestFor` makes fields of: system, tools, reasoning_effort, wantsLogprobs.
// Throws SettingsError.
export function readSettings() {
  const fields = { system: byId("system").value.trim(), stream: byId("stream").checked };
  for (const name of NUMBERS) {
    const value = readNumber(name);
    if (value !== null) fields[name] = value;
  }
  const stop = byId("stop").value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  const format = readFormat();
  if (format) fields.response_format = format;
  if (byId("reasoning_effort").value) fields.reasoning_effort = byId("reasoning_effort").value;
  if (byId("tools").value.trim()) fields.tools = readTools();
  if (byId("logprobs").checked) fields.wantsLogprobs = true;
  return fields;
}

function readNumber(name) {
  const input = byId(name);
  if (input.validity.badInput) {
    throw new SettingsError(`${name} is not a number; enter one, or clear the field for the default.`, name);
  }
  return input.value === "" ? null : Number(input.value);
}

function readFormat() {
  const type = byId("format").value;
  if (type !== "json_schema") return type ? { type } : null;
  return { type, json_schema: { name: "answer", strict: true, schema: readJson("schema", "The JSON schema", "or choose another answer format") } };
}

function readTools() {
  const tools = readJson("tools", "The list of tools", "or clear the field");
  if (!Array.isArray(tools)) throw new SettingsError("The tools are not a list; write them as [{\"type\": \"function\", …}], or clear the field.", "tools");
  return tools;
}

function readJson(field, what, otherwise) {
  try {
    return JSON.parse(byId(field).value);
  } catch (error) {
    throw new SettingsError(`${what} is not valid JSON (${error.message}); correct it, ${otherwise}.`, field);
  }
}
