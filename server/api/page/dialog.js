// The page's one dialog: a question before something that cannot be undone, or for a name.

import { byId } from "./dom.js";

// The text that the user enters (empty if none is asked for), or null if they cancel.
export function answerOf(question, done, text) {
  const dialog = byId("dialog");
  byId("dialog-text").textContent = question;
  byId("dialog-done").textContent = done;
  byId("dialog-field").hidden = text === undefined;
  byId("dialog-field").value = text ?? "";
  byId("dialog-cancel").onclick = () => dialog.close();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "done" ? byId("dialog-field").value : null);
    }, { once: true });
  });
}
