// Formulas as elements. KaTeX makes HTML for the eyes and MathML for screen readers; both are sanitized. What KaTeX
// does not understand stays as its source.

import "../vendor/purify.js";
import { delimiterAt } from "./formulas.js";

const { DOMPurify } = globalThis;
const TAGS = [
  "annotation", "line", "math", "menclose", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow", "mspace",
  "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "path", "semantics", "span",
  "svg",
];
const ATTRIBUTES = [
  "accent", "accentunder", "aria-hidden", "class", "columnalign", "columnlines", "columnspacing", "d", "data-style", "depth",
  "display", "displaystyle", "encoding", "fence", "height", "largeop", "linethickness", "lspace", "lquote", "mathbackground",
  "mathcolor", "mathsize", "mathvariant", "maxsize", "minsize", "movablelimits", "notation", "preserveaspectratio", "rowlines",
  "rowspacing", "rquote", "rspace", "scriptlevel", "separator", "side", "stretchy", "stroke-width", "symmetric", "viewbox",
  "voffset", "width", "x1", "x2", "y1", "y2",
];
const ALLOWED = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ATTRIBUTES,
  ADD_URI_SAFE_ATTR: ATTRIBUTES, // none is an address
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
};
const STYLES = new Set([
  "background-color", "border", "border-bottom-width", "border-color", "border-right-style", "border-right-width", "border-style",
  "border-top-width", "border-width", "bottom", "color", "height", "left", "margin", "margin-left", "margin-right", "margin-top",
  "min-width", "padding-left", "padding-right", "position", "text-shadow", "top", "vertical-align", "width",
]);
// KaTeX takes a millisecond for about 50 characters.
const MAX_LENGTH = 5000;
const MAX_KEPT = 300;
const OPTIONS = {
  throwOnError: true,
  strict: false, // it would warn in the console
  trust: false, // no links, images, classes or ids
  maxSize: 50,
  maxExpand: 1000,
};
// Macros of its own make a hundred characters a million: theirs expand to no more than this.
const DEFINES = /\\(?:[egx]?def|(?:future)?let|(?:re)?newcommand|providecommand)/;
const MAX_EXPANDED_LENGTH = 10_000;

let katex = null;
let isRequested = false;
const kept = new Map(); // source -> fragment: those of an answer that grows are shown again and again

// Shows the formulas below a root; later, if the library is not loaded.
export function showFormulas(root) {
  const elements = root.querySelectorAll(".formula:not(.shown)");
  if (!elements.length) return;
  if (!katex) {
    loadKatex();
    return;
  }
  for (const element of elements) {
    const fragment = fragmentOf(element.textContent, element.classList.contains("alone"));
    element.classList.add("shown");
    if (fragment) element.replaceChildren(fragment.cloneNode(true));
  }
}

// Loaded for the first formula.
async function loadKatex() {
  if (isRequested) return;
  isRequested = true;
  try {
    await import("../vendor/katex.js");
  } catch {
    return; // the server has gone, which the page says elsewhere; formulas stay as their source
  }
  katex = globalThis.katex;
  showFormulas(document);
}

// Null if it is no formula.
function fragmentOf(source, displayMode) {
  if (source.length > MAX_LENGTH) return null;
  if (kept.has(source)) return kept.get(source);
  if (kept.size >= MAX_KEPT) kept.clear();
  const { length } = delimiterAt(source);
  const options = { ...OPTIONS, displayMode };
  if (DEFINES.test(source)) options.maxExpand = MAX_EXPANDED_LENGTH / source.length;
  let fragment = null;
  try {
    fragment = sanitized(katex.renderToString(source.slice(length, -length), options));
  } catch {
    // a command that KaTeX does not know, or braces that do not match
  }
  kept.set(source, fragment);
  return fragment;
}

// The policy of the page forbids style attributes in markup, so that they are set one by one.
function sanitized(html) {
  const fragment = DOMPurify.sanitize(html.replace(/ style=(?=["'])/g, " data-style="), ALLOWED);
  for (const element of fragment.querySelectorAll("[data-style]")) {
    for (const style of element.getAttribute("data-style").split(";")) {
      const [name, value] = style.split(":");
      if (STYLES.has(name)) element.style.setProperty(name, value);
    }
    element.removeAttribute("data-style");
  }
  return fragment;
}
