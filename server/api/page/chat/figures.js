// The timings of an answer as a list: {numIn, numCached, numOut, totalMs} and, if it was streamed, {ttftMs, decodeMs}.

import { make } from "../dom.js";

const ENDS = {
  length: "The answer reached max tokens or the end of the model's context.",
  stop: "The model or a stop string ended the answer.",
  tool_calls: "The model called tools.",
};

export function figureList(figures, finish) {
  const { numIn, numCached, numOut, ttftMs, decodeMs, totalMs } = figures;
  const list = make("dl", { class: "figures" });
  const add = (name, value, tip) => list.append(make("div", { title: tip }, make("dt", {}, name), make("dd", {}, value)));
  if (ttftMs) add("TTFT", ms(ttftMs), "From sending the question to the first text of the answer, as measured by this page.");
  if (numOut > 1 && decodeMs > 0) add("TPOT", ms(decodeMs / (numOut - 1)), "The mean time per token after the first.");
  add("Speed", `${rate((numOut / totalMs) * 1e3)} tok/s`, "Tokens of the answer divided by the total time, queueing included.");
  add("Total", ms(totalMs), "From sending the question to the end of the answer.");
  add("In", numCached ? `${numIn} (${numCached} cached)` : `${numIn}`, "Tokens of the prompt, and how many of them were in the prefix cache.");
  add("Out", `${numOut}`, "Tokens of the answer; of its last part if it was continued.");
  const end = finish in ENDS ? finish : "stop";
  add("End", end.replace("_", " "), ENDS[end]);
  return list;
}

function ms(value) {
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(value >= 10 ? 3 : 2)} ms`;
}

function rate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}
