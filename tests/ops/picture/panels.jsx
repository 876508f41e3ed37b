// One component for each panel type. All are Grafana's own except the heatmap and the pie chart, which
// its libraries lack; these are drawn here with its axes, colours and legend.
import {
  FieldType,
  formattedValueToString,
  getDisplayProcessor,
  getFieldDisplayName,
  getFieldDisplayValues,
} from "@grafana/data";
import { AxisPlacement, ScaleDirection, ScaleOrientation } from "@grafana/schema";
import {
  BarGauge,
  BigValue,
  TimeSeries,
  UPlotChart,
  UPlotConfigBuilder,
  VizLegend,
  VizRepeater,
} from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";
import { interpolateOranges } from "d3-scale-chromatic";
import { withDefaults } from "./frames.js";

export function Panel(props) {
  const Drawn = {
    timeseries: Lines,
    trend: Trend,
    stat: Stat,
    bargauge: Bars,
    table: Rows,
    heatmap: Heatmap,
    piechart: Ring,
  }[props.panel.type];
  if (!Drawn) {
    throw new Error(
      `no component draws a panel of type ${props.panel.type}; add one to panels.jsx`,
    );
  }
  const isEmpty = !props.frames.some((frame) =>
    frame.fields.some((field) => field.type !== FieldType.time && field.values.length > 0),
  );
  return isEmpty ? <div className="empty">No data</div> : <Drawn {...props} />;
}

function Lines({ panel, frames: given, width, height, timeRange }) {
  const frames = given.map(withGaps);
  const legend = { showLegend: true, calcs: [], ...panel.options.legend };
  return (
    <TimeSeries
      frames={frames}
      width={width}
      height={height}
      timeRange={timeRange}
      timeZone="utc"
      legend={legend}
    />
  );
}

function Trend(props) {
  const { panel, frames } = props;
  const frame = withGaps(frames[0]);
  const at = frame.fields.findIndex(
    (field) => getFieldDisplayName(field, frame, frames) === panel.options.xField,
  );
  if (at < 0) {
    return <div className="empty">Unable to find field: {panel.options.xField}</div>;
  }
  const [x] = frame.fields.splice(at, 1);
  frame.fields.unshift(x);
  // The legend reads them here.
  frame.fields.forEach((field, i) => {
    field.state = { ...field.state, origin: { frameIndex: 0, fieldIndex: i } };
  });
  const fields = {
    x: (field) => field === x,
    y: (field) => field !== x && field.type === FieldType.number,
  };
  const legend = { showLegend: true, calcs: [], ...panel.options.legend };
  return (
    <TimeSeries
      {...props}
      frames={[frame]}
      fields={fields}
      timeZone="utc"
      legend={legend}
      preparePlotFrame={() => frame}
    />
  );
}

/** Like Grafana's panels, shows a value that is not a number as a gap. */
function withGaps(frame) {
  const gap = (value) => (Number.isFinite(value) ? value : null);
  return {
    ...frame,
    fields: frame.fields.map((field) => ({ ...field, values: field.values.map(gap) })),
  };
}

function displayed({ panel, frames, theme }, sparkline) {
  return getFieldDisplayValues({
    data: frames,
    reduceOptions: {
      ...panel.options.reduceOptions,
      fields: panel.options.reduceOptions.fields || undefined,
    },
    fieldConfig: withDefaults(panel),
    replaceVariables: (text) => text,
    sparkline,
    theme,
    timeZone: "utc",
  });
}

function Stat(props) {
  const { panel, width, height, theme, timeRange } = props;
  const [value] = displayed(props, true);
  if (value.sparkline) {
    value.sparkline.timeRange = timeRange;
  }
  const { colorMode, graphMode, justifyMode, textMode } = panel.options;
  return (
    <BigValue
      value={value.display}
      sparkline={value.sparkline}
      width={width}
      height={height}
      theme={theme}
      colorMode={colorMode}
      graphMode={graphMode}
      justifyMode={justifyMode}
      textMode={textMode}
      count={1}
    />
  );
}

function Bars(props) {
  const { panel, width, height, theme } = props;
  const values = displayed(props, false);
  const draw = ({ value, width, height, orientation }) => (
    <BarGauge
      value={value.display}
      field={value.field}
      display={value.view?.getFieldDisplayProcessor(value.colIndex)}
      width={width}
      height={height}
      orientation={orientation}
      theme={theme}
      displayMode={panel.options.displayMode}
      showUnfilled={panel.options.showUnfilled}
      valueDisplayMode={panel.options.valueMode}
      itemSpacing={8}
    />
  );
  return (
    <VizRepeater
      getValues={() => values}
      renderValue={draw}
      width={width}
      height={height}
      source={props.frames}
      renderCounter={0}
      orientation={panel.options.orientation}
      minVizHeight={10}
      itemSpacing={8}
    />
  );
}

function Rows({ frames, width, height, panel }) {
  return (
    <TableNG data={frames[0]} width={width} height={height} cellHeight={panel.options.cellHeight} />
  );
}

