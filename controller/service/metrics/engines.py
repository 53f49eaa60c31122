"""Describes the metrics of an engine: decisions, estimates, learning, steps, and its link."""

from typing import Final

from controller.core.checks.engine_checks import WarningKind
from controller.core.plan import Reason, RegimeMode
from controller.service.metrics.family import Distribution, MetricFamily, MetricKind
from controller.service.views.engine_status import EngineSnapshot

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
# Present at zero from the start, so that the first event is an increase.
_CODES = ("INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION")
_OUTCOMES = ("deployed", "kept", "rejected", "failed")

DECISION_FAMILIES: Final[tuple[MetricFamily[EngineSnapshot], ...]] = (
    MetricFamily(
        _GAUGE, "speculation_gamma",
        "Draft length planned for the last reported batch size (0: plain decoding), by drafter.",
        lambda e: {e.chosen.arm.drafter: e.chosen.arm.gamma},
        unit="tokens", label="drafter", similar_metrics="sglang:spec_num_steps",
    ),
    MetricFamily(
        _GAUGE, "speculation_plan_epoch", "Epoch of the newest plan.",
        lambda e: e.session.plan.epoch,
    ),
    MetricFamily(
        _GAUGE, "speculation_plan_age_seconds", "Time since the newest plan was made.",
        lambda e: e.session.plan_age_seconds, unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_lease_seconds", "How long a plan may be used without fresh contact.",
        lambda e: e.session.plan.lease_seconds, unit="seconds",
    ),
    MetricFamily(
        _COUNTER, "speculation_plans", "Plans made, by reason.",
        lambda e: {reason.value: e.session.counters.plans[reason] for reason in Reason},
        label="reason",
    ),
    MetricFamily(
        _GAUGE, "speculation_tpot_bound_seconds",
        "Bound on the mean time per output token at the last reported batch size, by setting or "
        "override; absent without one.",
        lambda e: e.explanation.bound.bound.seconds if e.explanation.bound else None,
        unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_tpot_bound_kept",
        "1 if the planned choice is expected to keep that bound, 0 if not.",
        lambda e: e.explanation.bound.is_kept if e.explanation.bound else None,
    ),
    MetricFamily(
        _GAUGE, "speculation_tpot_bound_binds",
        "1 if that bound changes the choice or is not kept, 0 if not.",
        lambda e: e.explanation.bound.is_binding if e.explanation.bound else None,
    ),
    MetricFamily(
        _GAUGE, "speculation_tpot_bound_batch_size",
        "Largest batch size up to which every batch has a choice that is expected to keep its "
        "bound; 0: not even the smallest has one.",
        lambda e: e.explanation.bound.kept_up_to if e.explanation.bound else None,
    ),
    MetricFamily(
        _COUNTER, "speculation_switches", "Changes of the planned choice, over all batch sizes.",
        lambda e: e.session.core.switches,
    ),
    MetricFamily(
        _GAUGE, "speculation_profiled",
        "1 while costs come from a profile, 0 while they come from a prior.",
        lambda e: bool(e.explanation.profile_id),
    ),
    MetricFamily(
        _GAUGE, "speculation_measuring", "1 while `controller profile` measures the engine.",
        lambda e: e.session.measurement is not None,
    ),
    MetricFamily(
        _COUNTER, "speculation_probes", "Probes started.", lambda e: e.explanation.probes,
    ),
    MetricFamily(
        _COUNTER, "speculation_probe_steps", "Reported steps that belonged to a probe.",
        lambda e: e.session.counters.probe_steps,
    ),
    MetricFamily(
        _GAUGE, "speculation_probe_lost_seconds",
        "Time that probing has lost so far, compared with the choice that it replaced (net: a "
        "probe of a better choice reduces it).",
        lambda e: e.explanation.probe_lost_seconds, unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_probe_share",
        "speculation_probe_lost_seconds as a share of all step time.",
        lambda e: e.explanation.probe_share, unit="ratio",
    ),
    MetricFamily(
        _GAUGE, "speculation_probe_credit_seconds", "Time that probing may lose from now on.",
        lambda e: e.explanation.probe_credit_seconds, unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_lost_capability",
        "1 for each capability that the engine has lost until it starts again (a drafter that "
        "failed, say), 0 for every drafter that works. `controller explain` shows the reason.",
        lambda e: {f"drafter {drafter.name}": 0 for drafter in e.session.spec.drafters}
        | dict.fromkeys((loss.description for loss in e.session.spec.lost), 1),
        label="capability",
    ),
    MetricFamily(
        _GAUGE, "speculation_engine_warning",
        "1 for each kind of warning that the engine's reports give rise to, 0 for the others. "
        "`controller explain` shows what was found.",
        lambda e: dict.fromkeys((kind.value for kind in WarningKind), 0)
        | dict.fromkeys((it.kind.value for it in e.explanation.warnings), 1),
        label="kind",
    ),
    MetricFamily(
        _GAUGE, "speculation_engine_overrides", "Overrides that shaped the newest plan.",
        lambda e: len(e.session.plan.overrides),
    ),
)  # fmt: skip

