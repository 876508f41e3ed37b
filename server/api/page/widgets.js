// What opens and closes within a message: a panel, folded content, an editor.

import { button, make } from "./dom.js";

// A button in `row` that opens the panel it returns, which is filled when it is first opened.
export function panel(row, name, kind, parts) {
  const box = make("div", { class: kind, hidden: "" });
  row.append(toggle(name, (isOpen) => {
    if (!box.firstChild) box.append(...parts());
    box.hidden = !isOpen;
  }));
  return box;
}

export function toggle(name, onToggle) {
  const element = button(name, () => {
    const isOpen = element.getAttribute("aria-expanded") !== "true";
    element.setAttribute("aria-expanded", String(isOpen));
    onToggle(isOpen);
  });
  element.setAttribute("aria-expanded", "false");
  return element;
}

// Content that is shown only when it is opened; hidden while there is none.
export function foldedView(name, kind, makeView) {
  const summary = make("summary", {}, name);
  const body = make("div");
  const element = make("details", { class: kind, hidden: "" }, summary, body);
  let [view, text, isWhole] = [null, "", false];
  const show = () => {
    if (!element.open || !text) return;
    view ??= makeView(body);
    if (isWhole) view.finish(text);
    else view.grow(text);
  };
  element.addEventListener("toggle", show);
  return {
    element,
    grow: (all, isGoingOn) => {
      summary.classList.toggle("going-on", isGoingOn);
      if (all === text) return;
      text = all;
      element.hidden = false;
      show();
    },
    finish: (all) => {
      [text, isWhole] = [all, true];
      element.hidden = !text;
      summary.classList.remove("going-on");
      show();
    },
  };
}

// Puts an editor in the place of an element until it is used or cancelled.
export function edit({ place, text, label, done, onDone }) {
  if (place.hidden) return;
  const area = make("textarea", { "aria-label": label, rows: String(Math.min(14, text.split("\n").length + 1)) });
  area.value = text;
  const form = make("form", { class: "editor" }, area, make("button", { type: "submit", class: "primary small" }, done));
  const close = () => {
    form.remove();
    place.hidden = false;
  };
  form.append(button("Cancel", close));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    // False while another answer is running.
    if (area.value.trim() && onDone(area.value) !== false) close();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation(); // it would stop an answer
      close();
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  place.hidden = true;
  place.before(form);
  area.focus();
}
