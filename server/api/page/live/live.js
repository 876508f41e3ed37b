// The live view: reads /metrics every second while it is visible, and keeps five minutes of values. Folded away, it
// reads nothing.

import { request } from "../api.js";
import { canvas, drawBar, drawLines, drawRoof, short } from "./chart.js";
import { byId, make } from "../dom.js";
import { keep as keepChoice, recall } from "../preferences.js";
import { CLASSES, draftsOf, isRestart, perSecond, quantile, readingOf, roofPoints, stepRate, stepTimes } from "./metrics.js";

const PERIOD_MS = 1000;
const WINDOW_MS = 300_000;
// The time axis at first; it grows with the readings.
const LEAST_WINDOW_MS = 30_000;
// Rates cover this span, long enough to be steady; quantiles a longer one, since they need requests.
const RATE_MS = 3000;
const QUANTILE_MS = 15_000;

// of(now, back): the values of a card's lines; `back(ms)` is the reading from that long ago.
const CARDS = [
  {
    id: "tokens", name: "Tokens per second", lines: ["out", "in"],
    tip: "Generated tokens and prompt tokens per second, over the last three seconds.",
    of: (now, back) => [perSecond(back(RATE_MS), now, "generated"), perSecond(back(RATE_MS), now, "prompt")],
    show: whole,
  },
  {
    id: "ttft", name: "TTFT", lines: ["p50", "p95"],
    tip: "Time to first token: from the arrival of a request to its first token, over the last 15 seconds; half of the requests are below p50, 19 of 20 below p95.",
    of: (now, back) => quantiles("ttft", now, back), show: time,
  },
  {
    id: "tpot", name: "TPOT", lines: ["p50", "p95"],
    tip: "Time per output token: the mean time of the tokens after the first, of the requests that ended in the last 15 seconds.",
    of: (now, back) => quantiles("tpot", now, back), show: time,
  },
  {
    id: "batch", name: "Batch", lines: ["running", "queued"],
    tip: "Sequences that run together in one step, and sequences that wait in the queue.",
    of: (now) => [now.running, now.waiting], show: whole,
  },
  {
    id: "kv", name: "KV cache", lines: ["used"], mark: 1,
    tip: "The share of the key-value cache's blocks that running sequences hold; at 100 % some of them are preempted, and recomputed later.",
    of: (now) => [now.usedBlocks / (now.usedBlocks + now.idleBlocks + now.freeBlocks || 1)], show: percent,
  },
  {
    id: "hits", name: "Prefix hits", lines: ["hit"], mark: 1,
    tip: "The share of prompt tokens that were found in the prefix cache and not computed, over the last 15 seconds.",
    of: (now, back) => [hitShare(back(QUANTILE_MS), now)], show: percent,
  },
  {
    id: "step", name: "Step time", lines: ["predicted", "measured"],
    tip: "The mean time of a step, as the server predicted it before the step ran, and as it was, over the last three seconds. Targets are met by these predictions.",
    of: (now, back) => stepTimes(back(RATE_MS), now), show: time,
  },
];
const USES = [
  {
    id: "mbu", name: "MBU", ratio: "bandwidthRatio", peak: "bandwidthPeak", total: "bytes", unit: "B/s",
    tip: "Model bandwidth utilization: the bytes per second that the steps must read, as a share of the memory bandwidth; decoding is fast when it is near 100 %, the dashed line.",
  },
  {
    id: "mfu", name: "MFU", ratio: "flopsRatio", peak: "flopsPeak", total: "flops", unit: "FLOP/s",
    tip: "Model FLOPs utilization: the operations per second of the steps, as a share of the peak rate; prefill is fast when it is near 100 %, the dashed line.",
  },
];

const SHOWN = "show-live";

let readings = [];
let views = [];

