// Connects the parts: colours, views, the API key and the served model.

import { apiKey, storeApiKey, request } from "./api.js";
import { byId, setOpen } from "./dom.js";
import { startLive } from "./live.js";
import { startPlayground } from "./playground.js";

const THEME = "penstock-theme";
const RETRY_MS = 1000;
const AWAY = "The server cannot be reached";

const playground = startPlayground({ onKeyNeeded: askForKey });
const live = startLive({ onReachable: (isReachable) => (isReachable ? findModel() : showState("away", AWAY)) });
startTheme();
startViews();
startKey();
findModel();

async function findModel() {
  try {
    const response = await request("v1/models");
    const { data } = await response.json();
    playground.use(data[0].id);
    byId("model").title = `Up to ${data[0].max_model_len.toLocaleString("en")} tokens, prompt and answer`;
    showState("ready", data[0].id);
  } catch (error) {
    if (error.status === 401) {
      askForKey();
      return; // submitting the key's form calls this again
    }
    showState(error.status ? "loading" : "away", error.status ? "The model is loading" : AWAY);
    setTimeout(findModel, RETRY_MS);
  }
}

function showState(state, text) {
  byId("state").dataset.state = state;
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
    storeApiKey(key);
    live.resume();
    setOpen(byId("key-open"), byId("key-form"), false);
    byId("prompt").focus();
    findModel();
  });
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem(THEME) ?? (system.matches ? "dark" : "light");
  const show = () => {
    const other = chosen() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = chosen();
    byId("theme").setAttribute("aria-label", `Switch to ${other} colours`);
  };
  byId("theme").addEventListener("click", () => {
    localStorage.setItem(THEME, chosen() === "dark" ? "light" : "dark");
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
