// The engines of all sidecars that share a Redis, with a filter and totals.
import { counted, duration, find, number, put, say } from "./dom.js";
import { linkOf, runsNow } from "./words.js";

const EVERY_MS = 5000;
const TYPING_MS = 300;
const PAGE = 50;
const LIMIT_MAX = 1000;

// asked: stands for the newest question; an answer to an older one is not shown.
const here = { limit: PAGE, at: -Infinity, asked: 0 };

const COLUMNS = [
  ["engine", (it) => it.engine_id],
  ["sidecar", (it) => it.sidecar, "free"],
  ["state", null],
  ["runs now", runsNow, "free"],
  ["batch", (it) => number(it.batch_size || null), "number"],
  ["tokens/step", (it) => number(it.accept_length, 2), "number"],
  ["tokens/s", (it) => number(it.generated_per_second), "number"],
  ["gained/s", (it) => signed(it.tokens_gained_per_second), "number"],
  ["reason", (it) => it.reason],
  ["overrides", (it) => overridesText(it), "free"],
  ["heard", (it) => (it.local ? "now" : `${duration(it.age_seconds)} ago`), "number"],
];
const STATE = 2;

const signed = (value) => (value === null ? "–" : `${value < 0 ? "−" : "+"}${number(Math.abs(value))}`);

function overridesText(it) {
  const more = it.more_overrides ? [`and ${it.more_overrides} more`] : [];
  return [...it.overrides, ...more].join(", ") || "none";
}

// Asks if the last answer is old.  What is wrong with it is said here and does not hide the rest.
export async function lookAtFleet(ask, now = false) {
  if (!now && performance.now() - here.at < EVERY_MS) return;
  here.at = performance.now();
  const question = ++here.asked;
  const words = new URLSearchParams({ filter: find("filter").value.trim(), limit: here.limit });
  try {
    const fleet = await ask(`api/v1/fleet?${words}`);
    if (question === here.asked) show(fleet);
  } catch (error) {
    if (question === here.asked) refused(error);
  }
}

function refused(error) {
  const filter = find("filter");
  filter.setAttribute("aria-invalid", filter.value !== "");
  say(find("matches"), `Not found: ${error.message}`);
}

function show(fleet) {
  find("fleet-alone").hidden = fleet.shared;
  find("fleet-shared").hidden = !fleet.shared;
  const troubles = [
    ...(fleet.shared && fleet.trouble ? [`The engines of other sidecars are missing: ${fleet.trouble}.`] : []),
    ...(fleet.refused ? [`${counted(fleet.refused, "entry", "entries")} in Redis cannot be used.`] : []),
    ...(fleet.left_out ? [`${counted(fleet.left_out, "entry is", "entries are")} left out: the fleet is larger than what is read at once.`] : []),
  ];
  say(find("fleet-trouble"), troubles.join(" "));
  find("fleet-trouble").hidden = !troubles.length;
  if (!fleet.shared) {
    find("fleet-glance").hidden = true;
    return;
  }
  find("filter").setAttribute("aria-invalid", "false");
  showTotals(fleet.totals);
  say(find("matches"), `${counted(fleet.totals.engines, "engine", "engines")}${find("filter").value.trim() ? " match" : ""}` +
    (fleet.engines.length < fleet.totals.engines ? `, the first ${fleet.engines.length} are shown` : ""));
  find("fleet-engines").hidden = !fleet.engines.length;
  find("more").hidden = !fleet.next || here.limit >= LIMIT_MAX;
  showRows(fleet.engines);
}

function showTotals(totals) {
  const lost = totals.unsteered + totals.silent + totals.unavailable;
  const figures = {
    engines: `${number(totals.engines)} of ${counted(totals.sidecars, "sidecar", "sidecars")}`,
    steered: number(totals.steered),
    "without speculation": number(totals.off),
    "not steered": number(totals.unsteered),
    "silent or not shown": number(totals.silent + totals.unavailable),
    "with overrides": number(totals.overridden),
    "tokens per second": number(totals.generated_per_second),
    "gained per second": signed(totals.tokens_gained_per_second),
  };
  find("totals").replaceChildren(...Object.entries(figures).map(
    ([name, value]) => put("div", {}, put("dt", {}, name), put("dd", {}, value))));
  if (find("filter").value.trim()) return;
  say(find("fleet-glance"), `fleet: ${counted(totals.engines, "engine", "engines")}${lost ? `, ${number(lost)} not steered` : ""}`);
  find("fleet-glance").hidden = false;
}

function showRows(engines) {
  const body = find("fleet-engines").tBodies[0];
  while (body.rows.length > engines.length) body.rows[body.rows.length - 1].remove();
  while (body.rows.length < engines.length) body.append(newRow());
  engines.forEach((it, index) => {
    const { cells } = body.rows[index];
    COLUMNS.forEach(([, text], cell) => cell && text && say(cells[cell], text(it)));
    const [kind, word, meaning] = linkOf(it.link);
    const pill = cells[STATE].firstChild;
    say(pill, word);
    pill.className = `pill ${kind}`;
    pill.title = it.unavailable || meaning;
    showName(cells[0], it);
  });
}

// This page can show the details of its own sidecar's engines.
function showName(cell, it) {
  const link = cell.querySelector("a");
  if (it.local === (link !== null) && cell.textContent === it.engine_id) return;
  cell.replaceChildren(it.local ? put("a", { href: `#show=${encodeURIComponent(it.engine_id)}` }, it.engine_id) : it.engine_id);
}

function newRow() {
  const row = put("tr", { role: "row" }, ...COLUMNS.map(([label, , kind], cell) =>
    put(cell ? "td" : "th", { role: cell ? "cell" : "rowheader", "data-label": label, class: kind || "" })));
  row.cells[STATE].append(put("span"));
  return row;
}

export function listenToFleet(ask) {
  let typing = 0;
  find("filter").addEventListener("input", () => {
    clearTimeout(typing);
    here.limit = PAGE;
    typing = setTimeout(() => lookAtFleet(ask, true), TYPING_MS);
  });
  find("more").addEventListener("click", () => {
    here.limit = Math.min(here.limit + PAGE, LIMIT_MAX);
    lookAtFleet(ask, true);
  });
}
