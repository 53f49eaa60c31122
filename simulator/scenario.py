"""Describes a scenario: a workload, an engine, and the costs that the controller was given."""

from collections.abc import Callable
from dataclasses import dataclass, field

from controller.core.cost.profile import Profile
from simulator.engine import EngineOptions
from simulator.surface import CostSurface
from simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class Scenario:
    """Describes what is run, with all policies, `seeds` times.

    workload: makes the workload of a seed; equal seeds make equal workloads.
    profile: what the controller (and every peer that needs costs) was told; None = nothing.
    max_batch_size: the engine's limit, which the plan's table reaches.
    shifting: the best arm changes while it runs.
    sustained_tpot_p99_seconds: bound on the 99th percentile of the time per output token, counted
    from a request's arrival, under which `comparison.sustained` searches the load that each policy
    sustains; None = no search.
    """

    name: str
    group: str
    description: str
    surface: CostSurface
    workload: Callable[[int], Workload]
    profile: Profile | None
    max_batch_size: int
    shifting: bool
    seeds: int = 2
    options: EngineOptions = field(default_factory=EngineOptions)
    sustained_tpot_p99_seconds: float | None = None
