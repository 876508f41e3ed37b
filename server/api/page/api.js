// Access to the server: requests with the key, error messages, SSE events.

const KEY = "penstock-api-key";

export class ServerError extends Error {
  // message: a sentence that says what to change. status: 0 if the server was not reached.
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let key = stored();

export function apiKey() {
  return key;
}

// For this tab; isKept: for this browser, until it is removed.
export function storeApiKey(given, isKept) {
  key = given;
  try {
    sessionStorage.setItem(KEY, key);
    if (isKept && key) localStorage.setItem(KEY, key);
    else localStorage.removeItem(KEY);
  } catch {
    // storage is off: the key lasts until a reload
  }
}

export function isApiKeyKept() {
  try {
    return localStorage.getItem(KEY) !== null;
  } catch {
    return false;
  }
}

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

// Relative to the page, so that it also works under a proxy's path.
export function address(path) {
  return new URL(path, document.baseURI).href;
}

// The response of a successful request. Throws ServerError, or AbortError if `signal` aborts.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  if (body) headers["content-type"] = "application/json";
  const method = body ? "POST" : "GET";
  let response;
  try {
    const content = body && JSON.stringify(body);
    response = await fetch(address(path), { method, headers, body: content, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached; check that it is running, then send again.", 0);
  }
  if (!response.ok) throw new ServerError(await messageOf(response), response.status);
  return response;
}

async function messageOf(response) {
  // The server's own message is for people who write requests by hand.
  if (response.status === 401) return apiKey() ? "The server does not accept this API key; enter another one above." : "The server requires an API key; enter it above.";
  const text = await response.text();
  try {
    return asSentence(JSON.parse(text).error.message);
  } catch {
    return `The server answered with status ${response.status}; see its log.`;
  }
}

// Messages may begin with the name of a field, so they are not capitalized.
export function asSentence(message) {
  return /[.!?]$/.test(message) ? message : `${message}.`;
}

// The JSON of each SSE event as it arrives. Throws ServerError if the stream ends early.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader);
    if (done) throw new ServerError("The answer was cut off; Continue goes on from here, Regenerate begins anew.", 0);
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = dataOf(block);
      if (data === "[DONE]") return;
      if (data) yield checked(JSON.parse(data));
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost during the answer; Continue goes on from here, Regenerate begins anew.", 0);
  }
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

function checked(event) {
  if (event.error) throw new ServerError(asSentence(event.error.message), 500);
  return event;
}

// The same request as a curl command. It refers to the key through an environment variable.
export function curlLine(path, body) {
  const parts = [`curl ${body.stream ? "-N " : ""}${address(path)}`];
  if (apiKey()) parts.push('-H "Authorization: Bearer $PENSTOCK_API_KEY"');
  parts.push("-H 'Content-Type: application/json'");
  parts.push(`-d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`);
  return parts.join(" \\\n  ");
}
