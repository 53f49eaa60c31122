// The page of the sidecar: asks it once a second and draws what it answers.  Whatever comes from
// there is put in as text (textContent, attributes), never as markup.
"use strict";

const PAUSE_MS = 1000;
const PATIENCE_MS = 6000;
const POINTS_MAX = 600;
const GAP_SECONDS = 5;
const SPACE = "http://www.w3.org/2000/svg";

const find = (id) => document.getElementById(id);
const shown = { state: null, engine: "", detail: null, points: [], answeredAt: null };

function put(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function draw(tag, given = {}, text = null) {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const drafterClass = (index) => `s${index % 4}`;

function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

// ---- asking ------------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-cache" });
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).trim()}`);
  return answer.json();
}

async function look() {
  try {
    const state = await ask("api/v1/state");
    const engines = state.engines.map((line) => line.engine_id);
    if (!engines.includes(shown.engine)) choose(engines.includes(wanted()) ? wanted() : engines[0] || "");
    shown.state = state;
    if (shown.engine) await lookAt(shown.engine);
    shown.answeredAt = new Date();
    show();
    fresh();
  } catch (error) {
    stale(error);
  }
  setTimeout(next, PAUSE_MS);
}

function next() {
  if (!document.hidden) look();
  else document.addEventListener("visibilitychange", next, { once: true });
}

async function lookAt(engine) {
  const since = shown.points.length ? shown.points[shown.points.length - 1][0] : 0;
  const detail = await ask(`api/v1/engine?id=${encodeURIComponent(engine)}&since=${since}`);
  if (detail === null || engine !== shown.engine) return;
  shown.points = [...shown.points, ...detail.points].slice(-POINTS_MAX);
  shown.detail = detail;
}

function fresh() {
  find("stale").hidden = true;
  const live = find("live");
  say(live, "live");
  live.className = "pill good";
}

function stale(error) {
  const since = shown.answeredAt ? `Stale since ${shown.answeredAt.toLocaleTimeString()}` : "Nothing to show yet";
  say(find("stale"), `${since}: the sidecar does not answer (${error.message}).`);
  find("stale").hidden = false;
  const live = find("live");
  say(live, "stale");
  live.className = "pill bad";
}

// ---- choosing an engine ------------------------------------------------------------------------

const wanted = () => new URLSearchParams(location.hash.slice(1)).get("show") || "";

function choose(engine) {
  if (engine === shown.engine) return;
  Object.assign(shown, { engine, detail: null, points: [] });
  history.replaceState(null, "", engine ? `#show=${encodeURIComponent(engine)}` : " ");
}

function pick(engine) {
  choose(engine);
  showEngines();
  lookAt(engine).then(showEngine, stale);
}

function move(event) {
  const rows = [...find("engines").tBodies[0].rows];
  const at = rows.indexOf(event.target.closest("tr"));
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, Enter: at, " ": at }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  const row = rows[Math.min(Math.max(to, 0), rows.length - 1)];
  pick(row.dataset.engine);
  row.focus();
}

// ---- showing -----------------------------------------------------------------------------------

function show() {
  say(find("version"), shown.state.version);
  const troubles = [...shown.state.troubles];
  if (!shown.state.store.ok) troubles.push(`The store of overrides is in trouble: ${shown.state.store.detail}`);
  troubles.push(...shown.state.engines.flatMap((line) => line.lost.map((loss) => `${line.engine_id}: ${loss}.`)));
  say(find("trouble"), troubles.join("  "));
  find("trouble").hidden = !troubles.length;
  showEngines();
  showOverrides();
  showEngine();
}

const LINKS = { steered: "good", waiting: "", alone: "bad", away: "warn" };

function showEngines() {
  const body = find("engines").tBodies[0];
  const lines = shown.state.engines;
  const rows = new Map([...body.rows].map((row) => [row.dataset.engine, row]));
  say(find("count"), lines.length ? `${lines.length}` : "");
  find("none").hidden = lines.length > 0;
  lines.forEach((line, index) => {
    let row = rows.get(line.engine_id);
    rows.delete(line.engine_id);
    if (!row) {
      row = put("tr");
      row.dataset.engine = line.engine_id;
      row.append(put("th", { scope: "row" }), ...Array.from({ length: 11 }, () => put("td")));
      for (const cell of [1, 2, 4, 5, 6]) row.cells[cell].className = "number";
      row.cells[9].append(put("span"));
      row.cells[2].classList.add("strong");
    }
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] || null);
    const chosen = line.engine_id === shown.engine;
    row.setAttribute("aria-selected", chosen);
    row.tabIndex = chosen ? 0 : -1;
    const texts = [
      line.engine_id, line.batch_size || "–", line.gamma, line.drafter, number(line.accept_length, 2),
      number(line.tokens_per_second, 0), line.gain === null ? "–" : `×${line.gain.toFixed(2)}`, line.regime, line.reason,
      null, line.costs, line.overrides.join(", ") || "–",
    ];
    texts.forEach((text, cell) => text !== null && say(row.cells[cell], String(text)));
    const link = row.cells[9].firstChild;
    say(link, line.link);
    link.className = `pill ${LINKS[line.link]}`;
  });
  for (const row of rows.values()) row.remove();
}

