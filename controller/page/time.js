// Draft length and acceptance, load and speed over time: two charts with one pointer and one range.
import { WHOLE, axis, curve, makeChart, readOut } from "./chart.js";
import { clock, duration, find, number, put, say } from "./dom.js";

// Points that are further apart have a gap between them.
const GAP_SECONDS = 3;
const LONGEST_SECONDS = 600;
const SHORTEST_SECONDS = 5;
const SPANS = [[60, "1 min"], [180, "3 min"], [LONGEST_SECONDS, "10 min"]];
const SIDES = 46;

const here = { key: "", charts: [], times: [], span: LONGEST_SECONDS, window: null };

// Columns of [time, gamma of each drafter, tau, batch, tokens/s, unsteered].  A point is about the
// second before it: it gets a row where that second begins and one where it ends.  A second without
// a report, and the time between two points that are far apart, have no values.
export function columns(points, drafters) {
  const rows = [];
  let before = null;
  for (const [time, batch, gamma, drafter, tau, rate, unsteered] of points) {
    const joined = before !== null && time - before < GAP_SECONDS;
    const values = batch === null ? Array(drafters.length + 4).fill(null)
      : [...drafters.map((_, index) => (index === drafter ? gamma : null)), tau, batch, rate, unsteered ? 1 : 0];
    if (before !== null && !joined) rows.push([(before + time) / 2, ...Array(drafters.length + 4).fill(null)]);
    rows.push([joined ? before : time - 1, ...values], [time, ...values]);
    before = time;
  }
  return Array.from({ length: drafters.length + 5 }, (_, column) => rows.map((it) => it[column]));
}

export function showTime(engine, points, drafters) {
  find("no-time").hidden = points.length > 0;
  find("time").hidden = !points.length;
  if (!points.length) return;
  const data = columns(points, drafters);
  here.times = data[0];
  const key = JSON.stringify([engine, drafters]);
  if (key !== here.key) begin(key, data, drafters);
  const count = drafters.length;
  here.charts[0].chart.setData(data.slice(0, count + 2), false);
  here.charts[1].chart.setData([data[0], ...data.slice(count + 2)], false);
  const last = points[points.length - 1];
  find("time-draft").setAttribute("aria-label", `Draft length over time. Newest: ${last[2]} with ${drafters[last[3]]}, ` +
    `${number(last[4], 2)} tokens per step. Arrow keys read values, plus and minus zoom, Escape shows all.`);
  find("time-load").setAttribute("aria-label", `Batch size and speed over time. Newest: batch size ${number(last[1])}, ` +
    `${number(last[5])} tokens per second. Arrow keys read values, plus and minus zoom, Escape shows all.`);
  apply();
}

function begin(key, data, drafters) {
  here.charts.forEach((it) => it.end());
  Object.assign(here, { key, charts: [], window: null });
  const count = drafters.length;
  here.charts = [
    makeChart(find("time-draft"), data.slice(0, count + 2), {
      ...common(), height: 220,
      scales: { ...time(), tokens: { range: (_, __, most) => [0, Math.max(2, most || 0) + 0.5] } },
      axes: [axis(timeAxis()), axis({ scale: "tokens", size: SIDES, incrs: WHOLE })],
      padding: [10, SIDES, 0, 0],
      series: [
        ...drafters.map((name, index) => curve({
          label: `draft length γ, ${name}`, kind: `s${index % 4}`, name: `series-${index % 4}`, scale: "tokens", width: 3,
          format: (value) => (value === null ? "–" : String(value)),
        })),
        curve({ label: "tokens per step τ", kind: "tau", name: "tau", scale: "tokens", dash: [5, 3], format: (value) => number(value, 2) }),
      ],
    }),
    makeChart(find("time-load"), [data[0], ...data.slice(count + 2)], {
      ...common(), height: 190,
      scales: {
        ...time(), batch: { range: (_, __, most) => [0, Math.max(4, (most || 0) * 1.1)] },
        rate: { range: (_, __, most) => [0, Math.max(10, (most || 0) * 1.15)] }, alone: { range: [0, 1] },
      },
      axes: [
        axis(timeAxis()), axis({ scale: "batch", size: SIDES, incrs: WHOLE }),
        axis({ scale: "rate", side: 1, size: SIDES, grid: { show: false }, values: (_, splits) => splits.map(short) }),
      ],
      padding: [10, 0, 0, 0],
      series: [
        curve({ label: "batch size (left)", kind: "batch", name: "batch", scale: "batch", width: 1, fill: 0.3, format: (value) => number(value) }),
        curve({ label: "tokens/s (right)", kind: "rate", name: "rate", scale: "rate", format: (value) => number(value) }),
        curve({ label: "steps without a valid plan", kind: "alone", name: "bad", scale: "alone", width: 0, fill: 0.22, format: (value) => ({ 0: "no", 1: "yes" })[value] || "–" }),
      ],
    }),
  ];
}

