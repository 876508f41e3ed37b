// Conversations in this browser's IndexedDB. Refuses to know what is in them, but for `id` and `nodes`.

const DATABASE = "penstock";
const CONVERSATIONS = "conversations";

export class StoreError extends Error {}

let database = null;
let opening = null;

// Throws StoreError if the browser has no storage for this page. What is written meanwhile waits for it.
export function openStore() {
  opening = opened();
  return opening;
}

async function opened() {
  try {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    database = await resultOf(request);
  } catch {
    throw new StoreError("This browser does not let the page store anything, so conversations last until it is closed.");
  }
  // Another tab may have a later version of this page.
  database.onversionchange = () => database.close();
}

export async function readAll() {
  return database ? resultOf(database.transaction(CONVERSATIONS).objectStore(CONVERSATIONS).getAll()) : [];
}

// Keeps messages that another tab has added. Throws StoreError.
export async function write(conversation) {
  await change(async (store) => {
    const stored = await resultOf(store.get(conversation.id));
    store.put({ ...conversation, nodes: { ...stored?.nodes, ...conversation.nodes } });
  });
}

// act(conversation) changes what is stored of it, if anything is, and returns whether it did, as this does. Throws
// StoreError.
export async function rewrite(id, act) {
  let isChanged = false;
  await change(async (store) => {
    const stored = await resultOf(store.get(id));
    isChanged = Boolean(stored) && act(stored);
    if (isChanged) store.put(stored);
  });
  return isChanged;
}

export async function erase(id) {
  await change((store) => store.delete(id));
}

export async function eraseAll() {
  await change((store) => store.clear());
}

async function change(act) {
  if (!database) await opening?.catch(() => {}); // who opens it reports that
  if (!database) return;
  try {
    const transaction = database.transaction(CONVERSATIONS, "readwrite");
    const end = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    await Promise.all([act(transaction.objectStore(CONVERSATIONS)), end]);
  } catch (error) {
    throw new StoreError(error?.name === "QuotaExceededError"
      ? "This browser's storage for the page is full: export conversations and delete some. The last changes are kept in this tab only."
      : `The browser could not store the conversation (${error?.message ?? error}); export it before you close this tab.`);
  }
}

function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  });
}
