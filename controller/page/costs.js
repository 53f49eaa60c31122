// The cost table: milliseconds of a step for every choice and batch size.
import { find, number, put, say } from "./dom.js";
import { SOURCES, costsText } from "./words.js";

const seen = { row: -1, width: 0 };

export function showCosts(costs, evidence, line) {
  say(find("source"), `milliseconds, from ${evidence.profile_id ? `profile ${evidence.profile_id}` : costsText(line.costs)}, corrected by live steps`);
  const all = costs.seconds.flat().map(Math.log);
  const low = Math.min(...all), span = Math.max(...all) - low || 1;
  const head = put("tr", {}, put("th", { scope: "col" }, "B ≤"), ...costs.batch_sizes.map((size, row) =>
    put("th", { scope: "col", class: row === costs.row ? "number now-head" : "number" }, String(size))));
  const lines = costs.arms.map(([drafter, gamma], arm) => put("tr", {},
    put("th", { scope: "row" }, `${drafter} γ ${gamma}`),
    ...costs.batch_sizes.map((_, row) => heatCell(costs, arm, row, (Math.log(costs.seconds[arm][row]) - low) / span))));
  const box = find("cost"), where = box.scrollLeft;
  box.replaceChildren(put("table", { class: "heat", "aria-label": "Milliseconds of a step by choice and batch size" },
    put("thead", {}, head), put("tbody", {}, ...lines)));
  box.scrollLeft = where;
  // Whoever has scrolled away is left alone until another row runs.
  if (costs.row !== seen.row || box.clientWidth !== seen.width) bringIntoView(box);
  Object.assign(seen, { row: costs.row, width: box.clientWidth });
}

function bringIntoView(box) {
  const head = box.querySelector(".now-head"), names = box.querySelector("tbody th");
  if (head) box.scrollLeft = head.offsetLeft - names.offsetWidth - (box.clientWidth - names.offsetWidth - head.offsetWidth) / 2;
}

function heatCell(costs, arm, row, heat) {
  const [drafter, gamma] = costs.arms[arm];
  const now = arm === costs.arm && row === costs.row, best = costs.frontier[row] === arm;
  const legal = costs.legal[arm][row], source = costs.source[arm][row];
  const marks = [now && "now", best && "frontier", !legal && "off", source !== "measured" && "guess"];
  const seconds = costs.seconds[arm][row];
  const words = [
    `${drafter} γ ${gamma} at B ${costs.batch_sizes[row]}: ${number(1000 * seconds, 2)} ms`,
    `${number(costs.tokens_per_second[arm][row])} tokens/s`, SOURCES[source] || source,
    ...(best ? ["the best here"] : []), ...(now ? ["runs now"] : []), ...(legal ? [] : ["not allowed"]),
  ].join(", ");
  const cell = put("td", { class: marks.filter(Boolean).join(" "), title: words, "aria-label": words },
    (1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0));
  cell.style.backgroundColor = `rgba(var(--heat), ${(0.05 + 0.5 * heat).toFixed(3)})`;
  return cell;
}