const short = (value) => (value >= 1000 ? `${number(value / 1000, value % 1000 ? 1 : 0)}k` : number(value));
const time = () => ({ x: { time: true } });
const timeAxis = () => ({ size: 28, space: 84, values: (_, splits) => splits.map(clock) });

const common = () => ({
  shown: told,
  cursor: {
    y: false, points: { size: 8 }, sync: { key: "time", filters: { pub: (type) => /move|leave/.test(type) } },
    drag: { x: true, y: false, setScale: false, dist: 6 },
    bind: { dblclick: () => () => showSpan(LONGEST_SECONDS) },
  },
  hooks: { setSelect: [selected] },
});

function selected(chart) {
  const { left, width } = chart.select;
  chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (width >= 6) zoom(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
}

// The values under the pointer, or the newest ones.
function told(chart) {
  const shown = here.charts.find((it) => it.chart === chart);
  if (!shown) return;
  const index = chart.cursor.idx ?? null, last = here.times.length - 1;
  readOut(shown, index ?? last);
  if (last >= 0) say(find("time-at"), index === null ? `newest values, ${clock(here.times[last])}` : `values at ${clock(here.times[index])}`);
}

// ---- the range ---------------------------------------------------------------------------------

const last = () => here.times[here.times.length - 1];

// A short history is not drawn at the edge of a wide chart.
function range() {
  const span = Math.min(here.span, Math.max(last() - here.times[0], SPANS[0][0]));
  return here.window || [last() - span, last()];
}

function apply() {
  const [min, max] = range();
  for (const it of here.charts) {
    it.chart.setScale("x", { min, max });
    told(it.chart);
  }
  for (const button of find("spans").children) {
    button.setAttribute("aria-pressed", !here.window && Number(button.dataset.seconds) === here.span);
  }
  find("zoom-out").hidden = !here.window;
  say(find("time-range"), here.window ? `${clock(min)} to ${clock(max)}, ${duration(max - min)}` : `the last ${duration(max - min)}`);
}

function zoom(from, to) {
  const middle = (from + to) / 2, half = Math.max(to - from, SHORTEST_SECONDS) / 2;
  if (2 * half >= LONGEST_SECONDS) return showSpan(LONGEST_SECONDS);
  here.window = [middle - half, middle + half];
  return apply();
}

function showSpan(seconds) {
  Object.assign(here, { span: seconds, window: null });
  apply();
}

function zoomBy(factor, chart) {
  const [from, to] = range();
  const index = chart.cursor.idx;
  const middle = index === null || index === undefined ? to : here.times[index];
  zoom(middle - (middle - from) * factor, middle + (to - middle) * factor);
}

function readBy(step, chart) {
  const [from, to] = range();
  const seen = here.times.map((_, index) => index).filter((index) => here.times[index] >= from && here.times[index] <= to);
  if (!seen.length) return;
  const at = seen.indexOf(chart.cursor.idx);
  // Two rows are one second.
  const index = seen[at < 0 ? seen.length - 1 : Math.min(Math.max(at + 2 * step, 0), seen.length - 1)];
  for (const it of here.charts) it.chart.setCursor({ left: it.chart.valToPos(here.times[index], "x"), top: 20 });
  const values = here.charts.flatMap((it) => [...it.legend.children].map((item) => item.textContent));
  say(find("time-aloud"), `${clock(here.times[index])}: ${values.join(", ")}`);
}

function pressed(event, number) {
  const { chart } = here.charts[number] || {};
  const acts = {
    ArrowLeft: () => readBy(-1, chart), ArrowRight: () => readBy(1, chart), "+": () => zoomBy(0.5, chart), "=": () => zoomBy(0.5, chart),
    "-": () => zoomBy(2, chart), Escape: () => showSpan(LONGEST_SECONDS),
  };
  if (!chart || !acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  acts[event.key]();
}

export function listenToTime() {
  find("spans").append(...SPANS.map(([seconds, label]) => {
    const button = put("button", { type: "button", "data-seconds": seconds, "aria-pressed": "false", "aria-label": `Show the last ${label}` }, label);
    button.addEventListener("click", () => showSpan(seconds));
    return button;
  }));
  find("zoom-out").addEventListener("click", () => showSpan(LONGEST_SECONDS));
  ["time-draft", "time-load"].forEach((id, number) => {
    find(id).addEventListener("keydown", (event) => pressed(event, number));
    find(id).addEventListener("blur", () => here.charts.forEach((it) => it.chart.setCursor({ left: -10, top: -10 })));
  });
}
