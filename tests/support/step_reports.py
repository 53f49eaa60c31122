"""Step reports of engines whose steps are made up, and what is in those that were sent."""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.messages import REPORT, ArrivedPlan, encode_plan, table_digest
from engine_shim.link.plan_follower import Source, StepChoice
from speculation.v1.engine_pb2 import (
    ClassCounts,
    ProposalCounts,
    RowGroup,
    StepFlags,
    StepReport,
)
from speculation.v1.plan_pb2 import Plan


def step_report(
    step: int, counts: Sequence[int] = (1, 1, 1, 1), choice: StepChoice | None = None, **fields: Any
) -> StepReport:
    """A step whose rows accepted `counts` drafts.  choice: that it ran.  fields: of the report."""
    defaults: dict[str, Any] = {
        "step": step,
        "batch_size": sum(counts),
        "kv_tokens": 100 * sum(counts),
        "drafter": "eagle3",
        "gamma": len(counts) - 1,
        "accepted_counts": counts,
        "step_seconds": 0.01,
    }
    report = StepReport(**(defaults | fields))
    if choice is not None:
        report.plan_epoch, report.plan_session = choice.epoch, choice.session
        report.probe_id = choice.probe_id
        if choice.source is not Source.PLAN:
            report.flags.unsteered = True
    return report


def send(link: EngineLink, report: StepReport) -> bool:
    """Sends a report that is made already."""
    return link.report(lambda empty: empty.CopyFrom(report))


def fill_report(fill: Callable[[StepReport], None]) -> StepReport:
    """What a link would send."""
    report = StepReport()
    fill(report)
    return report


def read_report(packet: bytes) -> StepReport:
    """The report in a packet of the engine."""
    assert packet[:1] == REPORT
    return StepReport.FromString(packet[1:])


def send_plan(agent: socket.socket, plan: Plan, age_seconds: float = 0.0) -> None:
    """Sends a plan to the engine, as its agent does."""
    arrival_ns = time.monotonic_ns() - round(age_seconds * 1e9)
    agent.send(encode_plan(ArrivedPlan(plan, arrival_ns, table_digest(plan))))


def flags_of(report: StepReport) -> set[str]:
    """Names of the flags that are set."""
    return {field.name for field, value in report.flags.ListFields() if value}


ALL_FLAGS = frozenset(field.name for field in StepFlags.DESCRIPTOR.fields)


def group(drafter: str, counts: Sequence[int], *, ended: bool = False) -> RowGroup:
    """Rows of a report that were drafted alike."""
    return RowGroup(drafter=drafter, gamma=len(counts) - 1, accepted_counts=counts, ended=ended)


def proposals(
    drafter: str, accepted: Sequence[int], censored: Sequence[int] = (), match_length: int = 0
) -> ProposalCounts:
    """What proposals would have given."""
    return ProposalCounts(
        drafter=drafter,
        match_length=match_length,
        accepted_counts=accepted,
        censored_counts=censored,
    )


def class_counts(label: str, accepted: Sequence[int], censored: Sequence[int] = ()) -> ClassCounts:
    """A class's part of a report."""
    return ClassCounts(label=label, accepted_counts=accepted, censored_counts=censored)
