"""Converts reports of decode steps between protobuf and the core's types, both ways."""

from controller.core.engine_spec import MAX_GAMMA
from controller.core.errors import InvalidReportError
from controller.core.step_report import (
    MAX_REPORT_CLASSES,
    NO_FLAGS,
    ClassCounts,
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
            said.updating, said.drafter_reset,
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
        tuple(ClassCounts(c.label, tuple(c.accepted_counts)) for c in message.classes),
        tuple(message.confidences),
        message.update_seconds,
        message.draft_version,
    )


def _bound_report(message: engine_pb2.StepReport) -> None:
    """Refuses lists without end by their length, before any of them is copied."""
    counts, classes = len(message.accepted_counts), message.classes
    if counts > MAX_GAMMA + 1 or len(message.confidences) > MAX_GAMMA:
        raise InvalidReportError(
            f"step {message.step}: {counts} accepted_counts and {len(message.confidences)} "
            f"confidences, at most {MAX_GAMMA + 1} and {MAX_GAMMA} are possible"
        )
    if classes and (
        len(classes) > MAX_REPORT_CLASSES
        or any(len(part.accepted_counts) > MAX_GAMMA + 1 for part in classes)
    ):
        raise InvalidReportError(
            f"step {message.step}: {len(classes)} classes, at most {MAX_REPORT_CLASSES} with "
            f"{MAX_GAMMA + 1} counts each are possible"
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
            engine_pb2.ClassCounts(label=part.label, accepted_counts=part.accepted_counts)
            for part in report.classes
        ],
        confidences=report.confidences,
        update_seconds=report.update_seconds,
        draft_version=report.draft_version,
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
            )
        )
    return message
