// Converts Prometheus's results to Grafana's data frames and applies the panel's transformations and
// field configuration with Grafana's own code.
import {
  applyFieldOverrides,
  FieldConfigOptionsRegistry,
  FieldType,
  identityOverrideProcessor,
  standardTransformers,
  standardTransformersRegistry,
  toDataFrame,
  transformDataFrame,
} from "@grafana/data";
import { lastValueFrom } from "rxjs";

// Grafana's defaults for options that a dashboard omits.
const BASE_STEPS = [
  { color: "green", value: -Infinity },
  { color: "red", value: 80 },
];
const DEFAULTS = { thresholds: { mode: "absolute", steps: BASE_STEPS } };
const GRAPH = {
  drawStyle: "line",
  lineInterpolation: "linear",
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: "none",
  pointSize: 5,
  showPoints: "auto",
  axisPlacement: "auto",
};
const COLOURED_BY_SERIES = new Set(["timeseries", "trend", "piechart"]);
const STANDARD = [
  "unit",
  "min",
  "max",
  "decimals",
  "displayName",
  "noValue",
  "color",
  "thresholds",
  "mappings",
];
const CUSTOM = [
  ...Object.keys(GRAPH),
  "lineStyle",
  "spanNulls",
  "stacking",
  "axisLabel",
  "axisWidth",
  "axisSoftMin",
  "axisSoftMax",
  "axisGridShow",
  "scaleDistribution",
  "fillBelowTo",
  "hideFrom",
  "thresholdsStyle",
  "align",
  "cellOptions",
];

const registry = new FieldConfigOptionsRegistry(() => [
  ...STANDARD.map((id) => option(id, id, false)),
  ...CUSTOM.map((path) => option(`custom.${path}`, path, true)),
]);

function option(id, path, isCustom) {
  return {
    id,
    path,
    isCustom,
    name: id,
    process: identityOverrideProcessor,
    shouldApply: () => true,
  };
}

standardTransformersRegistry.setInit(() =>
  [...new Set(Object.values(standardTransformers))].map((it) => ({
    id: it.id,
    name: it.name,
    transformation: () => Promise.resolve(it),
  })),
);

/** The frames that Grafana would pass to the panel. results: by the query's refId. */
export async function framesOf(panel, results, theme) {
  checkKnown(panel);
  const raw = panel.targets.flatMap((target) => ofTarget(target, results[target.refId]));
  const context = { interpolate: (text) => text };
  const data = await lastValueFrom(transformDataFrame(panel.transformations ?? [], raw, context));
  return applyFieldOverrides({
    data,
    fieldConfig: withDefaults(panel),
    fieldConfigRegistry: registry,
    replaceVariables: (text) => text,
    theme,
    timeZone: "utc",
  });
}

export function withDefaults(panel) {
  const given = panel.fieldConfig.defaults;
  const mode = COLOURED_BY_SERIES.has(panel.type) ? "palette-classic" : "thresholds";
  const thresholds = given.thresholds && {
    ...given.thresholds,
    steps: given.thresholds.steps.map((step) => ({ ...step, value: step.value ?? -Infinity })),
  };
  const custom = COLOURED_BY_SERIES.has(panel.type) ? { ...GRAPH, ...given.custom } : given.custom;
  const color = given.color ?? { mode };
  const defaults = { ...DEFAULTS, ...given, custom, color, ...(thresholds && { thresholds }) };
  return { ...panel.fieldConfig, defaults };
}

// Without this, an option that is not registered would silently be omitted here.
function checkKnown(panel) {
  const { defaults, overrides } = panel.fieldConfig;
  const named = Object.keys(defaults).filter((name) => name !== "custom");
  named.push(...Object.keys(defaults.custom ?? {}).map((name) => `custom.${name}`));
  named.push(...overrides.flatMap((rule) => rule.properties.map((it) => it.id)));
  const unknown = named.filter((name) => !registry.getIfExists(name));
  if (unknown.length) {
    throw new Error(`frames.js does not register ${unknown}; add it to STANDARD or CUSTOM`);
  }
}

function ofTarget(target, series) {
  if (target.format === "heatmap") {
    return [ofBuckets(target, series)];
  }
  if (target.format === "table") {
    return [ofSamples(target, series)];
  }
  return series.map((one) => ofSeries(target, one));
}

function ofSeries(target, { metric, values, value }) {
  const samples = values ?? [value];
  const name = target.legendFormat.replace(/{{\s*(\w+)\s*}}/g, (_, label) => metric[label] ?? "");
  const displayNameFromDS = target.legendFormat === "__auto" ? undefined : name;
  return toDataFrame({
    refId: target.refId,
    name,
    fields: [
      { name: "Time", type: FieldType.time, values: samples.map(([time]) => time * 1000) },
      {
        name: "Value",
        type: FieldType.number,
        labels: metric,
        values: samples.map(([, number]) => Number(number)),
        config: { displayNameFromDS },
      },
    ],
  });
}

/** A field for each bucket, in ascending order, without the counts of the buckets below. */
function ofBuckets(target, series) {
  const ascending = [...series].sort((a, b) => bound(a) - bound(b));
  const times = [...new Set(series.flatMap((one) => one.values.map(([time]) => time)))].sort(
    (a, b) => a - b,
  );
  const counts = ascending.map((one) => {
    const byTime = new Map(one.values);
    return times.map((time) => Number(byTime.get(time) ?? 0));
  });
  const fields = ascending.map((one, i) => ({
    name: one.metric.le,
    type: FieldType.number,
    values: counts[i].map((count, j) => Math.max(0, count - (i ? counts[i - 1][j] : 0))),
  }));
  const time = { name: "Time", type: FieldType.time, values: times.map((it) => it * 1000) };
  return toDataFrame({ refId: target.refId, fields: [time, ...fields] });
}

function ofSamples(target, series) {
  const labels = [...new Set(series.flatMap((one) => Object.keys(one.metric)))].sort();
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: "Time", type: FieldType.time, values: series.map((one) => one.value[0] * 1000) },
      ...labels.map((label) => ({
        name: label,
        type: FieldType.string,
        values: series.map((one) => one.metric[label] ?? ""),
      })),
      { name: "Value", type: FieldType.number, values: series.map((one) => Number(one.value[1])) },
    ],
  });
}

function bound(one) {
  return one.metric.le === "+Inf" ? Infinity : Number(one.metric.le);
}
