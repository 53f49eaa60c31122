"""Puts into words what `controller engines` and every level of `controller explain` show."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculation.v1 import engine_pb2, plan_pb2, service_pb2


def counted(number: int, one: str, several: str) -> str:
    """Writes a number with its noun."""
    return f"{number} {one if number == 1 else several}"


def lost_text(lost: "Iterable[engine_pb2.LostCapability]") -> str:
    """A line for everything that the engine can no longer do."""
    from controller.wire import engines

    return "".join(f"{engines.lost_text(loss)}\n" for loss in lost)


def warnings_text(warnings: "Iterable[service_pb2.EngineWarning]") -> str:
    """A line for everything that an engine's reports show to be wrong with it."""
    return "".join(f"warning: {it.found}; {it.advice}\n" for it in warnings)


def health_text(services: "Iterable[service_pb2.ServiceHealth]") -> str:
    """The services that are NOT_SERVING, and why."""
    return "".join(
        f"{it.service or 'the sidecar'} is NOT_SERVING: {it.detail}\n"
        for it in services
        if not it.serving
    )


def row_for(plan: "plan_pb2.Plan", batch_size: int) -> "plan_pb2.PlanRow":
    """Returns the row of a plan that is for this batch size; an empty one if it has none."""
    from speculation.v1 import plan_pb2

    fitting = (row for row in plan.rows if batch_size <= row.max_batch_size)
    return next(fitting, plan.rows[-1] if plan.rows else plan_pb2.PlanRow())
