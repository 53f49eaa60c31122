// The share of drafts that survive to each position, with the band in which it lies by 95 %.
import { WHOLE, axis, curve, makeChart, readOut } from "./chart.js";
import { find, number } from "./dom.js";

const here = { key: "", shown: null };

export function showSurvival(engine, curves) {
  find("no-survival").hidden = curves.length > 0;
  if (!curves.length) return;
  const longest = Math.max(...curves.map((it) => it.survival.length));
  const data = columns(curves, longest);
  const key = JSON.stringify([engine, curves.map((it) => it.drafter), longest]);
  if (key !== here.key) {
    here.shown?.end();
    Object.assign(here, { key, shown: null });
    here.shown = begin(data, curves, longest);
  }
  here.shown.chart.setData(data);
  told(here.shown.chart);
  const words = curves.map((it) => `${it.drafter}: ${it.survival.map((share, k) =>
    `${k + 1}: ${share.toFixed(2)} (${it.low[k].toFixed(2)} to ${it.high[k].toFixed(2)})`).join(", ")}`);
  find("survival").setAttribute("aria-label", `Survival by draft position. ${words.join(". ")}`);
}

// [positions, then for each drafter survival, low and high]; position 0 is always reached.
function columns(curves, longest) {
  const full = (values) => Array.from({ length: longest + 1 }, (_, k) => (k ? values[k - 1] ?? null : 1));
  return [Array.from({ length: longest + 1 }, (_, k) => k), ...curves.flatMap((it) => [full(it.survival), full(it.low), full(it.high)])];
}

function begin(data, curves, longest) {
  return makeChart(find("survival"), data, {
    height: 250, shown: told,
    scales: { x: { time: false, range: [0, longest] }, share: { range: [0, 1] } },
    axes: [axis({ size: 28, incrs: WHOLE, space: 30 }), axis({ scale: "share", size: 46, incrs: [0.25], space: 20 })],
    padding: [10, 12, 0, 0],
    bands: curves.map((_, index) => ({ series: [3 * index + 3, 3 * index + 2] })),
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 8 } },
    series: curves.flatMap((it, index) => {
      const given = { kind: `s${index % 4}`, name: `series-${index % 4}`, scale: "share" };
      const edge = { ...given, width: 0 };
      const format = (share, k) => (share === null ? "–" : `${number(share, 2)} at ${k}`);
      return [curve({ ...given, label: it.drafter, points: true, format }), curve(edge), curve({ ...edge, fill: 0.16 })];
    }),
  });
}

function told(chart) {
  if (here.shown?.chart === chart) readOut(here.shown, chart.cursor.idx ?? chart.data[0].length - 1);
}
