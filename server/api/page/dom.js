// Elements and text. What is given as text stays text; markdown.js alone makes elements of text.

export function byId(id) {
  return document.getElementById(id);
}

// make("p", { class: "note" }, "text", element): children that are strings become text.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function button(text, onClick) {
  const element = make("button", { type: "button", class: "quiet small" }, text);
  element.addEventListener("click", () => onClick(element));
  return element;
}

// Opens or closes the panel of a button with aria-expanded.
export function setOpen(opener, panel, isOpen) {
  panel.hidden = !isOpen;
  opener.setAttribute("aria-expanded", String(isOpen));
}

// Copies text to the clipboard, and briefly shows the result on the button.
export async function copy(text, element) {
  const label = element.dataset.label ??= element.textContent;
  try {
    await writeToClipboard(text);
    element.textContent = "Copied";
  } catch {
    element.textContent = "Not allowed";
  }
  setTimeout(() => { element.textContent = label; }, 1200);
}

async function writeToClipboard(text) {
  // Browsers provide navigator.clipboard only over TLS or from this machine.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("the browser refused");
  return undefined;
}