function showOverrides() {
  const held = shown.state.overrides;
  find("no-overrides").hidden = held.length > 0;
  find("overrides").hidden = !held.length;
  say(find("precedence"), shown.state.precedence);
  find("overrides").tBodies[0].replaceChildren(...held.map((it) => {
    const left = it.ends_at === null ? "never" : `in ${duration(it.ends_at - Date.now() / 1000)} (${clock(it.ends_at)})`;
    const texts = [it.scope, it.rule, it.author, it.reason, left, it.override_id];
    return put("tr", {}, ...texts.map((text, cell) => put("td", cell === 3 ? { class: "free" } : {}, text)));
  }));
}

function showEngine() {
  const line = shown.state.engines.find((it) => it.engine_id === shown.engine);
  find("engine").hidden = !line || !shown.detail;
  if (!line || !shown.detail) return;
  const { costs, evidence, drafters, survival, trail } = shown.detail;
  say(find("engine-title"), line.engine_id);
  say(find("why"), `${line.reason}: ${line.reason_detail}`);
  showFacts({
    model: line.target_model || "–",
    "expected τ": line.expected_accept_length.toFixed(2),
    "plan made": `${duration(line.plan_age_seconds)} ago`,
    "last report": line.batch_size ? `${duration(line.seconds_since_report)} ago` : "never",
    "ahead of the runner-up": `${(100 * evidence.margin).toFixed(1)} %`,
    "probing has cost": `${(100 * evidence.probe_share).toFixed(2)} %`,
    "switches, shifts": `${evidence.switches}, ${evidence.shifts}`,
    context: `${evidence.kv_tokens_per_sequence.toFixed(0)} tokens`,
    rule: evidence.policy,
    ...(evidence.bound ? { "time per token": boundText(evidence.bound) } : {}),
  });
  find("time").replaceChildren(...timeChart(shown.points, drafters, find("time").clientWidth));
  showCosts(costs, drafters, evidence);
  find("survival").replaceChildren(...survivalChart(survival, find("survival").clientWidth));
  find("trail").replaceChildren(...trail.map((it) => put("li", {},
    put("time", { datetime: new Date(it.time * 1000).toISOString() }, clock(it.time)),
    put("strong", {}, `${it.was} → ${it.arm}`), ` at B = ${it.batch_size} `, put("span", { class: "pill" }, it.reason),
    ...(it.regime === "off" ? [] : [" ", put("span", { class: "pill" }, it.regime)]),
    put("span", { class: "detail" }, it.detail))));
}

function boundText(bound) {
  const [expected, most] = [bound.expected_seconds, bound.seconds].map((it) => (1000 * it).toPrecision(3));
  return `${expected} ms of at most ${most} ms${bound.kept ? "" : ", not kept"}`;
}

function showFacts(facts) {
  find("facts").replaceChildren(...Object.entries(facts).map(
    ([name, value]) => put("div", {}, put("dt", {}, name), put("dd", {}, value))));
}

function showCosts(costs, drafters, evidence) {
  const from = evidence.profile_id ? `profile ${evidence.profile_id}` : "a prior, corrected by live steps";
  say(find("source"), `— milliseconds; costs from ${from}`);
  const all = costs.seconds.flat().map(Math.log);
  const low = Math.min(...all), span = Math.max(...all) - low || 1;
  const head = put("tr", {}, put("th", { scope: "col" }, "B ≤"), ...costs.batch_sizes.map((size, row) =>
    put("th", { scope: "col", class: row === costs.row ? "number now-head" : "number" }, String(size))));
  const lines = costs.arms.map(([drafter, gamma], arm) => put("tr", {},
    put("th", { scope: "row" }, `${drafter} γ ${gamma}`),
    ...costs.batch_sizes.map((size, row) => heatCell(costs, arm, row, (Math.log(costs.seconds[arm][row]) - low) / span))));
  const table = put("table", { class: "heat", "aria-label": "Milliseconds of a step by choice and batch size" },
    put("thead", {}, head), put("tbody", {}, ...lines));
  const where = find("cost").scrollLeft;
  find("cost").replaceChildren(table, put("p", { class: "quiet hint" },
    "Orange frame: what runs now. Dark frame: the best choice at that batch size. Slanted: not measured. Faint: not allowed."));
  find("cost").scrollLeft = where;
}

