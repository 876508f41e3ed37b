// The tokens of an answer in shades of their probability. One is selected with the mouse or the arrow keys, and
// its alternatives are shown below.

import { make } from "../dom.js";

const SHADES = [0.9, 0.6, 0.3, 0.1]; // the least probability of each shade but the last
const STEPS = { ArrowLeft: -1, ArrowRight: 1 };

// tokens: [{token, logprob, top: [[token, logprob], ...]}].
export function tokenView(tokens) {
  const spans = tokens.map(({ token, logprob }) => make("span", { class: `shade-${shadeOf(logprob)}` }, token));
  const text = make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; the arrow keys select one" }, ...spans);
  const detail = make("p", { class: "token-detail", role: "status" }, "Select a token to see its alternatives.");
  let selected = -1;
  const select = (i) => {
    if (!spans[i]) return;
    spans[selected]?.classList.remove("selected");
    selected = i;
    spans[i].classList.add("selected");
    const { token, logprob, top } = tokens[i];
    const others = top.filter(([other]) => other !== token).map(([other, value]) => `${JSON.stringify(other)} ${percent(value)}`);
    detail.textContent = `${JSON.stringify(token)} ${percent(logprob)}${others.length ? `; instead of it ${others.join(", ")}` : ""}`;
  };
  text.addEventListener("click", (event) => select(spans.indexOf(event.target)));
  text.addEventListener("keydown", (event) => {
    if (!STEPS[event.key]) return;
    event.preventDefault();
    select(Math.max(0, selected + STEPS[event.key]));
  });
  return make("div", {}, text, detail);
}

function shadeOf(logprob) {
  const shade = SHADES.findIndex((least) => Math.exp(logprob) >= least);
  return shade < 0 ? SHADES.length : shade;
}

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return `${value < 1 ? value.toPrecision(1) : value.toFixed(1)} %`;
}