ESTIMATE_FAMILIES: Final[tuple[MetricFamily[EngineSnapshot], ...]] = (
    MetricFamily(
        _GAUGE, "speculation_expected_acceptance_length",
        "Expected tokens that a sequence gains in a step of the planned choice, bonus token "
        "included.",
        lambda e: 1 + e.chosen.expected_accepted,
        unit="tokens", similar_metrics="sglang:spec_accept_length (observed)",
    ),
    MetricFamily(
        _GAUGE, "speculation_acceptance_length_error",
        "Expected minus actual acceptance length of the last minute's drafts; above 0 the "
        "estimates are too high. Absent if nothing was drafted.",
        lambda e: e.session.last_minute.acceptance_length_error, unit="tokens",
    ),
    MetricFamily(
        _COUNTER, "speculation_expected_accepted_tokens",
        "Draft tokens expected to be accepted, by the plan before each step. Compare with "
        "speculation_accepted_tokens_total.",
        lambda e: e.session.core.prediction_audit.expected_tokens, unit="tokens",
    ),
    MetricFamily(
        _GAUGE, "speculation_predicted_step_seconds",
        "Expected time of a step of the planned choice at the last reported batch size.",
        lambda e: e.chosen.step_seconds, unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_expected_tpot_seconds",
        "Expected mean time between a sequence's output tokens with the planned choice, at the "
        "last reported batch size.",
        lambda e: e.chosen.seconds_per_token,
        unit="seconds", similar_metrics="sglang:request_time_per_output_token_seconds, "
        "vllm:request_time_per_output_token_seconds (observed)",
    ),
    MetricFamily(
        _COUNTER, "speculation_plain_seconds",
        "Reported time of plain steps. Predictions are made for these only: steps without "
        "prefill, first use of a graph, an update beside them, or a measurement.",
        lambda e: e.session.core.prediction_audit.plain_seconds, unit="seconds",
    ),
    MetricFamily(
        _COUNTER, "speculation_predicted_seconds",
        "Time of the plain steps, as predicted before each.",
        lambda e: e.session.core.prediction_audit.predicted_seconds, unit="seconds",
    ),
    MetricFamily(
        _COUNTER, "speculation_prediction_error_seconds",
        "Sum over the plain steps of the absolute difference of predicted and reported time.",
        lambda e: e.session.core.prediction_audit.error_seconds, unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_step_time_error_ratio",
        "Relative error of the cost model: mean absolute difference of predicted and reported time "
        "over the last minute's plain steps, by their time. Absent without such steps.",
        lambda e: e.session.last_minute.step_time_error, unit="ratio",
    ),
    MetricFamily(
        _GAUGE, "speculation_step_time_bias_ratio",
        "Predicted minus reported time of the last minute's plain steps, by the latter; above 0 "
        "the cost model is too slow. Absent without such steps.",
        lambda e: e.session.last_minute.step_time_bias, unit="ratio",
    ),
    MetricFamily(
        _COUNTER, "speculation_estimated_instead_seconds",
        "ESTIMATED counterfactual, not measured: time in which another choice would have produced "
        "the tokens of the plain steps. instead: off (gamma = 0), static (what the engine would "
        "run without the sidecar, if it reports that). Divide by speculation_plain_seconds_total "
        "for the gain.",
        lambda e: e.session.core.prediction_audit.alternative_seconds, unit="seconds",
        label="instead",
    ),
    MetricFamily(
        _GAUGE, "speculation_estimated_gain_ratio",
        "ESTIMATED counterfactual, not measured: tokens per second of the planned choice divided "
        "by those of another one, at the last reported batch size (1: no gain). instead: as in "
        "speculation_estimated_instead_seconds_total.",
        lambda e: e.gains, unit="ratio", label="instead",
    ),
    MetricFamily(
        _GAUGE, "speculation_cost_drift_ratio",
        "Factor by which live steps have changed the cost of the planned choice in the table.",
        lambda e: e.chosen.cost_drift, unit="ratio",
    ),
    MetricFamily(
        _COUNTER, "speculation_cost_outliers",
        "Steps whose time was an outlier, which the cost model ignored.",
        lambda e: e.explanation.cost_outliers,
    ),
    MetricFamily(
        _COUNTER, "speculation_shifts", "Detected shifts of traffic.",
        lambda e: e.explanation.shifts,
    ),
)  # fmt: skip