function heatCell(costs, arm, row, heat) {
  const [drafter, gamma] = costs.arms[arm];
  const now = arm === costs.arm && row === costs.row, best = costs.frontier[row] === arm;
  const legal = costs.legal[arm][row], source = costs.source[arm][row];
  const marks = [now && "now", best && "frontier", !legal && "off", source !== "measured" && "guess"];
  const seconds = costs.seconds[arm][row];
  const words = [
    `${drafter} γ ${gamma} at B ${costs.batch_sizes[row]}: ${(1000 * seconds).toFixed(2)} ms`,
    `${number(costs.tokens_per_second[arm][row], 0)} tokens/s`, source,
    ...(best ? ["the best here"] : []), ...(now ? ["runs now"] : []), ...(legal ? [] : ["not allowed"]),
  ].join(", ");
  const cell = put("td", { class: marks.filter(Boolean).join(" "), title: words, "aria-label": words },
    (1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0));
  cell.style.backgroundColor = `rgba(var(--heat), ${(0.05 + 0.5 * heat).toFixed(3)})`;
  return cell;
}

// ---- charts ------------------------------------------------------------------------------------

function frame(width, height, name) {
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name });
}

function legend(...items) {
  return put("div", { class: "legend", "aria-hidden": "true" }, ...items.map(([kind, text]) => {
    const sample = draw("svg", { viewBox: "0 0 22 12" });
    sample.append(/batch|alone/.test(kind) ? draw("rect", { class: kind, width: 22, height: 12 })
      : draw("path", { class: kind, d: "M1 6H21" }));
    return put("span", {}, sample, text);
  }));
}

// γ and acceptance (tokens, on the left) and the batch (on the right) over time.
function timeChart(points, drafters, width) {
  const height = 250, left = 34, right = 46, top = 10, bottom = 26;
  const last = points[points.length - 1];
  if (!last) return [put("p", { class: "quiet" }, "No history yet: it begins with the first second.")];
  const known = points.filter((it) => it[1] !== null);
  const ceiling = Math.max(2, ...points.map((it) => Math.max(it[2], it[4] || 0))) + 0.5;
  const most = Math.max(4, ...known.map((it) => it[1])) * 1.15;
  const begin = Math.min(points[0][0] - 1, last[0] - 60);
  const x = (time) => left + ((time - begin) / (last[0] - begin)) * (width - left - right);
  const y = (tokens) => height - bottom - (tokens / ceiling) * (height - top - bottom);
  const b = (size) => height - bottom - (size / most) * (height - top - bottom);
  const svg = frame(width, height, `Draft length ${last[2]} with ${drafters[last[3]]} now, batch ` +
    `${last[1] ?? "unknown"}, acceptance length ${number(last[4], 2)}; ${points.length} seconds are shown`);
  const every = Math.max(1, Math.ceil(ceiling / 6));
  for (let tokens = 0; tokens <= ceiling; tokens += every) {
    svg.append(draw("path", { class: "axis", d: `M${left} ${y(tokens)}H${width - right}` }),
      draw("text", { x: left - 8, y: y(tokens) + 4, "text-anchor": "end" }, tokens));
  }
  for (const share of [0, 0.5, 1]) {
    const size = Math.round((most / 1.15) * share);
    svg.append(draw("text", { x: width - right + 8, y: b(size) + 4 }, `B ${size}`));
  }
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const time = begin + share * (last[0] - begin), anchor = { 0: "start", 1: "end" }[share] || "middle";
    svg.append(draw("text", { x: x(time), y: height - 6, "text-anchor": anchor }, clock(time)));
  }
  const wide = Math.max(1, x(begin + 1) - left);
  const area = known.map((it) => `M${x(it[0]) - wide} ${b(0)}V${b(it[1])}h${wide}V${b(0)}Z`).join("");
  const alone = known.filter((it) => it[6] > 0).map((it) => `M${x(it[0]) - wide} ${top}h${wide}V${b(0)}h${-wide}Z`).join("");
  svg.append(draw("path", { class: "batch", d: area || "M0 0" }), draw("path", { class: "alone", d: alone || "M0 0" }));
  svg.append(draw("path", { class: "accept", d: line(known.filter((it) => it[4] !== null), (it) => x(it[0]), (it) => y(it[4])) }));
  drafters.forEach((_, drafter) => {
    const runs = points.map((it, index) => {
      if (it[3] !== drafter) return "";
      const before = points[index - 1];
      const joined = before && before[3] === drafter && it[0] - before[0] < GAP_SECONDS;
      return joined ? `H${x(it[0])}V${y(it[2])}` : `M${x(it[0]) - wide} ${y(it[2])}H${x(it[0])}`;
    }).join("");
    svg.append(draw("path", { class: `path ${drafterClass(drafter)}`, d: runs || "M0 0" }));
  });
  return [svg, legend(...drafters.map((name, index) => [`path ${drafterClass(index)}`, `γ, ${name}`]),
    ["accept", "τ, tokens a sequence gains in a step"], ["batch", "B, the batch"], ["alone", "steps without a lease"])];
}

