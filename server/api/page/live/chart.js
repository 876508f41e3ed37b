// SVG charts: lines over the last minutes, a bar with its peak, the roofline.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 56;

function shape(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export function canvas(width = WIDTH, height = HEIGHT, isStretched = true) {
  const attributes = { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" };
  if (isStretched) attributes.preserveAspectRatio = "none";
  return shape("svg", attributes);
}

// lines: [[{atMs, value or null}]]; the area below the first is filled. mark: a limit to draw.
export function drawLines(svg, lines, { nowMs, windowMs, mark }) {
  const values = lines.flat().map(({ value }) => value ?? 0);
  const top = Math.max(...values, mark ?? 0) * 1.08 || 1;
  const x = (atMs) => (WIDTH * (1 - (nowMs - atMs) / windowMs)).toFixed(1);
  const y = (value) => (HEIGHT - 1 - (HEIGHT - 2) * (value / top)).toFixed(1);
  const parts = [];
  lines.forEach((line, i) => {
    for (const run of runs(line)) {
      const path = run.map(({ atMs, value }) => `${x(atMs)},${y(value)}`).join("L");
      const [first, last] = [x(run[0].atMs), x(run.at(-1).atMs)];
      if (i === 0) parts.push(shape("path", { class: "fill", d: `M${first},${HEIGHT}L${path}L${last},${HEIGHT}Z` }));
      parts.push(shape("path", { class: `line line-${i}`, d: `M${path}` }));
    }
  });
  if (mark) parts.push(shape("path", { class: "mark", d: `M0,${y(mark)}H${WIDTH}` }));
  svg.replaceChildren(...parts);
}

// The parts of a line between gaps.
function runs(line) {
  const found = [[]];
  for (const point of line) {
    if (point.value === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}

// A bar of length `ratio`, with the peak at 1.
export function drawBar(svg, ratio) {
  const end = WIDTH * 0.94;
  svg.replaceChildren(
    shape("rect", { class: "track", x: 0, y: 8, width: WIDTH, height: 12, rx: 6 }),
    shape("rect", { class: "level", x: 0, y: 8, width: Math.min(WIDTH, end * ratio), height: 12, rx: 6 }),
    shape("path", { class: "mark", d: `M${end},2V26` }),
  );
}

const ROOF = { width: 372, height: 214, left: 42, right: 14, top: 18, bottom: 30 };
const LEAST_DECADES = 1.5;

// Both axes in powers of ten. points: [{name, intensity, rate}]; flopsPeak may be unknown.
export function drawRoof(svg, points, { bandwidthPeak, flopsPeak }) {
  const ridge = flopsPeak ? flopsPeak / bandwidthPeak : 100;
  const highest = flopsPeak ?? bandwidthPeak * ridge;
  const lowX = Math.floor(Math.log10(Math.min(1, ...points.map((each) => each.intensity))));
  // A decade at least, where all intensities are 1 and the ridge is no further.
  const intensities = [flopsPeak ? ridge * 5 : ridge, ...points.map((each) => each.intensity)];
  const highX = Math.max(lowX + 1, Math.ceil(Math.log10(Math.max(...intensities))));
  const highY = Math.log10(highest);
  const lows = [Math.log10(bandwidthPeak) + lowX, highY - LEAST_DECADES, ...points.map((each) => Math.log10(each.rate) - 0.3)];
  const lowY = Math.min(...lows);
  const { width, height, left, right, top, bottom } = ROOF;
  const x = (value) => left + ((Math.log10(value) - lowX) / (highX - lowX)) * (width - left - right);
  const y = (value) => height - bottom - ((Math.log10(value) - lowY) / (highY - lowY)) * (height - top - bottom);
  const parts = [...grid(x, y, { lowX, highX, lowY, highY })];
  const [from, to] = [[x(10 ** lowX), y(10 ** lowX * bandwidthPeak)], [x(ridge), y(highest)]];
  const flat = flopsPeak ? `H${x(10 ** highX)}` : "";
  parts.push(shape("path", { class: "roof", d: `M${from}L${to}${flat}` }));
  const slope = (Math.atan2(to[1] - from[1], to[0] - from[0]) * 180) / Math.PI;
  const turned = `translate(${from[0] + 4},${from[1] - 8}) rotate(${slope})`;
  parts.push(shape("text", { class: "tag", transform: turned }, `memory, ${short(bandwidthPeak, "B/s")}`));
  if (flopsPeak) {
    const place = { class: "tag", x: width - right, y: y(highest) - 6, "text-anchor": "end" };
    parts.push(shape("text", place, `arithmetic, ${short(flopsPeak, "FLOP/s")}`));
  }
  for (const { name, intensity, rate } of points) {
    const limit = Math.min(highest, intensity * bandwidthPeak);
    parts.push(shape("path", { class: "gap", d: `M${x(intensity)},${y(rate)}V${y(limit)}` }));
  }
  for (const { name, intensity, rate } of points) {
    parts.push(shape("circle", { class: `point ${name}`, cx: x(intensity), cy: y(rate), r: 8 }));
    parts.push(shape("text", { class: "letter", x: x(intensity), y: y(rate) + 3.5, "text-anchor": "middle" }, name[0].toUpperCase()));
  }
  svg.replaceChildren(...parts);
}

function* grid(x, y, { lowX, highX, lowY, highY }) {
  const { width, height, left, right, bottom } = ROOF;
  for (let power = lowX; power <= highX; power += 1) {
    yield shape("text", { class: "tick", x: x(10 ** power), y: height - bottom + 13, "text-anchor": "middle" }, short(10 ** power));
  }
  for (let power = Math.ceil(lowY); power <= highY; power += 1) {
    yield shape("path", { class: "rule", d: `M${left},${y(10 ** power)}H${width - right}` });
    yield shape("text", { class: "tick", x: left - 6, y: y(10 ** power) + 3, "text-anchor": "end" }, short(10 ** power));
  }
  yield shape("text", { class: "tick", x: width - right, y: height - 3, "text-anchor": "end" }, "operations per byte");
  yield shape("text", { class: "tick", x: 0, y: 10 }, "operations/s");
}

// 1500000000, "B/s" as 1.5 GB/s.
export function short(value, unit = "") {
  const units = ["", "k", "M", "G", "T", "P"];
  const power = Math.max(0, Math.min(units.length - 1, Math.floor(Math.log10(value || 1) / 3 + 1e-9)));
  const number = Number((value / 1000 ** power).toPrecision(3));
  return `${number}${unit && " "}${units[power]}${unit}`;
}