LEARNING_FAMILIES: Final[tuple[MetricFamily[EngineSnapshot], ...]] = (
    MetricFamily(
        _GAUGE, "speculation_regime", "1 for the planned regime of drafter updates, 0 for others.",
        lambda e: {mode.value: mode is e.session.plan.regime.mode for mode in RegimeMode},
        label="mode",
    ),
    MetricFamily(
        _GAUGE, "speculation_update_stride",
        "Rounds between two online updates of the drafter, as planned (0: none).",
        lambda e: e.session.plan.regime.stride,
    ),
    MetricFamily(
        _COUNTER, "speculation_drafter_updates", "Online updates of the drafter that have landed.",
        lambda e: e.session.counters.drafter_updates,
    ),
    MetricFamily(
        _COUNTER, "speculation_drafter_resets",
        "Times that the drafter returned to earlier weights or received other ones.",
        lambda e: e.session.counters.drafter_resets,
    ),
    MetricFamily(
        _GAUGE, "speculation_draft_version",
        "Version of the drafter in the last reported step (0: as loaded).",
        lambda e: e.session.last_report.draft_version if e.session.last_report else 0,
    ),
    MetricFamily(
        _COUNTER, "speculation_draft_version_swaps",
        "Changes of speculation_draft_version while the engine served.",
        lambda e: e.session.counters.version_swaps,
    ),
    MetricFamily(
        _COUNTER, "speculation_training_rounds",
        "Training rounds of the engine's drafter that have ended, by outcome.",
        lambda e: dict.fromkeys(_OUTCOMES, 0) | e.session.counters.training_rounds, label="outcome",
    ),
)  # fmt: skip


STEP_FAMILIES: Final[tuple[MetricFamily[EngineSnapshot], ...]] = (
    MetricFamily(
        _COUNTER, "speculation_reports", "Step reports that were accepted.",
        lambda e: e.session.counters.reports,
    ),
    MetricFamily(
        _COUNTER, "speculation_step_seconds", "Wall-clock seconds of the reported steps.",
        lambda e: e.session.counters.step_seconds, unit="seconds",
    ),
    MetricFamily(
        _COUNTER, "speculation_sequence_steps",
        "Sequences that decoded, step by step, drafted for or not: the sum of all batch sizes, "
        "without speculation_ended_sequence_steps_total.",
        lambda e: e.session.counters.sequence_steps,
        similar_metrics="sglang:spec_verify_calls_total",
    ),
    MetricFamily(
        _COUNTER, "speculation_ended_sequence_steps",
        "Sequences that a step ran although their requests had ended or left the batch meanwhile. "
        "The engine discarded their tokens, and no other counter includes them.",
        lambda e: e.session.counters.ended_sequences,
    ),
    MetricFamily(
        _COUNTER, "speculation_drafts",
        "Drafts verified: one per step and sequence with at least one verified draft token.",
        lambda e: e.session.counters.drafts, similar_metrics="vllm:spec_decode_num_drafts_total",
    ),
    MetricFamily(
        _COUNTER, "speculation_draft_tokens",
        "Draft tokens verified, without those that a grammar had removed. A lookup may find fewer "
        "than the planned draft length.",
        lambda e: e.session.counters.drafted_tokens,
        unit="tokens", similar_metrics="vllm:spec_decode_num_draft_tokens_total",
    ),
    MetricFamily(
        _COUNTER, "speculation_accepted_tokens",
        "Draft tokens accepted (bonus tokens excluded), as verified: those after the end of an "
        "answer are included.",
        lambda e: e.session.counters.accepted_tokens,
        unit="tokens", similar_metrics="vllm:spec_decode_num_accepted_tokens_total",
    ),
    MetricFamily(
        _COUNTER, "speculation_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft (the first is 0).",
        lambda e: {str(k): n for k, n in enumerate(e.accepted_by_position)},
        unit="tokens", label="position",
        similar_metrics="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    MetricFamily(
        _HISTOGRAM, "speculation_accepted_tokens_per_draft",
        "Draft tokens accepted of each draft (bonus tokens excluded), up to the engine's largest "
        "draft length. Its count is speculation_drafts_total, and its sum "
        "speculation_accepted_tokens_total.",
        lambda e: Distribution(e.drafts_by_length), unit="tokens",
    ),
    MetricFamily(
        _GAUGE, "speculation_acceptance_length",
        "Mean tokens gained by a draft in the last minute, bonus token included; absent if nothing "
        "was drafted.",
        lambda e: e.session.last_minute.acceptance_length,
        unit="tokens", similar_metrics="sglang:spec_accept_length (without steps at gamma = 0)",
    ),
    MetricFamily(
        _GAUGE, "speculation_draft_acceptance_rate",
        "Share of the draft tokens of the last minute that was accepted; absent if nothing was "
        "drafted.",
        lambda e: e.session.last_minute.draft_acceptance_rate,
        unit="ratio", similar_metrics="sglang:spec_accept_rate",
    ),
    MetricFamily(
        _GAUGE, "speculation_accepted_per_verified",
        "Share of the tokens verified in the last minute that was kept, bonus token included in "
        "both; absent if nothing was drafted.",
        lambda e: e.session.last_minute.accepted_per_verified, unit="ratio",
    ),
    MetricFamily(
        _COUNTER, "speculation_generated_tokens",
        "Tokens gained by verification: accepted draft tokens and one bonus token per sequence and "
        "step. Some are after the end of an answer, see speculation_delivered_tokens_total.",
        lambda e: e.session.counters.generated_tokens, unit="tokens",
    ),
    MetricFamily(
        _COUNTER, "speculation_delivered_tokens",
        "Tokens added to answers by the reported steps: without what a stop, the length or a "
        "grammar cut off, and without the first token of each answer, which comes from the "
        "prefill. Absent if the engine does not report it.",
        lambda e: e.session.counters.delivered_tokens, unit="tokens",
        similar_metrics=(
            "vllm:generation_tokens_total, sglang:generation_tokens_total (first tokens included)"
        ),
    ),
    MetricFamily(
        _COUNTER, "speculation_switched_steps",
        "Reported steps that changed drafter, draft length or sleep state.",
        lambda e: e.session.counters.switched_steps,
    ),
    MetricFamily(
        _COUNTER, "speculation_drafter_changes",
        "Reported steps that ran another drafter than the one before.",
        lambda e: e.session.counters.drafter_changes,
    ),
    MetricFamily(
        _COUNTER, "speculation_eager_steps",
        "Reported steps that ran without a graph, in an engine that has graphs.",
        lambda e: e.session.counters.eager_steps,
    ),
)  # fmt: skip

