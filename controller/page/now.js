// The chosen engine: what it does now, since when and why, and which overrides hold.
import { clock, counted, duration, find, moment, number, percent, put, say } from "./dom.js";
import { REASONS, armText, costsText, doing, linkOf, regimeText } from "./words.js";

const KEPT_MINUTES = 10;

export function showNow(line, detail, points, state) {
  say(find("engine-title"), line.engine_id);
  const [kind, word, meaning] = linkOf(line.link);
  say(find("link"), word);
  find("link").className = `pill ${kind}`;
  say(find("link-meaning"), kind === "good" ? "" : meaning);
  find("link-meaning").className = kind;
  say(find("doing"), line.unavailable ? "Cannot be shown" : doing(line.gamma, line.drafter));
  say(find("since"), line.unavailable ? "" : sinceText(points));
  const limited = line.overrides.length && line.reason !== "override" ? " Overrides limit the choice." : "";
  say(find("why"), (REASONS[line.reason] || line.reason) + limited);
  say(find("why-detail"), `${line.reason}: ${line.reason_detail}`);
  showHeld(line, state.overrides);
  if (!detail) return;
  showFigures(line);
  showFacts(line, detail.evidence);
}

// Since when the same choice is planned for the running batch, as far back as points go.
function sinceText(points) {
  const last = points[points.length - 1];
  if (!last) return "";
  let first = points.length - 1;
  while (first > 0 && points[first - 1][2] === last[2] && points[first - 1][3] === last[3]) first -= 1;
  const seconds = last[0] - points[first][0];
  if (first > 0) return `since ${clock(points[first][0])}, for ${duration(seconds)}`;
  return last[0] - points[0][0] < 60 * KEPT_MINUTES - 5
    ? `since it was first seen at ${clock(points[0][0])}` : `for more than ${KEPT_MINUTES} minutes`;
}

function showHeld(line, overrides) {
  const held = overrides.filter((it) => line.overrides.includes(it.override_id));
  const found = held.map((it) => it.override_id);
  const gone = line.overrides.filter((id) => !found.includes(id));
  find("held").classList.toggle("holds", line.overrides.length > 0);
  find("held").replaceChildren(
    ...held.map((it) => put("p", {}, put("strong", {}, `Override: ${it.rule}`), ` by ${it.author}: “${it.reason}”. `,
      put("span", { class: "quiet" }, `Since ${moment(it.created_at)}, ${endText(it)}. For ${it.scope}, id ${it.override_id}.`))),
    ...gone.map((id) => put("p", {}, put("strong", {}, `Override ${id}`), " shaped this plan.")),
    ...(line.overrides.length ? [] : [put("p", { class: "quiet" }, "No override shapes this plan.")]),
  );
}

export function endText(it) {
  if (it.ends_at === null) return "without an end";
  return `ends in ${duration(it.ends_at - Date.now() / 1000)} (${moment(it.ends_at)})`;
}

function showFigures(line) {
  showPairs("figures", {
    "batch size (B)": line.batch_size ? number(line.batch_size) : "–",
    "tokens per second": number(line.tokens_per_second),
    "against no speculation": line.gain === null ? "–" : `×${number(line.gain, 2)}`,
    "tokens per step (τ)": line.accept_length === null ? "–"
      : `${number(line.accept_length, 2)} (${number(line.expected_accept_length, 2)} expected)`,
  });
}

function showFacts(line, evidence) {
  showPairs("facts", {
    model: line.target_model || "not named",
    "last report": line.batch_size ? `${duration(line.seconds_since_report)} ago` : "none yet",
    "plan renewed": `${duration(line.plan_age_seconds)} ago`,
    "lead over the second best": percent(evidence.margin, 1),
    "time spent on trying others": percent(evidence.probe_share, 2),
    "choice changed, over all batch sizes": counted(evidence.switches, "time", "times"),
    "traffic changed": counted(evidence.shifts, "time", "times"),
    "context of a sequence": `${number(evidence.kv_tokens_per_sequence)} tokens`,
    "costs from": evidence.profile_id ? `profile ${evidence.profile_id}` : costsText(line.costs),
    "drafter's training": regimeText(line.regime),
    rule: evidence.policy,
    ...(evidence.bound ? { "time per token": boundText(evidence.bound) } : {}),
  });
}

function boundText(bound) {
  const [expected, most] = [bound.expected_seconds, bound.seconds].map((it) => (1000 * it).toPrecision(3));
  return `${expected} ms of at most ${most} ms${bound.kept ? "" : ", not kept"}`;
}

function showPairs(id, pairs) {
  find(id).replaceChildren(...Object.entries(pairs).map(
    ([name, value]) => put("div", {}, put("dt", {}, name), put("dd", {}, value))));
}

export function showTrail(trail) {
  find("trail").replaceChildren(...trail.map((it) => put("li", {},
    put("time", { datetime: new Date(it.time * 1000).toISOString() }, moment(it.time)),
    put("strong", {}, it.was === it.arm ? `stays at ${armText(it.arm)}` : `${armText(it.was)} → ${armText(it.arm)}`),
    ` at batch size ${it.batch_size} `, put("span", { class: "pill", title: REASONS[it.reason] || "" }, it.reason),
    put("span", { class: "detail" }, it.detail))));
  find("no-trail").hidden = trail.length > 0;
}

const FREE = new Set(["for", "author", "reason", "id"]);

export function showOverrides(held, precedence) {
  find("no-overrides").hidden = held.length > 0;
  find("overrides").hidden = !held.length;
  say(find("precedence"), precedence);
  find("overrides").tBodies[0].replaceChildren(...held.map((it) => {
    const cells = {
      for: it.scope, rule: it.rule, author: it.author, reason: it.reason,
      since: moment(it.created_at), ends: it.ends_at === null ? "never" : endText(it).replace("ends ", ""), id: it.override_id,
    };
    return put("tr", { role: "row" }, ...Object.entries(cells).map(([label, text]) => put("td", { role: "cell", "data-label": label, class: FREE.has(label) ? "free" : "" }, text)));
  }));
}
