// The engines of this sidecar, one in a line, of which one is chosen.
import { find, number, put, say } from "./dom.js";
import { linkOf, runsNow } from "./words.js";

const COLUMNS = [
  ["engine", (line) => line.engine_id],
  ["state", null],
  ["runs now", runsNow],
  ["batch", (line) => number(line.batch_size || null)],
  ["tokens/step", (line) => number(line.accept_length, 2)],
  ["tokens/s", (line) => number(line.tokens_per_second)],
  ["gain", (line) => (line.gain === null ? "–" : `×${number(line.gain, 2)}`)],
  ["reason", (line) => line.reason],
  ["overrides", (line) => line.overrides.join(", ") || "none"],
];
const NUMBERS = new Set(["batch", "tokens/step", "tokens/s", "gain"]);
const STATE = 1;

export function showEngines(lines, chosen) {
  const body = find("engines").tBodies[0];
  const rows = new Map([...body.rows].map((row) => [row.dataset.engine, row]));
  say(find("count"), lines.length ? `${lines.length}` : "");
  find("none").hidden = lines.length > 0;
  find("engines").hidden = !lines.length;
  find("keys").hidden = lines.length < 2;
  lines.forEach((line, index) => {
    const row = rows.get(line.engine_id) || newRow(line.engine_id);
    rows.delete(line.engine_id);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] || null);
    row.setAttribute("aria-selected", line.engine_id === chosen);
    row.tabIndex = line.engine_id === chosen ? 0 : -1;
    COLUMNS.forEach(([, text], cell) => text && say(row.cells[cell], text(line)));
    const [kind, word, meaning] = linkOf(line.link);
    const pill = row.cells[STATE].firstChild;
    say(pill, word);
    pill.className = `pill ${kind}`;
    pill.title = meaning;
  });
  for (const row of rows.values()) row.remove();
}

function newRow(engine) {
  const row = put("tr", { role: "row" });
  row.dataset.engine = engine;
  row.append(...COLUMNS.map(([label], cell) => {
    const made = cell ? put("td", { role: "gridcell" }) : put("th", { scope: "row", role: "rowheader" });
    made.dataset.label = label;
    if (NUMBERS.has(label)) made.className = "number";
    if (label === "runs now" || label === "overrides") made.className = "free";
    return made;
  }));
  row.cells[STATE].append(put("span"));
  return row;
}

// Calls `pick` with the engine whose row was clicked or reached by a key.
export function listenToEngines(pick) {
  const body = find("engines").tBodies[0];
  body.addEventListener("click", (event) => pick(event.target.closest("tr").dataset.engine));
  body.addEventListener("keydown", (event) => {
    const rows = [...body.rows];
    const at = rows.indexOf(event.target.closest("tr"));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, Enter: at, " ": at }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const row = rows[Math.min(Math.max(to, 0), rows.length - 1)];
    pick(row.dataset.engine);
    row.focus();
  });
}
