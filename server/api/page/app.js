// Connects the parts: colours, views, the API key, the served models, and the address of the open conversation.

import { apiKey, isApiKeyKept, request, storeApiKey } from "./api.js";
import { find, startConversations } from "./chat/conversations.js";
import { byId, make, setOpen } from "./dom.js";
import { startLive } from "./live/live.js";
import { openConversation, openId, showRemoval, startPlayground, useModel } from "./chat/playground.js";
import { keep, recall } from "./preferences.js";
import { showConversations, startSidebar } from "./chat/sidebar.js";

const THEME = "theme";
const ADDRESS = "#chat-";
const RETRY_MS = 1000;
const AWAY = "The server cannot be reached";

let retry = null;
let isAddressed = false; // whether the hash has been read

startPlayground({ onKeyNeeded: askForKey, onUnreachable: findModel, onOpen: () => onConversations(null, true) });
startSidebar();
const live = startLive({ onReachable: (isReachable) => (isReachable ? findModel() : showState("away", AWAY)) });
startTheme();
startViews();
startKey();
startAddress();
findModel();
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the conversation's
  byId("prompt").focus();
});

// The hash names the open conversation, so that a reload and the browser's buttons find it.
async function startAddress() {
  await startConversations((problem) => onConversations(problem, false), showRemoval);
  const follow = () => {
    const id = location.hash.slice(ADDRESS.length);
    if (id !== (find(openId()) ? openId() : "")) openConversation(find(id));
  };
  isAddressed = true;
  if (location.hash.startsWith(ADDRESS)) follow();
  addEventListener("popstate", follow);
}

function onConversations(problem, isOther) {
  showConversations(problem);
  const kept = find(openId());
  const address = kept ? ADDRESS + kept.id : "";
  document.title = kept?.title ? `${kept.title} - Penstock` : "Penstock";
  if (!isAddressed || address === location.hash) return;
  // A conversation gets its address with its first question, which is no step of its own.
  history[isOther ? "pushState" : "replaceState"](null, "", address || location.pathname + location.search);
}

async function findModel() {
  try {
    const response = await request("v1/models");
    const { data } = await response.json();
    showModels(data);
    showState("ready", data[0].id);
  } catch (error) {
    if (error.status === 401) {
      askForKey();
      return; // submitting the key's form calls this again
    }
    showState(error.status ? "loading" : "away", error.status ? "The model is loading" : AWAY);
    clearTimeout(retry);
    retry = setTimeout(findModel, RETRY_MS);
  }
}

// A server has one model, maybe under several names, which are no choice; behind a proxy there may be more.
function showModels(models) {
  const list = byId("models");
  const wanted = models.find(({ id }) => id === list.value) ?? models[0];
  list.replaceChildren(...models.map(({ id }) => make("option", { value: id }, id)));
  list.value = wanted.id;
  const isChoice = new Set(models.map(({ id, root }) => root ?? id)).size > 1;
  list.hidden = !isChoice;
  byId("model-text").hidden = isChoice;
  const use = () => {
    const { id, max_model_len: length } = models.find((each) => each.id === list.value);
    useModel(id);
    if (length) byId("model").title = `Up to ${length.toLocaleString("en")} tokens, prompt and answer`;
  };
  list.onchange = use;
  use();
}

function showState(state, text) {
  byId("state").dataset.state = state;
  if (state !== "ready") {
    byId("models").hidden = true;
    byId("model-text").hidden = false;
  }
  byId("model-text").textContent = text;
}

function askForKey() {
  showState("locked", "The server requires an API key");
  if (apiKey()) byId("key-note").textContent = "The server does not accept this key; enter another one.";
  setOpen(byId("key-open"), byId("key-form"), true);
  byId("key").focus();
}

function startKey() {
  byId("key").value = apiKey();
  byId("key-keep").checked = isApiKeyKept();
  byId("key-open").addEventListener("click", () => {
    setOpen(byId("key-open"), byId("key-form"), byId("key-form").hidden);
    if (!byId("key-form").hidden) byId("key").focus();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    if (/[^ -~]/.test(key)) {
      byId("key-note").textContent = "A key may contain only ASCII letters, digits and symbols, because it is sent in a header; enter it again.";
      return;
    }
    storeApiKey(key, byId("key-keep").checked);
    live.resume();
    setOpen(byId("key-open"), byId("key-form"), false);
    byId("prompt").focus();
    findModel();
  });
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => recall(THEME, null) ?? (system.matches ? "dark" : "light");
  const show = () => {
    const other = chosen() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = chosen();
    byId("theme").setAttribute("aria-label", `Switch to ${other} colours`);
  };
  byId("theme").addEventListener("click", () => {
    keep(THEME, chosen() === "dark" ? "light" : "dark");
    show();
  });
  system.addEventListener("change", show);
  show();
}

// A narrow screen shows one view at a time; a wide one shows both, without these buttons.
function startViews() {
  const buttons = document.querySelectorAll("[data-show]");
  for (const element of buttons) {
    element.addEventListener("click", () => {
      document.body.dataset.view = element.dataset.show;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === element));
    });
  }
}
