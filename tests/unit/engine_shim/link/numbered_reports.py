"""Reports as an agent keeps them, known by their steps."""

from speculation.v1.engine_pb2 import StepReport
from tests.support.step_reports import step_report


def report(step: int) -> bytes:
    """Of a batch of one."""
    return step_report(step, (1,)).SerializeToString()


def step_of(report: bytes) -> int:
    """The step of a report."""
    return StepReport.FromString(report).step
