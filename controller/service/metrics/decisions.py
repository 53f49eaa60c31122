"""What was decided for an engine, how sure it is, and what came of it."""

from typing import Final

from controller.core.types import Reason, RegimeMode
from controller.service.metrics.family import Family, Kind
from controller.service.metrics.view import EngineView

_COUNTER, _GAUGE = Kind.COUNTER, Kind.GAUGE
# Shown from the start, at zero, so that the first one is an increase.
_OUTCOMES = ("deployed", "kept", "rejected", "failed")

DECISION: Final[tuple[Family[EngineView], ...]] = (
    Family(
        _GAUGE, "speculation_gamma",
        "Draft length planned for the last reported batch size (0: plain decoding), by drafter.",
        lambda e: {e.chosen.arm.drafter: e.chosen.arm.gamma},
        unit="tokens", label="drafter", like="sglang:spec_num_steps",
    ),
    Family(
        _GAUGE, "speculation_plan_epoch", "Epoch of the newest plan.",
        lambda e: e.session.plan.epoch,
    ),
    Family(
        _GAUGE, "speculation_plan_age_seconds", "Since the newest plan was made.",
        lambda e: e.session.plan_age_seconds, unit="seconds",
    ),
    Family(
        _GAUGE, "speculation_lease_seconds", "How long a plan may be used without fresh contact.",
        lambda e: e.session.plan.lease_seconds, unit="seconds",
    ),
    Family(
        _COUNTER, "speculation_plans", "Plans made, by reason.",
        lambda e: {reason.value: e.session.tally.plans[reason] for reason in Reason},
        label="reason",
    ),
    Family(
        _COUNTER, "speculation_switches", "Changes of the planned choice, over all batch sizes.",
        lambda e: e.session.core.switches,
    ),
    Family(
        _GAUGE, "speculation_profiled",
        "1 while costs come from a profile, 0 while they come from a prior.",
        lambda e: bool(e.explanation.profile_id),
    ),
    Family(
        _GAUGE, "speculation_measuring", "1 while the engine is being measured.",
        lambda e: e.session.measurement is not None,
    ),
    Family(
        _COUNTER, "speculation_probes", "Probes begun.", lambda e: e.explanation.probes,
    ),
    Family(
        _COUNTER, "speculation_probe_steps", "Reported steps that belonged to a probe.",
        lambda e: e.session.tally.probing,
    ),
    Family(
        _GAUGE, "speculation_probe_lost_seconds",
        "What probing has cost so far, against the choice that it stood in for (net: a probe that "
        "finds something better gives back).",
        lambda e: e.explanation.probe_lost_seconds, unit="seconds",
    ),
    Family(
        _GAUGE, "speculation_probe_share", "The same as a share of all step time.",
        lambda e: e.explanation.probe_share, unit="ratio",
    ),
    Family(
        _GAUGE, "speculation_probe_credit_seconds", "What probing may still lose now.",
        lambda e: e.explanation.probe_credit_seconds, unit="seconds",
    ),
    Family(
        _GAUGE, "speculation_lost_capability",
        "1 for everything that the engine has lost and cannot do until it starts again (a drafter "
        "that failed, say), 0 for every drafter that works; `controller explain` names the reason.",
        lambda e: {f"drafter {drafter.name}": 0 for drafter in e.session.spec.drafters}
        | dict.fromkeys((loss.what for loss in e.session.spec.lost), 1),
        label="capability",
    ),
    Family(
        _GAUGE, "speculation_engine_overrides", "Overrides that count in the newest plan.",
        lambda e: len(e.session.plan.overrides),
    ),
)  # fmt: skip

