"""Every fault that is injected without an engine's model."""

from tools.faults import (
    kill_faults,
    link_faults,
    redis_faults,
    sidecar_faults,
    state_faults,
    version_faults,
)
from tools.faults.fault import Fault, list_faults


def linked_faults(kills: int, damages: int, full_disks: int) -> tuple[Fault, ...]:
    """Returns the faults of a real `controller serve` and a real agent, with simulated steps."""
    return (
        *list_faults(link_faults),
        *list_faults(sidecar_faults),
        *list_faults(state_faults),
        state_faults.disk_full_at_random(full_disks),
        state_faults.database_damaged(damages),
        *list_faults(redis_faults),
        *list_faults(version_faults),
        kill_faults.killed_at_random(kills),
    )
