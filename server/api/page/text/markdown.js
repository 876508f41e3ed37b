// Markdown of the model as elements. Nothing in it can run or load: raw HTML stays text, links lead only to
// the web and to mail, images become links, and what the libraries make of it is sanitized.

import MarkdownIt from "../vendor/markdown-it.js";
import "../vendor/purify.js";
import { addFormulas } from "./formulas.js";
import { showFormulas } from "./math.js";

const { DOMPurify } = globalThis;
const ALLOWED = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "button", "code", "div", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "s",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["aria-label", "class", "dir", "href", "rel", "role", "start", "tabindex", "target", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  // What is no address is not checked as one.
  ADD_URI_SAFE_ATTR: ["aria-label", "dir", "rel", "start", "tabindex", "target", "type"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
};
// Below the page's own headings.
const HEADING_LEVEL = 2;
const DIRECTED = new Set([
  "blockquote_open", "bullet_list_open", "heading_open", "ordered_list_open", "paragraph_open", "table_open",
]);
// Colouring takes a millisecond for about 4,000 characters.
const MAX_COLOURED_LENGTH = 100_000;

const markdown = new MarkdownIt({ linkify: true });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // "README.md" is no address
markdown.validateLink = (address) => ALLOWED.ALLOWED_URI_REGEXP.test(address);
addFormulas(markdown);
// Thousands of elements in one paragraph take time that grows with their square: this long it stays text.
const MAX_PARAGRAPH_LENGTH = 20_000;
markdown.core.ruler.before("inline", "long", ({ tokens }) => tokens.forEach((token) => {
  if (token.type === "inline" && token.content.length > MAX_PARAGRAPH_LENGTH) token.type = "text";
}));
markdown.core.ruler.push("adapt", ({ tokens }) => tokens.forEach(adapt));
const { rules } = markdown.renderer;
const escape = markdown.utils.escapeHtml;

// Text direction by content; headings below the page's; check boxes of lists as characters.
function adapt(token, i, tokens) {
  if (DIRECTED.has(token.type)) token.attrSet("dir", "auto");
  if (token.type.startsWith("heading")) token.tag = `h${Math.min(6, Number(token.tag[1]) + HEADING_LEVEL)}`;
  if (token.type === "inline" && tokens[i - 2]?.type === "list_item_open") {
    const [first] = token.children;
    if (first?.type === "text") first.content = first.content.replace(/^\[ \] /, "☐ ").replace(/^\[x\] /i, "☑ ");
  }
}

// The policy of the page forbids style attributes.
rules.td_open = rules.th_open = (tokens, i, options, env, renderer) => {
  const [, side] = /text-align:(\w+)/.exec(tokens[i].attrGet("style") ?? "") ?? [];
  tokens[i].attrs = side ? [["class", `to-${side}`]] : null;
  return renderer.renderToken(tokens, i, options);
};

rules.table_open = (tokens, i, options, env, renderer) =>
  `<div class="table" tabindex="0" role="group" aria-label="Table">${renderer.renderToken(tokens, i, options)}`;
rules.table_close = () => "</table></div>";

rules.link_open = (tokens, i, options, env, renderer) => {
  tokens[i].attrSet("target", "_blank");
  tokens[i].attrSet("rel", "noopener noreferrer nofollow");
  return renderer.renderToken(tokens, i, options);
};

// Loading an image would tell its host that, and when, somebody reads this.
rules.image = (tokens, i) => {
  const label = escape(`Image: ${tokens[i].content || tokens[i].attrGet("src")}`);
  const depth = tokens.slice(0, i).reduce((sum, { type }) => sum + (type === "link_open") - (type === "link_close"), 0);
  if (depth) return label;
  return `<a href="${escape(tokens[i].attrGet("src"))}" target="_blank" rel="noopener noreferrer nofollow">${label}</a>`;
};

rules.fence = rules.code_block = (tokens, i) => {
  const code = tokens[i].content;
  const language = /^[\w+#.-]*/.exec(tokens[i].info)[0].toLowerCase();
  const coloured = colour(code, language);
  return `<div class="code-block"><div class="code-bar"><span>${escape(language)}</span>`
    + '<button type="button" class="quiet small copy-code">Copy</button></div>'
    + '<pre tabindex="0" role="group" aria-label="Code" dir="ltr">'
    + `<code class="language-${escape(language)}${coloured ? " coloured" : ""}">${coloured ?? escape(code)}</code></pre></div>`;
};

rules.formula = rules.formula_block = (tokens, i) => {
  const { type, markup, content } = tokens[i];
  const tag = type === "formula_block" ? "div" : "span";
  const more = ["$$", "\\["].includes(markup) ? ' class="formula alone" tabindex="0" role="group" aria-label="Formula"' : ' class="formula"';
  return `<${tag}${more}>${escape(content)}</${tag}>`;
};

let highlighter = null;
let isHighlighterRequested = false;

// HTML, or null while the library is not loaded, and for languages that it does not know.
function colour(code, language) {
  if (!language || code.length > MAX_COLOURED_LENGTH) return null;
  if (!highlighter) {
    loadHighlighter();
    return null;
  }
  return highlighter.getLanguage(language) ? highlighter.highlight(code, { language, ignoreIllegals: true }).value : null;
}

// As large as all the rest of the page, so it is loaded for the first code that names a language.
async function loadHighlighter() {
  if (isHighlighterRequested) return;
  isHighlighterRequested = true;
  try {
    highlighter = (await import("../vendor/highlight.js")).default;
  } catch {
    return; // the server has gone, which the page says elsewhere; code stays in one colour
  }
  for (const element of document.querySelectorAll("code[class^=language-]:not(.coloured)")) {
    const coloured = colour(element.textContent, element.className.slice("language-".length));
    if (!coloured) continue;
    element.replaceChildren(DOMPurify.sanitize(coloured, ALLOWED));
    element.classList.add("coloured");
  }
}

// All elements of a source.
export function allElementsOf(source) {
  const env = {};
  return build(markdown.parse(source, env), env);
}

// The elements of a source that may continue. settled: those that no continuation changes, made of the
// source up to settledLength; open: the rest. Only link definitions can change what is settled.
export function elementsOf(source) {
  const env = {};
  const tokens = markdown.parse(source, env);
  const starts = tokens.flatMap((token, i) => (token.level === 0 && token.nesting >= 0 && token.map ? [i] : []));
  const offsets = starts.slice(-2).map((i) => offsetOfLine(source, tokens[i].map[0]));
  // Whether a line starts a block is certain only when the line is complete: "2" may become "2." of a list.
  const last = source.includes("\n", offsets.at(-1)) ? -1 : -2;
  const firstOpen = starts.at(last) ?? 0;
  return {
    settled: build(tokens.slice(0, firstOpen), env),
    settledLength: firstOpen ? offsets.at(last) : 0,
    open: build(tokens.slice(firstOpen), env),
  };
}

// A link may be defined below its use.
export function definesLinks(source) {
  return /^ {0,3}\[[^\]]+\]:/m.test(source);
}

function build(tokens, env) {
  if (!tokens.length) return [];
  const fragment = DOMPurify.sanitize(markdown.renderer.render(tokens, markdown.options, env), ALLOWED);
  showFormulas(fragment);
  return [...fragment.children];
}

// The lines of the parser end as in its normalization of line ends.
function offsetOfLine(source, line) {
  const ends = /\r\n?|\n/g;
  for (let i = 0; i < line; i += 1) ends.exec(source);
  return line ? ends.lastIndex : 0;
}
