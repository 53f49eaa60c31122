// The last minutes' plan beside every choice held fixed.
import { duration, find, number, percent, put, say } from "./dom.js";
import { choiceText } from "./words.js";

export function showAlternatives(found, drafters) {
  find("no-alternatives").hidden = found !== null;
  find("alternatives").hidden = found === null;
  say(find("alternatives-note"), found === null ? "" :
    `Tokens per second at the batch sizes of the last ${duration(found.seconds)} with reports, by the estimates of now; ` +
    `changes and trials cost nothing in them. The plan was measured at ${number(found.measured)} tokens/s.`);
  if (found === null) return;
  const arms = [...found.arms].sort((a, b) => b.tokens_per_second - a.tokens_per_second);
  const most = Math.max(found.planned, ...arms.map((it) => it.tokens_per_second));
  find("alternatives").tBodies[0].replaceChildren(
    row("the plan, as it changed", found.planned, found.planned, most, "", "plan", 1),
    ...arms.map((it) => row(
      `always ${choiceText(it.gamma, it.drafter)}${it.gamma === 0 && drafters.length > 1 ? ` (${it.drafter})` : ""}`,
      it.tokens_per_second, found.planned, most, it.share ? percent(it.share) : "–", "", it.allowed)));
}

function row(name, rate, planned, most, share, kind, allowed) {
  const bar = put("span", { class: "bar", "aria-hidden": "true" });
  bar.style.width = `${(100 * rate / most).toFixed(1)}%`;
  const against = kind ? "" : `${rate >= planned ? "+" : "−"}${percent(Math.abs(rate / planned - 1), 1)}`;
  return put("tr", kind ? { class: kind } : {},
    put("th", { scope: "row" }, name, ...(allowed < 1 ? [" ", put("span", { class: "pill warn" }, allowed ? "not always allowed" : "not allowed")] : [])),
    put("td", { class: "bars" }, bar), put("td", { class: "number" }, number(rate)),
    put("td", { class: "number" }, against), put("td", { class: "number" }, share));
}
