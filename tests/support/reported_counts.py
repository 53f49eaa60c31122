"""What the sidecar counts of reports, to hold against an engine's own counters."""

from collections.abc import Iterable

from controller.service.sessions.counters import StepCounters
from controller.wire.reports import report_from_proto
from speculation.v1.engine_pb2 import StepReport


def count_reports(reports: Iterable[StepReport]) -> StepCounters:
    """The counters of a session in which these reports have arrived."""
    counters = StepCounters()
    previous_report = None
    for message in reports:
        report = report_from_proto(message)
        counters.add_report(report, previous_report)
        previous_report = report
    return counters


def observed_counts(reports: Iterable[StepReport], gamma: int) -> tuple[list[int], list[int]]:
    """What the steps of a draft length show: sums of accepted and of censored counts."""
    exact, censored = [0] * (gamma + 1), [0] * gamma
    for message in reports:
        if message.gamma == gamma:
            for total, counts in zip(
                (exact, censored), report_from_proto(message).drafted_counts, strict=True
            ):
                for k, count in enumerate(counts):
                    total[k] += count
    return exact, censored
