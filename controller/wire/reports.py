"""Converts reports of decode steps between protobuf and the core's types, both ways."""

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
from speculation.v1 import engine_pb2


def report_from_proto(message: engine_pb2.StepReport) -> StepReport:
    """Raises InvalidReportError for what cannot be true."""
    _bound_report(message)
    flags = NO_FLAGS
    if message.HasField("flags"):
        said = message.flags
        flags = StepFlags(
            said.after_gap, said.eager_fallback, said.first_use, said.unsteered, said.switched,
            said.updating, said.drafter_reset, said.mixed_choice,
        )  # fmt: skip
    return StepReport(
        message.step,
        message.batch_size,
        message.kv_tokens,
        message.drafter,
        message.gamma,
        tuple(message.accepted_counts),
        message.step_seconds,
        flags,
        message.plan_epoch,
        message.probe_id,
        tuple(
            ClassCounts(part.label, tuple(part.accepted_counts), tuple(part.censored_counts))
            for part in message.classes
        ),
        tuple(message.confidences),
        message.update_seconds,
        message.draft_version,
        tuple(
            RowGroup(group.drafter, group.gamma, tuple(group.accepted_counts), group.ended)
            for group in message.groups
        ),
        tuple(
            ProposalCounts(
                part.drafter,
                part.match_length,
                tuple(part.accepted_counts),
                tuple(part.censored_counts),
            )
            for part in message.proposals
        ),
        message.prefill_tokens,
        message.learnt_from if message.HasField("learnt_from") else None,
        message.delivered_tokens if message.HasField("delivered_tokens") else None,
        message.waiting_prompt_tokens if message.HasField("waiting_prompt_tokens") else None,
    )


def _bound_report(message: engine_pb2.StepReport) -> None:
    """Refuses lists without end by their length, before any of them is copied."""
    counts, classes = len(message.accepted_counts), message.classes
    if counts > MAX_GAMMA + 1 or len(message.confidences) > MAX_GAMMA:
        raise InvalidReportError(
            f"step {message.step}: {counts} accepted_counts and {len(message.confidences)} "
            f"confidences, at most {MAX_GAMMA + 1} and {MAX_GAMMA} are possible",
            field_path="accepted_counts",
        )
    if classes and (
        len(classes) > MAX_REPORT_CLASSES
        or any(
            len(part.accepted_counts) > MAX_GAMMA + 1 or len(part.censored_counts) > MAX_GAMMA
            for part in classes
        )
    ):
        raise InvalidReportError(
            f"step {message.step}: {len(classes)} classes, at most {MAX_REPORT_CLASSES} with "
            f"{MAX_GAMMA + 1} counts each are possible",
            field_path="classes",
        )
    groups, proposals = message.groups, message.proposals
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
    """The report as it came; flags are absent when none is set."""
    message = engine_pb2.StepReport(
        step=report.step,
        batch_size=report.batch_size,
        kv_tokens=report.kv_tokens,
        drafter=report.drafter,
        gamma=report.gamma,
        accepted_counts=report.accepted_counts,
        step_seconds=report.step_seconds,
        plan_epoch=report.plan_epoch,
        probe_id=report.probe_id,
        classes=[
            engine_pb2.ClassCounts(
                label=part.label,
                accepted_counts=part.accepted_counts,
                censored_counts=part.censored_counts,
            )
            for part in report.classes
        ],
        confidences=report.confidences,
        update_seconds=report.update_seconds,
        draft_version=report.draft_version,
        groups=[
            engine_pb2.RowGroup(
                drafter=group.drafter,
                gamma=group.gamma,
                accepted_counts=group.accepted_counts,
                ended=group.ended,
            )
            for group in report.groups
        ],
        proposals=[
            engine_pb2.ProposalCounts(
                drafter=part.drafter,
                match_length=part.match_length,
                accepted_counts=part.accepted_counts,
                censored_counts=part.censored_counts,
            )
            for part in report.proposals
        ],
        prefill_tokens=report.prefill_tokens,
        learnt_from=report.learnt_from,
        delivered_tokens=report.delivered_tokens,
        waiting_prompt_tokens=report.waiting_prompt_tokens,
    )
    flags = report.flags
    if flags != NO_FLAGS:
        message.flags.CopyFrom(
            engine_pb2.StepFlags(
                after_gap=flags.after_gap,
                eager_fallback=flags.eager_fallback,
                first_use=flags.first_use,
                unsteered=flags.unsteered,
                switched=flags.switched,
                updating=flags.updating,
                drafter_reset=flags.drafter_reset,
                mixed_choice=flags.mixed_choice,
            )
        )
    return message
