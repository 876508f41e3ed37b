// `/metrics` as numbers: one reading of what the live view shows, and what follows from two.

const LINE = /^penstock_(\w+)(?:\{([^}]*)\})? (\S+)$/;
const LABEL = /(\w+)="([^"]*)"/g;
export const CLASSES = ["decode", "prefill", "mixed"];

// Series by name; each a list of {labels, value}.
function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value;
    const list = series.get(match[1]) ?? [];
    list.push({ labels, value: Number(match[3]) });
    series.set(match[1], list);
  }
  return series;
}

// atMs: the time of the reading.
export function readingOf(text, atMs) {
  const series = parse(text);
  const all = (name) => series.get(name) ?? [];
  const total = (name) => all(name).reduce((sum, { value }) => sum + value, 0);
  const byPeak = (name) => Object.fromEntries(
    all(name).filter(({ labels }) => (labels.class ?? "all") === "all").map(({ labels, value }) => [labels.peak, value]),
  );
  const by = (label, name) => Object.fromEntries(all(name).map(({ labels, value }) => [labels[label], value]));
  const ofClass = (name) => by("class", name);
  const buckets = (name) => all(`${name}_bucket`).map(({ labels, value }) => [Number(labels.le.replace("+Inf", "Infinity")), value]);
  return {
    atMs,
    generated: total("generated_tokens_total"),
    prompt: total("prompt_tokens_total"),
    preemptions: total("preemptions_total"),
    queried: total("prefix_query_tokens_total"),
    hit: total("prefix_hit_tokens_total"),
    running: total("running_sequences"),
    waiting: total("waiting_sequences"),
    usedBlocks: total("kv_used_blocks"),
    idleBlocks: total("kv_idle_blocks"),
    freeBlocks: total("kv_free_blocks"),
    ttft: buckets("time_to_first_token_seconds"),
    tpot: buckets("time_per_output_token_seconds"),
    bandwidthRatio: byPeak("model_bandwidth_utilization_ratio"),
    flopsRatio: byPeak("model_flops_utilization_ratio"),
    bandwidthPeak: byPeak("peak_bandwidth_bytes_per_second"),
    flopsPeak: byPeak("peak_flops_per_second"),
    bytes: ofClass("model_bytes_total"),
    flops: ofClass("model_flops_total"),
    seconds: ofClass("step_time_seconds_sum"),
    predictedSteps: total("predicted_steps_total"),
    predictedSeconds: total("step_predicted_seconds_total"),
    measuredSeconds: total("step_measured_seconds_total"),
    draftedRows: by("source", "spec_decode_drafts_total"),
    proposed: by("source", "spec_decode_draft_tokens_total"),
    accepted: by("source", "spec_decode_accepted_tokens_total"),
  };
}

// Counters start at zero with the server.
export function isRestart(before, now) {
  return now.generated < before.generated || now.prompt < before.prompt;
}

export function perSecond(before, now, name) {
  return (now[name] - before[name]) / ((now.atMs - before.atMs) / 1e3);
}

// A quantile of the values that a histogram observed between two readings, in its unit; null if none.
// Interpolates linearly within a bucket, as Prometheus does.
export function quantile(share, before, now) {
  const counts = now.map(([bound, count], i) => [bound, count - (before[i]?.[1] ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (!total) return null;
  const rank = share * total;
  const i = counts.findIndex(([, count]) => count >= rank);
  const [low, below] = i ? counts[i - 1] : [0, 0];
  const [high, upTo] = counts[i];
  return high === Infinity ? low : low + (high - low) * ((rank - below) / (upTo - below));
}

// "bytes" or "flops" of the steps, per second of step time.
export function stepRate(before, now, name) {
  const increase = (kind) => sum(now[kind]) - sum(before[kind]);
  return increase("seconds") ? increase(name) / increase("seconds") : 0;
}

// The mean predicted and measured time of the steps between two readings: [null, null] if none was predicted.
export function stepTimes(before, now) {
  const steps = now.predictedSteps - before.predictedSteps;
  if (!steps) return [null, null];
  return ["predictedSeconds", "measuredSeconds"].map((name) => (now[name] - before[name]) / steps);
}

function sum(byClass) {
  return Object.values(byClass).reduce((total, value) => total + value, 0);
}

// The point of each class of steps in the roofline: [{name, intensity, rate}].
export function roofPoints(before, now) {
  const increase = (name, kind) => (now[name][kind] ?? 0) - (before[name][kind] ?? 0);
  const points = [];
  for (const name of CLASSES) {
    const [bytes, flops, seconds] = ["bytes", "flops", "seconds"].map((each) => increase(each, name));
    if (bytes > 0 && flops > 0 && seconds > 0) points.push({ name, intensity: flops / bytes, rate: flops / seconds });
  }
  return points;
}

// What drafts did between two readings, by their source, the most useful first: [{source, rows, proposed, accepted}].
export function draftsOf(before, now) {
  const increase = (name, source) => now[name][source] - (before[name][source] ?? 0);
  return Object.keys(now.proposed).map((source) => {
    const [rows, proposed, accepted] = ["draftedRows", "proposed", "accepted"].map((name) => increase(name, source));
    return { source, rows, proposed, accepted };
  }).filter(({ rows }) => rows > 0).sort((one, other) => other.accepted - one.accepted);
}
