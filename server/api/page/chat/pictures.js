// Pictures of a question: dropped, pasted or chosen, shown, and sent as data: URLs. They are drawn on canvases, so that
// the page's security policy need not allow images.

import { byId, make } from "../dom.js";

const TYPES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif"]);
const MAX_SIDE_PX = 160;

let waiting = []; // data: URLs, of the question that is being written

// Throws nothing: what cannot be a picture is told in the line of errors.
export function startPictures() {
  byId("prompt").addEventListener("paste", (event) => takeFiles(event, event.clipboardData));
  const place = byId("playground");
  place.addEventListener("dragover", (event) => {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  place.addEventListener("drop", (event) => takeFiles(event, event.dataTransfer));
}

export function takePictures() {
  const taken = waiting;
  waiting = [];
  show();
  return taken;
}

export function hasPictures() {
  return waiting.length > 0;
}

export function isPicture(url) {
  return typeof url === "string" && /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/.test(url);
}

// Small ones in a row; onRemove(i), if it is given, makes buttons of them.
export function pictureRow(urls, onRemove = null) {
  const row = make("div", { class: "pictures" });
  for (const [i, url] of urls.entries()) {
    const label = `Picture ${i + 1} of ${urls.length}`;
    const canvas = make("canvas", onRemove ? { "aria-hidden": "true" } : { role: "img", "aria-label": label });
    draw(canvas, url);
    if (!onRemove) {
      row.append(canvas);
      continue;
    }
    const element = make("button", { type: "button", class: "picture", "aria-label": `Remove ${label.toLowerCase()}`, title: "Remove" }, canvas);
    element.addEventListener("click", () => onRemove(i));
    row.append(element);
  }
  return row;
}

async function takeFiles(event, { files }) {
  if (!files.length) return; // a text is pasted or dropped
  event.preventDefault();
  const pictures = [...files].filter(({ type }) => TYPES.has(type));
  byId("ask-error").hidden = pictures.length === files.length;
  byId("ask-error").textContent = "Only PNG, JPEG, WebP and GIF pictures can be sent.";
  waiting.push(...await Promise.all(pictures.map(urlOf)));
  show();
}

function show() {
  const row = pictureRow(waiting, (i) => {
    waiting.splice(i, 1);
    show();
    byId("prompt").focus();
  });
  byId("pictures").replaceChildren(...row.childNodes);
  byId("pictures").hidden = !waiting.length;
}

function urlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function draw(canvas, url) {
  const [head, text] = url.split(",", 2);
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  try {
    const bitmap = await createImageBitmap(new Blob([bytes], { type: head.slice(5).split(";")[0] }));
    const scale = Math.min(1, MAX_SIDE_PX / Math.max(bitmap.width, bitmap.height));
    canvas.width = Math.max(1, bitmap.width * scale);
    canvas.height = Math.max(1, bitmap.height * scale);
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  } catch {
    canvas.classList.add("unreadable"); // the server says why
  }
}
