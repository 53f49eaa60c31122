// The page of the sidecar: asks it once a second and draws what it answers.
import { showAlternatives } from "./alternatives.js";
import { showCosts } from "./costs.js";
import { find, markScrollers, say } from "./dom.js";
import { listenToEngines, showEngines } from "./engines.js";
import { listenToFleet, lookAtFleet } from "./fleet.js";
import { showNow, showOverrides, showTrail } from "./now.js";
import { showSurvival } from "./survival.js";
import { followTheme } from "./theme.js";
import { listenToTime, showTime } from "./time.js";

const PAUSE_MS = 1000;
const PATIENCE_MS = 6000;
const POINTS_MAX = 600;

const shown = { state: null, engine: "", detail: null, points: [], answeredAt: null };

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
    if (shown.engine && !lineOf(shown.engine).unavailable) await lookAt(shown.engine);
    shown.answeredAt = new Date();
    show();
    fresh();
    await lookAtFleet(ask);
  } catch (error) {
    stale(error);
  }
  setTimeout(next, PAUSE_MS);
}

const lineOf = (engine) => shown.state.engines.find((line) => line.engine_id === engine);

function next() {
  if (!document.hidden) look();
  else document.addEventListener("visibilitychange", next, { once: true });
}

async function lookAt(engine) {
  const since = shown.points.length ? shown.points[shown.points.length - 1][0] : 0;
  const detail = await ask(`api/v1/engine?id=${encodeURIComponent(engine)}&since=${since}`);
  if (detail === null || engine !== shown.engine) return;
  // Two looks may overlap and bring the same points.
  const newest = shown.points.length ? shown.points[shown.points.length - 1][0] : 0;
  shown.points = [...shown.points, ...detail.points.filter((it) => it[0] > newest)].slice(-POINTS_MAX);
  shown.detail = detail;
}

function fresh() {
  find("stale").hidden = true;
  document.body.classList.remove("old");
  say(find("live"), "live");
  find("live").className = "pill good";
}

function stale(error) {
  const since = shown.answeredAt ? `Stale since ${shown.answeredAt.toLocaleTimeString()}` : "Nothing to show yet";
  say(find("stale"), `${since}: the sidecar does not answer (${error.message}).`);
  find("stale").hidden = false;
  document.body.classList.add("old");
  say(find("live"), "stale");
  find("live").className = "pill bad";
}

// ---- choosing an engine ------------------------------------------------------------------------

// A link to one of this sidecar's engines.
function follow() {
  if (shown.state?.engines.some((line) => line.engine_id === wanted())) pick(wanted());
}

const wanted = () => new URLSearchParams(location.hash.slice(1)).get("show") || "";

function choose(engine) {
  if (engine === shown.engine) return;
  Object.assign(shown, { engine, detail: null, points: [] });
  history.replaceState(null, "", engine ? `#show=${encodeURIComponent(engine)}` : " ");
}

function pick(engine) {
  choose(engine);
  showEngines(shown.state.engines, shown.engine);
  lookAt(engine).then(showEngine, stale);
}

// ---- showing -----------------------------------------------------------------------------------

function show() {
  say(find("version"), shown.state.version);
  const troubles = [...shown.state.troubles];
  if (!shown.state.store.ok) troubles.push(`The store of overrides is in trouble: ${shown.state.store.detail}`);
  troubles.push(...shown.state.engines.flatMap((line) => [...line.lost, ...line.warnings].map((trouble) => `${line.engine_id}: ${trouble}.`)));
  say(find("trouble"), troubles.join("  "));
  find("trouble").hidden = !troubles.length;
  showEngines(shown.state.engines, shown.engine);
  showOverrides(shown.state.overrides, shown.state.precedence);
  showEngine();
}

function showEngine() {
  const line = lineOf(shown.engine);
  find("engine").hidden = !line;
  if (!line) return;
  const { detail, points } = shown;
  showNow(line, detail, points, shown.state);
  find("detail").hidden = !detail;
  if (detail) {
    showTime(line.engine_id, points, detail.drafters);
    showAlternatives(detail.alternatives, detail.drafters);
    showCosts(detail.costs, detail.evidence, line);
    showSurvival(line.engine_id, detail.survival);
    showTrail(detail.trail);
  }
  markScrollers();
}

followTheme();
listenToEngines(pick);
listenToTime();
listenToFleet(ask);
addEventListener("hashchange", follow);
addEventListener("resize", markScrollers);
look();