LINK_FAMILIES: Final[tuple[MetricFamily[EngineSnapshot], ...]] = (
    MetricFamily(
        _GAUGE, "speculation_steering", "1 while the engine's stream is open.",
        lambda e: e.session.stream is not None and e.session.open_streams > 0,
    ),
    MetricFamily(
        _GAUGE, "speculation_fallback",
        "1 if the last reported step of the engine ran without a valid lease (in the grace period "
        "or with the safe default).",
        lambda e: bool(e.session.counters.last_step_unsteered),
    ),
    MetricFamily(
        _COUNTER, "speculation_unsteered_steps", "Reported steps without a valid lease.",
        lambda e: e.session.counters.unsteered_steps,
    ),
    MetricFamily(
        _COUNTER, "speculation_lease_losses",
        "Times that a lease of the engine expired, by its reports.",
        lambda e: e.session.counters.lease_losses,
    ),
    MetricFamily(
        _COUNTER, "speculation_dropped_reports",
        "Step reports that the shim dropped because its socket or buffer was full, or that a "
        "sidecar had not acknowledged when it was killed.",
        lambda e: e.session.counters.dropped_reports,
    ),
    MetricFamily(
        _COUNTER, "speculation_messages",
        "Messages with reports. A sidecar that is behind gets fewer of them, with more reports in "
        "each.",
        lambda e: e.session.counters.messages,
    ),
    MetricFamily(
        _COUNTER, "speculation_rejected_reports", "Step reports that were refused, by status code.",
        lambda e: dict.fromkeys(_CODES, 0) | e.session.counters.rejected, label="code",
    ),
    MetricFamily(
        _GAUGE, "speculation_report_age_seconds", "Time since the last accepted report.",
        lambda e: e.session.seconds_since_last_report if e.session.last_report else None,
        unit="seconds",
    ),
    MetricFamily(
        _GAUGE, "speculation_contact_age_seconds",
        "Time since the last message of the engine (0 while one of its streams is open).",
        lambda e: e.session.seconds_since_contact, unit="seconds",
    ),
)  # fmt: skip