function line(points, x, y) {
  return points.map((it, index) => {
    const before = points[index - 1];
    return `${before && it[0] - before[0] < GAP_SECONDS ? "L" : "M"}${x(it)} ${y(it)}`;
  }).join("") || "M0 0";
}

// The share of drafts that survive to each position, with the band that they lie in by 95 %.
function survivalChart(curves, width) {
  const height = 260, left = 38, right = 14, top = 10, bottom = 26;
  const longest = Math.max(1, ...curves.map((it) => it.survival.length));
  const x = (k) => left + (k / longest) * (width - left - right);
  const y = (share) => height - bottom - share * (height - top - bottom);
  const words = curves.map((it) => `${it.drafter}: ${it.survival.map((s, k) =>
    `${k + 1}: ${s.toFixed(2)} (${it.low[k].toFixed(2)} to ${it.high[k].toFixed(2)})`).join(", ")}`);
  const svg = frame(width, height, `Survival by position. ${words.join(". ")}`);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(draw("path", { class: "axis", d: `M${left} ${y(share)}H${width - right}` }),
      draw("text", { x: left - 8, y: y(share) + 4, "text-anchor": "end" }, share));
  }
  for (let k = 0; k <= longest; k += Math.ceil(longest / 12)) {
    svg.append(draw("text", { x: x(k), y: height - 6, "text-anchor": "middle" }, k));
  }
  curves.forEach((it, index) => {
    const kind = drafterClass(index);
    const up = it.high.map((share, k) => `L${x(k + 1)} ${y(share)}`).join("");
    const down = it.low.map((share, k) => `L${x(k + 1)} ${y(share)}`).reverse().join("");
    const middle = it.survival.map((share, k) => `L${x(k + 1)} ${y(share)}`).join("");
    svg.append(draw("path", { class: `band ${kind}`, d: `M${x(0)} ${y(1)}${up}${down}Z` }),
      draw("path", { class: `path ${kind}`, fill: "none", d: `M${x(0)} ${y(1)}${middle}` }));
    it.survival.forEach((share, k) => {
      const dot = draw("circle", { class: kind, cx: x(k + 1), cy: y(share), r: 3.4 });
      dot.append(draw("title", {}, `${it.drafter}, position ${k + 1}: ${share.toFixed(3)}, evidence ${it.exposures[k].toFixed(0)}`));
      svg.append(dot);
    });
  });
  return [svg, legend(...curves.map((it, index) => [`path ${drafterClass(index)}`, it.drafter]))];
}

// ---- colours -----------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  let kept = null;
  try { kept = localStorage.getItem("theme"); } catch { /* no storage: as the system */ }
  return THEMES.includes(kept) ? kept : "auto";
}

function useTheme(name) {
  const used = name === "auto" ? (dark.matches ? "dark" : "light") : name;
  document.documentElement.dataset.theme = used;
  say(find("theme"), `◐ ${name}`);
  find("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
}

function nextTheme() {
  const name = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  try { localStorage.setItem("theme", name); } catch { /* it holds until the page is left */ }
  useTheme(name);
}

useTheme(theme());
dark.addEventListener("change", () => useTheme(theme()));
find("theme").addEventListener("click", nextTheme);
find("engines").setAttribute("role", "grid");
find("engines").tBodies[0].addEventListener("keydown", move);
find("engines").tBodies[0].addEventListener("click", (event) => pick(event.target.closest("tr").dataset.engine));
addEventListener("resize", () => shown.state && showEngine());
look();
