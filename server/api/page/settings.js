// The settings of a request. Empty fields are not sent, so that the model's defaults apply.

import { byId } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
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
  byId("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
  byId("format").addEventListener("change", () => {
    byId("schema-field").hidden = byId("format").value !== "json_schema";
  });
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  for (const radio of document.querySelectorAll("input[name=mode]")) {
    radio.addEventListener("change", () => {
      document.querySelector(".only-chat").hidden = radio.value === "completion";
      byId("prompt").placeholder = radio.value === "completion" ? "A text to continue" : "Ask something";
    });
  }
}

// The request's fields, and `system`. Throws SettingsError.
export function readSettings() {
  const fields = { stream: byId("stream").checked };
  for (const name of NUMBERS) {
    const value = readNumber(name);
    if (value !== null) fields[name] = value;
  }
  const stop = byId("stop").value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  const format = readFormat();
  if (format) fields.response_format = format;
  return { system: byId("system").value.trim(), ...fields };
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
  try {
    return { type, json_schema: { name: "answer", strict: true, schema: JSON.parse(byId("schema").value) } };
  } catch (error) {
    throw new SettingsError(`The JSON schema is not valid JSON (${error.message}); correct it, or choose another answer format.`, "schema");
  }
}