/** A row of equal height for each bucket, like Grafana's layout of labelled rows. */
function Heatmap({ panel, frames, width, height, timeRange, theme }) {
  const [time, ...buckets] = frames[0].fields;
  const most = Math.max(...buckets.flatMap((field) => field.values));
  const builder = new UPlotConfigBuilder("utc");
  builder.addScale({
    scaleKey: "x",
    orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    isTime: true,
    range: () => [timeRange.from.valueOf(), timeRange.to.valueOf()],
  });
  builder.addScale({
    scaleKey: "y",
    orientation: ScaleOrientation.Vertical,
    direction: ScaleDirection.Up,
    range: () => [0, buckets.length],
  });
  builder.addAxis({
    scaleKey: "x",
    isTime: true,
    placement: AxisPlacement.Bottom,
    theme,
    timeZone: "utc",
    grid: { show: false },
  });
  const format = getDisplayProcessor({
    field: { type: FieldType.number, config: { unit: panel.options.yAxis.unit } },
    theme,
  });
  const label = (name) => (name === "+Inf" ? "+Inf" : formattedValueToString(format(Number(name))));
  builder.addAxis({
    scaleKey: "y",
    placement: AxisPlacement.Left,
    theme,
    grid: { show: false },
    splits: () => buckets.map((_, i) => i + 1),
    values: (u, splits) => thinned(u, splits).map((i) => (i ? label(buckets[i - 1].name) : null)),
  });
  builder.addSeries({
    scaleKey: "y",
    theme,
    pathBuilder: () => null,
    showPoints: "never",
    lineWidth: 0,
  });
  builder.addHook("draw", (u) => drawCells(u, time, buckets, most, panel.options));
  builder.setPrepData((all) => [all[0].fields[0].values, all[0].fields[0].values.map(() => 0)]);
  const chart = (
    <UPlotChart
      config={builder}
      data={[time.values, time.values.map(() => 0)]}
      width={width}
      height={height - (panel.options.legend.show ? 34 : 0)}
    />
  );
  return (
    <>
      {chart}
      {panel.options.legend.show && <Scale most={most} exponent={panel.options.color.exponent} />}
    </>
  );
}

function thinned(u, splits) {
  const room = u.bbox.height / devicePixelRatio / splits.length;
  const every = Math.max(1, Math.ceil(16 / room));
  return splits.map((split, i) => (i % every === every - 1 ? split : null));
}

function drawCells(u, time, buckets, most, options) {
  const step = time.values[1] - time.values[0];
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  u.ctx.clip();
  buckets.forEach((field, i) => {
    const bottom = u.valToPos(i, "y", true);
    const top = u.valToPos(i + 1, "y", true);
    field.values.forEach((count, j) => {
      if (count > options.filterValues.le) {
        const left = Math.round(u.valToPos(time.values[j] - step, "x", true));
        const right = Math.round(u.valToPos(time.values[j], "x", true));
        u.ctx.fillStyle = shade(count / most, options.color.exponent);
        u.ctx.fillRect(left, top, right - left, bottom - top);
      }
    });
  });
  u.ctx.restore();
}

function shade(share, exponent) {
  return interpolateOranges(1 - share ** exponent);
}

function Scale({ most, exponent }) {
  const stops = Array.from({ length: 20 }, (_, i) => shade((i / 19) ** (1 / exponent), exponent));
  return (
    <div className="scale">
      <div style={{ background: `linear-gradient(90deg, ${stops})` }} />
      <span>0</span>
      <span>{most < 10 ? most.toFixed(1) : Math.round(most)}</span>
    </div>
  );
}

function Ring(props) {
  const { width, height } = props;
  const values = displayed(props, false);
  const total = values.reduce((sum, it) => sum + it.display.numeric, 0);
  if (!total) {
    return <div className="empty">No data</div>;
  }
  const radius = Math.min(height, width / 2) / 2 - 6;
  let angle = -Math.PI / 2;
  const arcs = values.map(({ display }) => {
    const from = angle;
    angle += (display.numeric / total) * 2 * Math.PI;
    return {
      d: arc(radius, from, angle),
      middle: (from + angle) / 2,
      share: display.numeric / total,
      color: display.color,
    };
  });
  const items = values.map(({ display }) => ({
    label: display.title,
    color: display.color,
    yAxis: 1,
    getDisplayValues: () => [
      { title: "Value", text: formattedValueToString(display), numeric: display.numeric },
      { title: "Percent", text: percent(display.numeric / total), numeric: display.numeric },
    ],
  }));
  return (
    <div className="ring">
      <svg
        width={width / 2}
        height={height}
        viewBox={`${-width / 4} ${-height / 2} ${width / 2} ${height}`}
      >
        {arcs.map((it) => (
          <path key={it.middle} d={it.d} fill={it.color} />
        ))}
        {arcs
          .filter((it) => it.share > 0.04)
          .map((it) => (
            <text
              key={it.middle}
              x={Math.cos(it.middle) * radius * 0.8}
              y={Math.sin(it.middle) * radius * 0.8}
            >
              {percent(it.share)}
            </text>
          ))}
      </svg>
      <VizLegend placement="right" displayMode="table" items={items} />
    </div>
  );
}

function percent(share) {
  return `${Math.round(share * 100)}%`;
}

function arc(radius, from, to) {
  const end = Math.min(to, from + 2 * Math.PI - 1e-4);
  const at = (r, angle) => `${r * Math.cos(angle)} ${r * Math.sin(angle)}`;
  const isLarge = end - from > Math.PI ? 1 : 0;
  const inner = radius * 0.6;
  return `M ${at(radius, from)} A ${radius} ${radius} 0 ${isLarge} 1 ${at(radius, end)} L ${at(inner, end)} A ${inner} ${inner} 0 ${isLarge} 0 ${at(inner, from)} Z`;
}
