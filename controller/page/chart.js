// What all charts have in common: colours that follow the theme, a legend that shows the values
// under the pointer, and the width of their box.  uPlot draws them (vendor/uplot).
import { put, say } from "./dom.js";
import { colour } from "./theme.js";

const FONT = '12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
export const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];

export const axis = (given) => ({
  font: FONT, gap: 6, stroke: () => colour("quiet"), ticks: { show: false },
  grid: { stroke: () => colour("line"), width: 1 }, ...given,
});

// kind: the class of its sample in the legend, which has the colour of that name.
export function curve({ label, kind, name, scale, width = 2, dash, fill = 0, format, points = false }) {
  return {
    label, kind, format, scale, dash, width,
    stroke: width ? () => colour(name) : undefined,
    fill: fill ? () => withAlpha(colour(name), fill) : undefined,
    points: points ? { show: true, size: 7, fill: () => colour(name) } : { show: false },
  };
}

// colour: #rrggbb.
export const withAlpha = (colour, alpha) => `${colour}${Math.round(255 * alpha).toString(16).padStart(2, "0")}`;

// A chart in `box`, with its legend behind it.  options: as uPlot takes them; series without the first.
export function makeChart(box, data, { height, series, shown, ...options }) {
  const chart = new globalThis.uPlot({
    width: box.clientWidth || 300, height, legend: { show: false }, ...options,
    series: [{}, ...series],
    hooks: { setCursor: [(it) => shown(it)], ready: [(it) => shown(it)], ...options.hooks },
  }, data, box);
  chart.root.setAttribute("aria-hidden", "true");
  const legend = put("ul", { class: "legend" }, ...series.filter((it) => it.label).map((it) =>
    put("li", {}, put("span", { class: `swatch ${it.kind}` }), put("span", {}, it.label), " ", ...(it.format ? [put("b", {})] : []))));
  box.after(legend);
  const fit = new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== chart.width) chart.setSize({ width: box.clientWidth, height });
  });
  fit.observe(box);
  const repaint = () => chart.redraw();
  addEventListener("themechange", repaint);
  const end = () => {
    fit.disconnect();
    removeEventListener("themechange", repaint);
    legend.remove();
    chart.destroy();
  };
  return { chart, legend, end };
}

// Writes the values at `index` of the data into the legend.
export function readOut({ chart, legend }, index) {
  const told = [...legend.querySelectorAll("b")];
  chart.series.forEach((it, number) => {
    if (it.format) say(told.shift(), it.format(index === null ? null : chart.data[number]?.[index] ?? null, index));
  });
}
