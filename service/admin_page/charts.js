// Time lines, drawn by uPlot (vendor/) from the pulse: gauges as they are, counters as differences between two events.

import { byId, clock, color, count, el, milliseconds, say, short } from "./dom.js";
import { follow } from "./server.js";

const KEPT_S = 900;
const PULSE_S = 1;
const HEIGHT = 96;

const percent = (value) => (value == null ? "–" : `${short(value)} %`);

/** Each line: [name, colour, how it is made of an event, its rates and means]. */
const CHARTS = [
  { title: "Generated tokens per second", lines: [["tokens/s", "--line-1", (now, since) => since.rate("generated_tokens")]], write: short },
  { title: "Time to first token, mean", lines: [["TTFT", "--line-1", (now, since) => since.mean("ttft")]], write: milliseconds },
  { title: "Gap between tokens (ITL), mean", lines: [["ITL", "--line-1", (now, since) => since.mean("itl")]], write: milliseconds },
  {
    title: "Sequences",
    lines: [
      ["running", "--line-1", (now) => now.running],
      ["waiting", "--line-2", (now) => now.waiting],
      ["swapped", "--line-3", (now) => now.swapped],
    ],
    write: count,
  },
  {
    title: "Frames",
    lines: [
      ["active", "--line-1", (now) => now.frames.active],
      ["cached", "--line-2", (now) => now.frames.cached],
      ["free", "--line-3", (now) => now.frames.free],
    ],
    write: count,
  },
  {
    title: "Pressure (PSI of 10 s), %",
    lines: [
      ["memory", "--line-1", (now) => now.pressure.memory.some.avg10],
      ["full", "--line-3", (now) => now.pressure.memory.full.avg10],
      ["compute", "--line-2", (now) => now.pressure.compute.some.avg10],
    ],
    write: short,
  },
  {
    title: "Prefix cache hit rate",
    lines: [["hits", "--line-2", (now, since) => since.share("prefix_hit", "prefix_query")]],
    write: percent,
    max: 100,
  },
  {
    title: "Pages per second: swap, evictions",
    lines: [
      ["out", "--line-1", (now, since) => since.rate("swap_out")],
      ["in", "--line-2", (now, since) => since.rate("swap_in")],
      ["evicted", "--line-3", (now, since) => since.rate("evict")],
    ],
    write: short,
  },
];

const times = [];
const columns = CHARTS.map((chart) => chart.lines.map(() => []));
let shown_s = 120;
let plots = [];
let last = null;

/** What has happened between two events. */
class Since {
  constructor(before, now) {
    this.seconds = now.ts - before.ts;
    this.of = (name) => now.counters[name] - before.counters[name];
  }
  rate(name) {
    return this.of(name) / this.seconds;
  }
  /** In milliseconds; null where nothing was counted. */
  mean(name) {
    const events = this.of(`${name}_count`);
    return events ? (1000 * this.of(`${name}_sum_s`)) / events : null;
  }
  share(part, whole) {
    const all = this.of(whole);
    return all ? (100 * this.of(part)) / all : null;
  }
}

function take(now, seen) {
  const isNext = last !== null && now.uptime_s > last.uptime_s && now.ts - last.ts < 10 * PULSE_S;
  if (last !== null && !isNext && now.uptime_s < last.uptime_s) forget(); // another process
  if (isNext) {
    const since = new Since(last, now);
    times.push(now.ts);
    CHARTS.forEach((chart, i) => chart.lines.forEach(([, , make], j) => columns[i][j].push(make(now, since))));
    while (times[0] < now.ts - KEPT_S) {
      times.shift();
      for (const lines of columns) for (const column of lines) column.shift();
    }
    seen(now, since);
  } else {
    seen(now, null);
  }
  last = now;
  draw();
}

function forget() {
  times.length = 0;
  for (const lines of columns) for (const column of lines) column.length = 0;
}

function draw() {
  if (document.hidden || !times.length) return;
  const end = times.at(-1);
  const first = Math.max(0, times.findIndex((ts) => ts >= end - shown_s));
  plots.forEach((plot, i) => {
    plot.setData([times.slice(first), ...columns[i].map((column) => column.slice(first))], false);
    plot.setScale("x", { min: end - shown_s, max: end });
    if (plot.cursor.idx == null) writeLatest(i);
  });
}

function writeLatest(i) {
  write(i, times.length - 1);
}

/** The figures above chart i, at one point of its lines. */
function write(i, at) {
  CHARTS[i].lines.forEach((_, j) => say(figures[i][j], CHARTS[i].write(columns[i][j][at])));
}

const figures = CHARTS.map((chart) => chart.lines.map(() => el("b", {})));

const axisFigure = (value) => (value >= 10_000 ? `${value / 1000}k` : String(value));

function options(chart, i, width) {
  const font = "11px system-ui, sans-serif";
  const axis = { font, stroke: color("--quiet"), grid: { stroke: color("--rule"), width: 1 }, ticks: { show: false } };
  const top = (low, high) => (chart.max ?? (high > 0 ? 1.1 * high : 1));
  return {
    width,
    height: HEIGHT,
    padding: [6, 14, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "time" }, y: false, points: { size: 5 } },
    scales: { x: { time: true }, y: { range: (plot, low, high) => [0, top(low, high)] } },
    axes: [
      { ...axis, size: 20, gap: 4, space: 70, values: (plot, at) => at.map(clock) },
      { ...axis, size: 44, gap: 4, space: 22, values: (plot, at) => at.map(axisFigure) },
    ],
    series: [
      {},
      ...chart.lines.map(([name, stroke]) => ({
        label: name,
        stroke: color(stroke),
        width: 1.5,
        spanGaps: true,
        points: { show: false },
      })),
    ],
    hooks: {
      setCursor: [
        (plot) => {
          const at = plot.cursor.idx;
          if (at == null) return times.length ? writeLatest(i) : undefined;
          write(i, at + times.length - plot.data[0].length);
        },
      ],
    },
  };
}

function make() {
  for (const plot of plots) plot.destroy();
  plots = CHARTS.map((chart, i) => {
    const box = byId(`chart-${i}`);
    const data = [[], ...chart.lines.map(() => [])];
    return new globalThis.uPlot(options(chart, i, box.clientWidth), data, box);
  });
  draw();
}

/** seen(event, since) is called for each event of the pulse. */
export function startCharts(seen, tellState) {
  CHARTS.forEach((chart, i) => {
    const keys = chart.lines.map(([name, colour], j) =>
      el("span", { class: "key" }, el("i", { class: `stroke ${colour.slice(2)}`, "aria-hidden": "true" }), `${name} `, figures[i][j]),
    );
    const head = el("figcaption", {}, el("span", { class: "name" }, chart.title), el("span", { class: "keys" }, ...keys));
    byId("charts").append(el("figure", {}, head, el("div", { id: `chart-${i}`, class: "chart", "aria-hidden": "true" })));
  });
  make();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", make);
  new ResizeObserver(() =>
    plots.forEach((plot, i) => {
      const width = byId(`chart-${i}`).clientWidth;
      if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }),
  ).observe(byId("charts"));
  byId("span").addEventListener("change", (event) => {
    shown_s = Number(event.target.value);
    draw();
  });
  follow(`pulse/stream?interval=${PULSE_S}`, (event) => take(event, seen), tellState);
}