// onReachable(isReachable): called when the server becomes unreachable or reachable. Returns `resume`,
// to be called with a new key: after a 401 the view stops reading.
export function startLive({ onReachable }) {
  views = [...CARDS.map(lineCard), ...USES.map(useCard), draftsCard(), roofCard()];
  byId("cards").append(...views.map((view) => view.element));
  startFolding();
  let isLocked = false;
  let isReachable = true;
  const reach = (isReachableNow) => {
    if (isReachableNow !== isReachable) onReachable(isReachableNow);
    isReachable = isReachableNow;
  };
  const read = async () => {
    try {
      const response = await request("metrics");
      reach(true);
      keep(readingOf(await response.text(), performance.now()));
      note(windowMs() < WINDOW_MS ? "Every second while this is open" : "Every second, the last five minutes");
    } catch (error) {
      isLocked = error.status === 401;
      reach(error.status !== 0);
      note(error.message);
    }
  };
  // One request at a time: a slow server gets no more requests than it answers.
  const loop = async () => {
    if (!document.hidden && !isLocked && byId("live").checkVisibility()) await read();
    setTimeout(loop, PERIOD_MS);
  };
  loop();
  return { resume: () => { isLocked = false; } };
}

function startFolding() {
  const show = (isShown) => {
    byId("live-open").setAttribute("aria-expanded", String(isShown));
    document.body.classList.toggle("without-live", !isShown);
  };
  show(recall(SHOWN, true));
  byId("live-open").addEventListener("click", () => {
    keepChoice(SHOWN, !recall(SHOWN, true));
    show(recall(SHOWN, true));
  });
}

function note(text) {
  if (byId("live-note").textContent !== text) byId("live-note").textContent = text;
}

function keep(now) {
  if (readings.length && isRestart(readings.at(-1), now)) readings = [];
  const before = readings.filter(({ atMs }) => atMs > now.atMs - WINDOW_MS);
  readings = [...before, now];
  if (!before.length) return;
  // The last one if the page was hidden since then, or the server slow.
  const back = (ms) => before.find(({ atMs }) => atMs >= now.atMs - ms - PERIOD_MS / 2) ?? before.at(-1);
  for (const view of views) view.show(now, back);
}

function windowMs() {
  const spanMs = readings.length ? readings.at(-1).atMs - readings[0].atMs : 0;
  return Math.min(WINDOW_MS, Math.max(LEAST_WINDOW_MS, spanMs + PERIOD_MS));
}

function lineCard(card) {
  const kept = card.lines.map(() => []);
  const values = card.lines.map((name, i) => make("strong", { class: `value value-${i}` }, "–"));
  const row = make("p", { class: "values" });
  card.lines.forEach((name, i) => row.append(make("span", {}, values[i], make("small", {}, name))));
  const svg = canvas();
  const element = cardElement(card, row, svg);
  const show = (now, back) => {
    card.of(now, back).forEach((value, i) => {
      kept[i] = kept[i].filter(({ atMs }) => atMs > now.atMs - WINDOW_MS);
      kept[i].push({ atMs: now.atMs, value });
      values[i].textContent = value === null ? "–" : card.show(value);
    });
    drawLines(svg, kept, { nowMs: now.atMs, windowMs: windowMs(), mark: card.mark });
  };
  return { element, show };
}

// A bar and five minutes of values, relative to the peak measured at start, else to the datasheet's. If
// neither is known, the rate itself.
function useCard(use) {
  const value = make("strong", { class: "value value-0" }, "–");
  const peakText = make("small");
  const [bar, svg] = [canvas(300, 28), canvas()];
  const element = cardElement(use, make("p", { class: "values" }, make("span", {}, value, peakText)), bar, svg);
  let kept = [];
  const show = (now, back) => {
    const source = peakOf(now[use.peak]);
    const used = source ? now[use.ratio][source] ?? 0 : stepRate(back(QUANTILE_MS), now, use.total);
    kept = [...kept.filter(({ atMs }) => atMs > now.atMs - WINDOW_MS), { atMs: now.atMs, value: used }];
    value.textContent = source ? percent(used) : short(used, use.unit);
    peakText.textContent = source ? `of ${short(now[use.peak][source], use.unit)} ${source}` : "peak unknown";
    bar.toggleAttribute("hidden", !source);
    if (source) drawBar(bar, used);
    drawLines(svg, [kept], { nowMs: now.atMs, windowMs: windowMs(), mark: source ? 1 : undefined });
  };
  return { element, show };
}

