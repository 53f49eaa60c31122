// Plain words for what the sidecar reports.  The codes are those of `controller explain`.  No table
// has a prototype, or a code named "constructor" would have words.

export const REASONS = {
  __proto__: null,
  exploit: "It has the most tokens per second by estimate at this batch size.",
  probe: "The best choice by estimate runs; now and then another one is tried for a few steps, to learn about it.",
  hold: "Another choice is better by estimate, but by too little to pay back a change.",
  "profile-missing": "It is the best by estimate, but no cost profile of this engine is loaded, so that the costs of a step are a guess.",
  profiling: "`controller profile` is measuring this engine and decides what runs.",
  lease: "Nothing has changed. It still has the most tokens per second by estimate.",
  override: "An override decides.",
  unavailable: "The sidecar cannot show this engine.",
};

export const LINKS = {
  __proto__: null,
  steered: ["good", "steered", "The engine follows the plan."],
  waiting: ["", "waiting", "The engine has not reported a step yet."],
  alone: ["bad", "on its own", "The engine has no valid plan. It keeps its last one for a limited time and then uses its safe default."],
  away: ["warn", "not connected", "No stream from the engine is open. It keeps its last plan for a limited time and then uses its safe default."],
  silent: ["bad", "silent", "Its sidecar has told nothing for longer than it should."],
  "": ["bad", "cannot be shown", ""],
};

export const linkOf = (link) => LINKS[link] || ["warn", link, ""];

const COSTS = {
  __proto__: null,
  profile: "a profile measured on this engine",
  roofline: "a roofline of the model (no profile is loaded)",
  generic: "a general guess (no profile is loaded)",
};

export const costsText = (costs) => COSTS[costs] || costs;

export const SOURCES = {
  __proto__: null,
  measured: "from the profile",
  extrapolated: "outside what was measured",
  roofline: "from a roofline of the model, not measured",
  generic: "a general guess, not measured",
};

export function doing(gamma, drafter) {
  if (gamma === 0) return "No speculation (γ = 0)";
  return `Drafts ${gamma} ${gamma === 1 ? "token" : "tokens"} per step with ${drafter}`;
}

export const choiceText = (gamma, drafter) => (gamma === 0 ? "no speculation" : `γ ${gamma} with ${drafter}`);

// What an engine runs, in a few words.  line: of this sidecar or of the fleet.
export const runsNow = (line) => (line.unavailable ? "cannot be shown" : choiceText(line.gamma, line.drafter));

// "eagle3 5", as the plan's log has it: the name may hold spaces.
export function armText(arm) {
  const at = arm.lastIndexOf(" ");
  return choiceText(Number(arm.slice(at + 1)), arm.slice(0, at));
}

export function regimeText(regime) {
  if (regime === "off") return "not while it serves";
  if (regime === "collect") return "signals are collected";
  const stride = regime.split(":")[1];
  return stride ? `one update every ${stride} rounds` : regime;
}
