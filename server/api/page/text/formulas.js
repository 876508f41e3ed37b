// Where TeX formulas begin and end in Markdown: rules for markdown-it, whose tokens `formula` and `formula_block`
// contain the source with its delimiters. Refuses to know how a formula looks.
//
// $$…$$ and \[…\] stand alone, \(…\) and $…$ in a sentence. Where it is not clear that a dollar begins a formula, it is
// a dollar.

const CLOSERS = { $$: "$$", "\\[": "\\]", "\\(": "\\)", $: "$" };

export function addFormulas(markdown) {
  markdown.inline.ruler.before("escape", "formula", inlineRule);
  markdown.block.ruler.before("fence", "formula_block", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
}

// The delimiter at a place: a key or a value of CLOSERS, or null. Three dollars are none, but say how expensive something is.
export function delimiterAt(source, at = 0) {
  if (source[at] === "\\") return /^\\[()[\]]/.exec(source.slice(at, at + 2))?.[0] ?? null;
  if (source[at] !== "$" || source[at - 1] === "$") return null;
  const [dollars] = /^\$+/.exec(source.slice(at, at + 3));
  return dollars.length < 3 ? dollars : null;
}

// The end of the first closer from `from` on, or -1. What follows a backslash is no closer, unless both are one.
function endOf(source, closer, from, limit) {
  for (let at = from; at + closer.length <= limit; at += 1) {
    if (delimiterAt(source, at) === closer) return at + closer.length;
    if (source[at] === "\\") at += 1;
  }
  return -1;
}

function inlineRule(state, silent) {
  const { src, pos, posMax } = state;
  const opener = delimiterAt(src, pos);
  // A text without a closer is searched once, not for each opener.
  if (!(opener in CLOSERS) || state.unclosed?.[opener] >= posMax) return false;
  const begin = pos + opener.length;
  const end = endOf(src, CLOSERS[opener], begin, posMax);
  if (end < 0) {
    state.unclosed = { ...state.unclosed, [opener]: posMax };
    return false;
  }
  if (!src.slice(begin, end - opener.length).trim() || (opener === "$" && !isClear(src, pos, end))) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = src.slice(pos, end);
    token.markup = opener;
  }
  state.pos = end;
  return true;
}

// Whether what is between two dollars is a formula, and not text between two amounts or two variables of a shell.
function isClear(source, begin, end) {
  const inside = source.slice(begin + 1, end - 1);
  if (/^\s|\s$|[\n`]/.test(inside)) return false;
  if (/[\p{L}\p{N}$]/u.test(source[begin - 1] ?? "") || /[\p{L}\p{N}$]/u.test(source[end] ?? "")) return false;
  // "$5 a month, in US$"
  return !/^\d/.test(inside) || /[\\^_=]/.test(inside) || !/\s\P{L}?\p{L}{2,}/u.test(inside);
}

// Whether a line begins a block depends on this line alone, and the block ends with its closer or a blank line: so what
// is shown of a text that still grows does not change but at its end.
function blockRule(state, startLine, endLine, silent) {
  const first = lineOf(state, startLine);
  const opener = delimiterAt(first);
  if (state.sCount[startLine] - state.blkIndent >= 4 || (opener !== "$$" && opener !== "\\[")) return false;
  let source = first;
  let end = endOf(source, CLOSERS[opener], opener.length, source.length);
  if (end >= 0 && (source.slice(end).trim() || !source.slice(opener.length, end - opener.length).trim())) return false;
  if (silent) return true;
  let line = startLine + 1;
  for (; end < 0 && line < endLine && !state.isEmpty(line) && state.sCount[line] >= state.blkIndent; line += 1) {
    const from = source.length;
    source += `\n${lineOf(state, line)}`;
    end = endOf(source, CLOSERS[opener], from, source.length);
  }
  state.line = line;
  if (end < 0) {
    pushParagraph(state, source, [startLine, line]);
    return true;
  }
  const token = state.push("formula_block", "", 0);
  token.content = source.slice(0, end);
  token.markup = opener;
  token.map = [startLine, line];
  // On the line of the closer, so that no block begins there.
  if (source.slice(end).trim()) pushParagraph(state, source.slice(end), null);
  return true;
}

function lineOf({ src, bMarks, tShift, eMarks }, line) {
  return src.slice(bMarks[line] + tShift[line], eMarks[line]);
}

function pushParagraph(state, text, map) {
  state.push("paragraph_open", "p", 1).map = map;
  const inline = state.push("inline", "", 0);
  inline.content = text.trim();
  inline.map = map;
  inline.children = [];
  state.push("paragraph_close", "p", -1);
}
