"""Runs all scenarios: every static arm, the oracle, every peer and the controller, seed by seed.

The oracle is made from the static runs: per segment of the workload the arm that was best there,
run as one schedule; where that is slower than the best single arm, that arm is the oracle.
"""

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

import numpy as np

from controller.core.settings import PlannerSettings
from controller.simulation.comparison.hindsight import (
    SegmentSchedule,
    best_by_segment,
    recovery_steps,
)
from controller.simulation.controller_policy import ControllerPolicy
from controller.simulation.engine import RunResult, simulate
from controller.simulation.errors import InvalidInputError
from controller.simulation.peers import standard_peers
from controller.simulation.peers.sglang_adaptive import PeerUnavailableError
from controller.simulation.peers.static import Static
from controller.simulation.peers.vllm_schedule import best_table
from controller.simulation.policy import Policy
from controller.simulation.results import PolicyOrigin, Timeline
from controller.simulation.scenario import Scenario
from controller.simulation.surface import CostSurface
from controller.simulation.workload import ClosedLoop, Workload

OURS = "controller"
ORACLE = "oracle"
OFF = "off"
_POINTS = 200


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy on one seed.  recovery: steps after each sudden change, in order."""

    name: str
    origin: PolicyOrigin
    tokens: float
    seconds: float
    steps: int
    switches: int
    recovery: tuple[float, ...]
    probe_share: float
    sequence_seconds: float
    decision_seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class SeedRun:
    """All policies of one scenario on one seed; `missing`: peers that could not run, and why."""

    seed: int
    runs: tuple[PolicyRun, ...]
    best_static: str
    missing: dict[str, str] = field(default_factory=dict)
    timeline: Timeline | None = None

    def run(self, name: str) -> PolicyRun:
        """Returns the run of that name.  Raises KeyError."""
        return {run.name: run for run in self.runs}[name]


def static_names(surface: CostSurface) -> dict[str, int]:
    """Name -> arm index of every static arm; plain decoding once, whoever would not draft."""
    several = len(surface.drafters) > 1
    names: dict[str, int] = {}
    for i, arm in enumerate(surface.arms):
        if arm.gamma == 0:
            names.setdefault(OFF, i)
        else:
            names[f"static-{arm.drafter}-{arm.gamma}" if several else f"static-{arm.gamma}"] = i
    return names


def policy_names(scenario: Scenario) -> list[str]:
    """Lists everything that `wanted` may name."""
    peers = standard_peers(scenario.surface.arms, scenario.profile, ((1, 1, 0),))
    return [OURS, ORACLE, *static_names(scenario.surface), *peers]


def run_seed(
    scenario: Scenario,
    seed: int,
    wanted: Collection[str] | None = None,
    settings: PlannerSettings | None = None,
) -> SeedRun:
    """Runs all policies (or the wanted ones; static arms and the oracle are always run)."""
    surface, options = scenario.surface, scenario.options
    workload = scenario.workload(seed)
    runs: list[PolicyRun] = []

    def run(name: str, policy: Policy) -> RunResult:
        result = simulate(workload, surface, policy, options, seed)
        runs.append(_summary(name, policy, result, workload, surface))
        return result

    statics = static_names(surface)
    static_runs = {name: run(name, Static(surface.arms, arm)) for name, arm in statics.items()}
    best = max(static_runs, key=lambda name: static_runs[name].rate)
    schedule = [list(statics.values())[i] for i in best_by_segment(list(static_runs.values()))]
    oracle = static_runs[best]
    if (
        len(set(schedule)) > 1
        and (found := run(ORACLE, SegmentSchedule(schedule))).rate >= oracle.rate
    ):
        oracle = found
    else:
        runs = [one for one in runs if one.name != ORACLE]
        as_oracle = next(one for one in runs if one.name == best)
        runs.append(replace(as_oracle, name=ORACLE, origin=PolicyOrigin.HINDSIGHT))
    # Every arm at gamma = 0 is the one static arm OFF.
    name_of = {arm: name for name, arm in statics.items()}
    by_arm = [static_runs[name_of.get(i, OFF)] for i in range(len(surface.arms))]
    table = best_table([result.octaves for result in by_arm])
    missing: dict[str, str] = {}
    for name, factory in standard_peers(surface.arms, scenario.profile, table).items():
        if wanted is None or name in wanted:
            try:
                run(name, factory())
            except PeerUnavailableError as error:
                missing[name] = str(error)
    picture = None
    if wanted is None or OURS in wanted:
        ours = ControllerPolicy(surface, scenario.profile, scenario.max_batch_size, settings)
        result = run(OURS, ours)
        if scenario.shifting:
            picture = _timeline(surface, result, oracle)
    return SeedRun(seed, tuple(runs), best, missing, picture)


def _summary(
    name: str, policy: Policy, result: RunResult, workload: Workload, surface: CostSurface
) -> PolicyRun:
    recovery = recovery_steps(workload, surface, result) if isinstance(workload, ClosedLoop) else []
    return PolicyRun(
        name,
        getattr(policy, "origin", PolicyOrigin.RESTATED),
        result.tokens,
        result.seconds,
        result.steps,
        result.switches,
        tuple(recovery),
        policy.controller.explorer.probe_share if isinstance(policy, ControllerPolicy) else 0.0,
        result.sequence_seconds,
        result.decision_seconds,
    )


def run_all(
    scenarios: Sequence[Scenario],
    seed: int,
    wanted: Collection[str] | None = None,
    settings: PlannerSettings | None = None,
    processes: int | None = None,
    on_done: Callable[[Scenario], None] | None = None,
) -> list[list[SeedRun]]:
    """Runs every scenario on its seeds (seed, seed + 1, ...), side by side on all processors.

    Raises InvalidInputError if a wanted policy exists in no scenario.
    """
    if wanted is not None:
        known = {name for scenario in scenarios for name in policy_names(scenario)}
        for name in wanted:
            if name not in known:
                raise InvalidInputError(
                    "--policy", 0, f"{name!r} is unknown; there are {', '.join(sorted(known))}"
                )
    found: list[list[SeedRun]] = [[] for _ in scenarios]
    tasks = [(i, seed + k) for i, s in enumerate(scenarios) for k in range(s.seeds)]

    def keep(i: int, run: SeedRun) -> None:
        found[i].append(run)
        if on_done is not None:
            on_done(scenarios[i])

    workers = processes or len(os.sched_getaffinity(0))
    if workers == 1 or len(tasks) == 1:
        for i, task_seed in tasks:
            keep(i, run_seed(scenarios[i], task_seed, wanted, settings))
        return found
    with ProcessPoolExecutor(workers) as pool:
        waiting = {
            pool.submit(run_seed, scenarios[i], task_seed, wanted, settings): i
            for i, task_seed in tasks
        }
        for future in as_completed(waiting):
            keep(waiting[future], future.result())
    for seeds in found:
        seeds.sort(key=lambda run: run.seed)
    return found


def _timeline(surface: CostSurface, ours: RunResult, oracle: RunResult) -> Timeline:
    """Divides both runs into about `_POINTS` stretches of equal numbers of steps."""
    seconds, gamma, rate, batch_size = _coarse(surface, ours)
    return Timeline(seconds, batch_size, gamma, rate, *_coarse(surface, oracle)[:3])


def _coarse(surface: CostSurface, run: RunResult) -> tuple[tuple[float, ...], ...]:
    """Returns per stretch its end in seconds, and the means of gamma, tokens/s and batch size."""
    trace = run.trace
    gammas = np.array([arm.gamma for arm in surface.arms], dtype=np.float64)[np.array(trace.arms)]
    ends, tokens = np.array(trace.ends), np.array(trace.tokens, dtype=np.float64)
    begins, batch_sizes = np.concatenate(([0.0], ends[:-1])), np.array(trace.batch_sizes)
    parts = np.array_split(np.arange(len(ends)), min(_POINTS, len(ends)))
    return (
        tuple(float(ends[p[-1]]) for p in parts),
        tuple(round(float(gammas[p].mean()), 3) for p in parts),
        tuple(
            round(float(tokens[p].sum() / max(ends[p[-1]] - begins[p[0]], 1e-12)), 1) for p in parts
        ),
        tuple(round(float(batch_sizes[p].mean()), 3) for p in parts),
    )
