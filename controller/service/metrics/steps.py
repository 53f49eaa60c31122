"""Exports what an engine reports of its steps, and the state of the link to it."""

from typing import Final

from controller.service.metrics.family import Distribution, Family, MetricKind
from controller.service.views.engine_snapshot import EngineSnapshot

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
# Shown from the start, at zero, so that the first one is an increase.
_CODES = ("INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION")

STEPS: Final[tuple[Family[EngineSnapshot], ...]] = (
    Family(
        _COUNTER, "speculation_reports", "Step reports that were accepted.",
        lambda e: e.session.counters.reports,
    ),
    Family(
        _COUNTER, "speculation_step_seconds", "Wall-clock seconds of the reported steps.",
        lambda e: e.session.counters.step_seconds, unit="seconds",
    ),
    Family(
        _COUNTER, "speculation_sequence_steps",
        "Sequences that decoded, step by step, drafted for or not: the sum of all batch sizes, "
        "without speculation_ended_sequence_steps_total.",
        lambda e: e.session.counters.sequence_steps, like="sglang:spec_verify_calls_total",
    ),
    Family(
        _COUNTER, "speculation_ended_sequence_steps",
        "Sequences that a step ran although their requests had ended, or had left the batch, while "
        "it was on its way: the engine threw their tokens away, and no other counter has them.",
        lambda e: e.session.counters.ended,
    ),
    Family(
        _COUNTER, "speculation_drafts",
        "Drafts verified: one per step and sequence of which a draft token was verified.",
        lambda e: e.session.counters.drafts, like="vllm:spec_decode_num_drafts_total",
    ),
    Family(
        _COUNTER, "speculation_draft_tokens",
        "Draft tokens verified; not those that a grammar had taken away, and not up to the planned "
        "draft length where a lookup found fewer.",
        lambda e: e.session.counters.drafted_tokens,
        unit="tokens", like="vllm:spec_decode_num_draft_tokens_total",
    ),
    Family(
        _COUNTER, "speculation_accepted_tokens",
        "Draft tokens accepted (bonus tokens excluded), as verified: those behind the end of an "
        "answer are among them.",
        lambda e: e.session.counters.accepted_tokens,
        unit="tokens", like="vllm:spec_decode_num_accepted_tokens_total",
    ),
    Family(
        _COUNTER, "speculation_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft (the first is 0).",
        lambda e: {str(k): n for k, n in enumerate(e.accepted_by_position)},
        unit="tokens", label="position", like="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ),
    Family(
        _HISTOGRAM, "speculation_accepted_tokens_per_draft",
        "Draft tokens accepted of each draft (bonus tokens excluded), up to the engine's largest "
        "draft length. Its count is speculation_drafts_total, and its sum "
        "speculation_accepted_tokens_total.",
        lambda e: Distribution(e.drafts_by_length), unit="tokens",
    ),
    Family(
        _GAUGE, "speculation_acceptance_length",
        "Mean tokens gained by a draft in the last minute, bonus token included; absent if nothing "
        "was drafted.",
        lambda e: e.session.last_minute.acceptance_length,
        unit="tokens", like="sglang:spec_accept_length (without steps at gamma = 0)",
    ),
    Family(
        _GAUGE, "speculation_draft_acceptance_rate",
        "Share of the draft tokens of the last minute that was accepted; absent if nothing was "
        "drafted.",
        lambda e: e.session.last_minute.draft_acceptance_rate,
        unit="ratio", like="sglang:spec_accept_rate",
    ),
    Family(
        _GAUGE, "speculation_accepted_per_verified",
        "Share of the tokens verified in the last minute that was kept, bonus token included in "
        "both; absent if nothing was drafted.",
        lambda e: e.session.last_minute.accepted_per_verified, unit="ratio",
    ),
    Family(
        _COUNTER, "speculation_generated_tokens",
        "Tokens gained by verification: accepted draft tokens and one bonus token per sequence and "
        "step. Some lie behind the end of an answer, see speculation_delivered_tokens_total.",
        lambda e: e.session.counters.generated_tokens, unit="tokens",
    ),
    Family(
        _COUNTER, "speculation_delivered_tokens",
        "Tokens added to answers by the reported steps: without what a stop, the length or a "
        "grammar cut off, and without the first token of each answer, which comes of its prompt. "
        "Absent if the engine does not say.",
        lambda e: e.session.counters.delivered, unit="tokens",
        like="vllm:generation_tokens_total, sglang:generation_tokens_total (first tokens included)",
    ),
    Family(
        _COUNTER, "speculation_switched_steps",
        "Reported steps that changed drafter, draft length or sleep state.",
        lambda e: e.session.counters.switched,
    ),
    Family(
        _COUNTER, "speculation_drafter_changes",
        "Reported steps that ran another drafter than the one before.",
        lambda e: e.session.counters.drafter_changes,
    ),
    Family(
        _COUNTER, "speculation_eager_steps",
        "Reported steps that ran without a graph, in an engine that has graphs.",
        lambda e: e.session.counters.eager,
    ),
)  # fmt: skip

LINK: Final[tuple[Family[EngineSnapshot], ...]] = (
    Family(
        _GAUGE, "speculation_steering", "1 while the engine's stream is open.",
        lambda e: e.session.stream is not None and e.session.listeners > 0,
    ),
    Family(
        _GAUGE, "speculation_fallback",
        "1 if the last reported step of the engine ran without a valid lease (in the grace period "
        "or with the safe default).",
        lambda e: bool(e.session.counters.alone),
    ),
    Family(
        _COUNTER, "speculation_unsteered_steps", "Reported steps without a valid lease.",
        lambda e: e.session.counters.unsteered,
    ),
    Family(
        _COUNTER, "speculation_lease_losses",
        "Times that a lease of the engine expired, by its reports.",
        lambda e: e.session.counters.lease_losses,
    ),
    Family(
        _COUNTER, "speculation_dropped_reports",
        "Step reports that the shim dropped because its socket or buffer was full, or that a "
        "sidecar had not acknowledged when it was killed.",
        lambda e: e.session.counters.dropped,
    ),
    Family(
        _COUNTER, "speculation_messages",
        "Messages with reports. A sidecar that is behind gets fewer of them, with more reports in "
        "each.",
        lambda e: e.session.counters.messages,
    ),
    Family(
        _COUNTER, "speculation_rejected_reports", "Step reports that were refused, by status code.",
        lambda e: dict.fromkeys(_CODES, 0) | e.session.counters.rejected, label="code",
    ),
    Family(
        _GAUGE, "speculation_report_age_seconds", "Time since the last accepted report.",
        lambda e: e.session.seconds_since_last_report if e.session.last_report else None,
        unit="seconds",
    ),
    Family(
        _GAUGE, "speculation_contact_age_seconds",
        "Time since the last message of the engine (0 while one of its streams is open).",
        lambda e: e.session.seconds_since_contact, unit="seconds",
    ),
)  # fmt: skip