// Hidden where the server's steps take no drafts.
function draftsCard() {
  const names = ["tokens a step", "accepted"];
  const values = names.map((_, i) => make("strong", { class: `value value-${i}` }, "–"));
  const row = make("p", { class: "values" }, ...names.map((name, i) => make("span", {}, values[i], make("small", {}, name))));
  const list = make("ul", { class: "legend" });
  const tip = "Tokens that may come next, from a small model, a grammar or what was said before, which a step verifies beside the last token: how many tokens a step with drafts gave a sequence, and how many drafts were accepted, in the last five minutes.";
  const element = cardElement({ id: "drafts", name: "Drafts", tip }, row, list);
  element.hidden = true;
  const show = (now, back) => {
    const sources = draftsOf(back(WINDOW_MS), now);
    element.hidden = !Object.keys(now.proposed).length;
    const figures = sources.length ? figuresOf(total(sources)) : ["–", "–"];
    values.forEach((value, i) => { value.textContent = figures[i]; });
    list.replaceChildren(...sources.map((each) => make("li", {}, `${each.source}: ${whole(each.accepted)} of ${whole(each.proposed)} accepted, ${figuresOf(each)[0]} tokens a step`)));
  };
  return { element, show };
}

function total(sources) {
  const sum = (name) => sources.reduce((before, each) => before + each[name], 0);
  return { rows: sum("rows"), proposed: sum("proposed"), accepted: sum("accepted") };
}

function figuresOf({ rows, proposed, accepted }) {
  return [(1 + accepted / rows).toFixed(1), percent(accepted / proposed)];
}

function roofCard() {
  const svg = canvas(372, 214, false);
  svg.toggleAttribute("hidden", true);
  const text = make("p", {}, make("small", {}, "Waiting for steps"));
  const legend = make("ul", { class: "legend" });
  const card = { id: "roof", name: "Roofline: steps against the hardware's limit", tip: "The line is the limit of the hardware. On its slope the limit is memory bandwidth: few operations per byte read, as in decoding; on its flat part it is arithmetic, as in prefill. The points are the steps of the last 15 seconds; the gap above each is its distance from the limit." };
  const element = cardElement(card, text, svg, legend);
  const show = (now, back) => {
    const source = peakOf(now.bandwidthPeak);
    text.hidden = Boolean(source);
    svg.toggleAttribute("hidden", !source);
    legend.hidden = !source;
    if (!source) {
      text.firstChild.textContent = "The bandwidth of this hardware is unknown, so there is no roofline.";
      return;
    }
    const flopsPeak = now.flopsPeak[peakOf(now.flopsPeak)];
    const peaks = { bandwidthPeak: now.bandwidthPeak[source], flopsPeak };
    const points = roofPoints(back(QUANTILE_MS), now);
    drawRoof(svg, points, peaks);
    legend.replaceChildren(...CLASSES.map((name) => legendLine(name, points.find((each) => each.name === name), peaks)));
  };
  return { element, show };
}

// One class of steps in words: the share of its limit that it reaches, and which limit that is.
function legendLine(name, point, { bandwidthPeak, flopsPeak }) {
  const letter = make("span", { class: `letter ${name}`, "aria-hidden": "true" }, name[0].toUpperCase());
  if (!point) return make("li", {}, letter, `${name}: no recent steps`);
  const byMemory = point.intensity * bandwidthPeak;
  const isMemory = !(flopsPeak < byMemory);
  const share = percent(point.rate / (isMemory ? byMemory : flopsPeak));
  return make("li", {}, letter, `${name}: `, make("strong", {}, share), ` of the limit by ${isMemory ? "memory" : "arithmetic"}`);
}

// The meaning of the number is shown on hover and on focus, and read out by screen readers.
function cardElement({ id, name, tip }, ...content) {
  const tipElement = make("p", { class: "tip", role: "tooltip", id: `${id}-tip` }, tip);
  const attributes = { class: "card", id, role: "group", tabindex: "0", "aria-label": name, "aria-describedby": `${id}-tip` };
  return make("div", attributes, make("h3", {}, name), ...content, tipElement);
}

function peakOf(peaks) {
  return ["measured", "datasheet"].find((source) => peaks[source]);
}

function quantiles(name, now, back) {
  const before = back(QUANTILE_MS)[name];
  return [quantile(0.5, before, now[name]), quantile(0.95, before, now[name])];
}

function hitShare(before, now) {
  const queried = now.queried - before.queried;
  return queried ? (now.hit - before.hit) / queried : null;
}

function whole(value) {
  return Math.round(value).toLocaleString("en");
}

function percent(ratio) {
  return `${(ratio * 100).toFixed(ratio < 0.1 ? 1 : 0)} %`;
}

function time(seconds) {
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return `${(seconds * 1e3).toPrecision(seconds >= 0.1 ? 3 : 2)} ms`;
}
