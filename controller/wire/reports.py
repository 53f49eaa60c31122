"""Converts step reports, both ways, and results of training rounds to the core's types."""

from controller.core.engine_spec import MAX_GAMMA
from controller.core.errors import InvalidReportError
from controller.core.step_report import (
    MAX_GROUPS,
    MAX_PROPOSALS,
    MAX_REPORT_CLASSES,
    NO_FLAGS,
    ClassCounts,
    ProposalCounts,
    RowGroup,
    StepFlags,
    StepReport,
)
from controller.core.training.selective_training import TrainingResult
from controller.wire.field_mapping import message_of, value_of
from speculation.v1 import engine_pb2, training_pb2

# Characters of a training round's error text.
_ERROR_CHARACTERS = 500


def report_from_proto(message: engine_pb2.StepReport) -> StepReport:
    """Converts a report.  Raises InvalidReportError for impossible numbers."""
    accepted_counts, confidences = message.accepted_counts, message.confidences
    if len(accepted_counts) > MAX_GAMMA + 1 or len(confidences) > MAX_GAMMA:
        raise InvalidReportError(
            f"step {message.step}: {len(accepted_counts)} accepted_counts and {len(confidences)} "
            f"confidences; at most {MAX_GAMMA + 1} and {MAX_GAMMA} are possible",
            field_path="accepted_counts",
        )
    flags = NO_FLAGS
    if message.HasField("flags"):
        message_flags = message.flags
        flags = StepFlags(
            message_flags.after_gap, message_flags.eager_fallback, message_flags.first_use,
            message_flags.unsteered, message_flags.switched,
            message_flags.updating, message_flags.drafter_reset, message_flags.mixed_choice,
        )  # fmt: skip
    # Most reports have none of these lists.
    classes: tuple[ClassCounts, ...] = ()
    groups: tuple[RowGroup, ...] = ()
    proposals: tuple[ProposalCounts, ...] = ()
    if message.classes or message.groups or message.proposals:
        _require_bounded_parts(message)
        classes, groups, proposals = _class_counts(message), _groups(message), _proposals(message)
    return StepReport(
        message.step,
        message.batch_size,
        message.kv_tokens,
        message.drafter,
        message.gamma,
        tuple(accepted_counts),
        message.step_seconds,
        flags,
        message.plan_epoch,
        message.probe_id,
        classes,
        tuple(confidences) if confidences else (),
        message.update_seconds,
        message.draft_version,
        groups,
        proposals,
        message.prefill_tokens,
        message.learnt_from if message.HasField("learnt_from") else None,
        message.delivered_tokens if message.HasField("delivered_tokens") else None,
        message.waiting_prompt_tokens if message.HasField("waiting_prompt_tokens") else None,
    )


def _class_counts(message: engine_pb2.StepReport) -> tuple[ClassCounts, ...]:
    return tuple(
        [
            ClassCounts(part.label, tuple(part.accepted_counts), tuple(part.censored_counts))
            for part in message.classes
        ]
    )


def _groups(message: engine_pb2.StepReport) -> tuple[RowGroup, ...]:
    return tuple(
        [
            RowGroup(group.drafter, group.gamma, tuple(group.accepted_counts), group.ended)
            for group in message.groups
        ]
    )


def _proposals(message: engine_pb2.StepReport) -> tuple[ProposalCounts, ...]:
    return tuple(
        [
            ProposalCounts(
                part.drafter,
                part.match_length,
                tuple(part.accepted_counts),
                tuple(part.censored_counts),
            )
            for part in message.proposals
        ]
    )


def _require_bounded_parts(message: engine_pb2.StepReport) -> None:
    """Raises InvalidReportError for lists that are too long, before any of them is copied."""
    classes, groups, proposals = message.classes, message.groups, message.proposals
    if len(classes) > MAX_REPORT_CLASSES or any(
        len(part.accepted_counts) > MAX_GAMMA + 1 or len(part.censored_counts) > MAX_GAMMA
        for part in classes
    ):
        raise InvalidReportError(
            f"step {message.step}: {len(classes)} classes; at most {MAX_REPORT_CLASSES} with "
            f"{MAX_GAMMA + 1} counts each are possible",
            field_path="classes",
        )
    if len(groups) > MAX_GROUPS or len(proposals) > MAX_PROPOSALS:
        raise InvalidReportError(
            f"step {message.step}: {len(groups)} groups and {len(proposals)} entries of proposals, "
            f"at most {MAX_GROUPS} and {MAX_PROPOSALS} are possible",
            field_path="groups",
        )
    if any(len(group.accepted_counts) > MAX_GAMMA + 1 for group in groups) or any(
        len(part.accepted_counts) > MAX_GAMMA + 1 or len(part.censored_counts) > MAX_GAMMA
        for part in proposals
    ):
        raise InvalidReportError(
            f"step {message.step}: a group or a proposal has more than {MAX_GAMMA + 1} counts",
            field_path="groups",
        )


def report_to_proto(report: StepReport) -> engine_pb2.StepReport:
    """Converts a report; flags are absent if none is set."""
    flags = report.flags
    return message_of(
        engine_pb2.StepReport,
        report,
        flags=None if flags == NO_FLAGS else message_of(engine_pb2.StepFlags, flags),
        classes=[message_of(engine_pb2.ClassCounts, part) for part in report.classes],
        groups=[message_of(engine_pb2.RowGroup, group) for group in report.groups],
        proposals=[message_of(engine_pb2.ProposalCounts, part) for part in report.proposals],
    )


def training_result_from_proto(message: training_pb2.TrainingRound) -> TrainingResult:
    """Converts the result of a training round.  Raises InvalidTrainingError."""
    return value_of(TrainingResult, message, error=message.error[:_ERROR_CHARACTERS])