ESTIMATES: Final[tuple[Family[EngineView], ...]] = (
    Family(
        _GAUGE, "speculation_expected_accept_length",
        "Tokens that a sequence should gain in a step of the planned choice, its bonus token "
        "included.",
        lambda e: 1 + e.chosen.expected_accepted,
        unit="tokens", like="sglang:spec_accept_length (observed)",
    ),
    Family(
        _COUNTER, "speculation_expected_accepted_tokens",
        "Draft tokens that should have been accepted, by the plan before each step; against "
        "speculation_accepted_tokens_total.",
        lambda e: e.session.core.account.expected_tokens, unit="tokens",
    ),
    Family(
        _GAUGE, "speculation_predicted_step_seconds",
        "Seconds that a step of the planned choice should take at the last reported batch size.",
        lambda e: e.chosen.step_seconds, unit="seconds",
    ),
    Family(
        _COUNTER, "speculation_plain_seconds",
        "Seconds of the plain steps, as reported: those that predictions are made for (no prefill "
        "or first use in them, no update beside them, no measurement).",
        lambda e: e.session.core.account.plain_seconds, unit="seconds",
    ),
    Family(
        _COUNTER, "speculation_predicted_seconds",
        "Seconds of the plain steps, as predicted before each.",
        lambda e: e.session.core.account.predicted_seconds, unit="seconds",
    ),
    Family(
        _COUNTER, "speculation_prediction_error_seconds",
        "How far the two lay apart, step by step, either way.",
        lambda e: e.session.core.account.error_seconds, unit="seconds",
    ),
    Family(
        _COUNTER, "speculation_estimated_instead_seconds",
        "ESTIMATED counterfactual, not measured: seconds in which another choice would have made "
        "the tokens of the plain steps.  instead: off (gamma = 0), static (what the engine would "
        "run by itself; only where it says so).  Over speculation_plain_seconds_total: the gain.",
        lambda e: e.session.core.account.instead_seconds, unit="seconds", label="instead",
    ),
    Family(
        _GAUGE, "speculation_estimated_gain_ratio",
        "ESTIMATED counterfactual, not measured: tokens per second of the planned choice over "
        "those of another one, at the last reported batch size (1: no gain).  instead: as above.",
        lambda e: e.gains, unit="ratio", label="instead",
    ),
    Family(
        _GAUGE, "speculation_cost_drift_ratio",
        "Factor by which live steps have moved the table's cost of the planned choice.",
        lambda e: e.chosen.cost_drift, unit="ratio",
    ),
    Family(
        _COUNTER, "speculation_cost_outliers", "Steps whose seconds were too odd to learn from.",
        lambda e: e.explanation.cost_outliers,
    ),
    Family(
        _COUNTER, "speculation_shifts", "Shifts of traffic noticed.",
        lambda e: e.explanation.shifts,
    ),
)  # fmt: skip

LEARNING: Final[tuple[Family[EngineView], ...]] = (
    Family(
        _GAUGE, "speculation_regime", "1 for the planned regime of drafter updates, 0 for others.",
        lambda e: {mode.value: mode is e.session.plan.regime.mode for mode in RegimeMode},
        label="mode",
    ),
    Family(
        _GAUGE, "speculation_update_stride",
        "Rounds between two online updates of the drafter, as planned (0: none).",
        lambda e: e.session.plan.regime.stride,
    ),
    Family(
        _COUNTER, "speculation_drafter_updates", "Online updates of the drafter that have landed.",
        lambda e: e.session.tally.updates,
    ),
    Family(
        _COUNTER, "speculation_drafter_resets",
        "Times that the drafter went back to earlier weights, or was given others.",
        lambda e: e.session.tally.resets,
    ),
    Family(
        _GAUGE, "speculation_draft_version",
        "Version of the drafter that the last reported step was served by (0: as loaded).",
        lambda e: e.session.last_report.draft_version if e.session.last_report else 0,
    ),
    Family(
        _COUNTER, "speculation_draft_version_swaps",
        "Times that this version changed while the engine served.",
        lambda e: e.session.tally.swaps,
    ),
    Family(
        _COUNTER, "speculation_training_rounds",
        "Rounds of training beside the engine that have ended, by outcome.",
        lambda e: dict.fromkeys(_OUTCOMES, 0) | e.session.tally.rounds, label="outcome",
    ),
)  # fmt: skip
