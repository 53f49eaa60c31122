"""Runs all scenarios: every static arm, the oracle, every peer and the controller, seed by seed.

The oracle is the best run of all that know the truth and of all static arms.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace

import numpy as np

from controller.core.settings import PlannerSettings
from controller.simulation.comparison.contestants import (
    BY_REQUEST,
    ORACLE,
    OURS,
    by_request_candidates,
    controller,
    oracle_candidates,
    peers,
    policy_names,
    statics,
)
from controller.simulation.comparison.recovery import recovery_steps
from controller.simulation.comparison.truth import Truth
from controller.simulation.controller_policy import ControllerPolicy
from controller.simulation.engine import RunResult, Trace, simulate
from controller.simulation.errors import InvalidInputError
from controller.simulation.latency import spread
from controller.simulation.peers.sglang_adaptive import PeerUnavailableError
from controller.simulation.policy import Policy
from controller.simulation.process_pool import make_process_pool
from controller.simulation.results import Latency, PolicyOrigin, Timeline
from controller.simulation.scenario import Scenario
from controller.simulation.surface import CostSurface
from controller.simulation.workload import ClosedLoop

_POINTS = 200
# 64 bits: far more than chance equality of a few thousand runs takes.
_DIGEST_DIGITS = 16


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy on one seed.

    score: what policies are compared by, see `RunResult.score`.  recovery: steps after each sudden
    change, in order.  latency: in an open loop.  decisions: a digest of what ran, step by step,
    which is the same wherever the same was decided.
    """

    name: str
    origin: PolicyOrigin
    score: float
    tokens: float
    seconds: float
    steps: int
    switches: int
    recovery: tuple[float, ...]
    probe_share: float
    probe_steps: int
    sequence_seconds: float
    decision_seconds: float
    latency: Latency | None
    decisions: str

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


def run_seed(
    scenario: Scenario,
    seed: int,
    wanted: Collection[str] | None = None,
    settings: PlannerSettings | None = None,
) -> SeedRun:
    """Runs all policies (or the wanted ones; static arms and the oracle are always run)."""
    surface = scenario.surface
    workload = scenario.workload(seed)
    truth = Truth(workload, surface)

    def play(name: str, policy: Policy) -> tuple[PolicyRun, RunResult]:
        result = simulate(workload, surface, policy, scenario.options, seed)
        recovery = (
            recovery_steps(workload, truth, result) if isinstance(workload, ClosedLoop) else []
        )
        return _summary(name, policy, result, recovery), result

    fixed = {name: play(name, factory()) for name, factory in statics(surface, truth.rules).items()}
    static_runs = {name: result for name, (_, result) in fixed.items()}
    best = max(static_runs, key=lambda name: static_runs[name].score)
    runs = [run for run, _ in fixed.values()]
    knowing = oracle_candidates(scenario, workload, truth, static_runs)
    oracle, oracle_result = max(
        (fixed[best], *(play(name, factory()) for name, factory in knowing.items())),
        key=lambda pair: pair[0].score,
    )
    runs.append(replace(oracle, name=ORACLE, origin=PolicyOrigin.HINDSIGHT))
    if following := by_request_candidates(scenario, truth):
        found = [play(name, factory())[0] for name, factory in following.items()]
        best_one = max((oracle, *found), key=lambda run: run.score)
        runs.append(replace(best_one, name=BY_REQUEST, origin=PolicyOrigin.HINDSIGHT))
    missing: dict[str, str] = {}
    for name, factory in peers(scenario, static_runs).items():
        if wanted is None or name in wanted:
            try:
                runs.append(play(name, factory())[0])
            except PeerUnavailableError as error:
                missing[name] = str(error)
    picture = None
    if wanted is None or OURS in wanted:
        run, result = play(OURS, controller(scenario, settings))
        runs.append(run)
        if scenario.shifting:
            picture = _timeline(surface, result, oracle_result)
    return SeedRun(seed, tuple(runs), best, missing, picture)


def _summary(name: str, policy: Policy, result: RunResult, recovery: list[float]) -> PolicyRun:
    latency = None
    if result.open_loop:
        found = result.latencies
        latency = Latency(spread(found.per_token), spread(found.tpot), spread(found.end_to_end))
    return PolicyRun(
        name,
        getattr(policy, "origin", PolicyOrigin.RESTATED),
        result.score,
        result.tokens,
        result.seconds,
        result.steps,
        result.switches,
        tuple(recovery),
        policy.controller.explorer.probe_share if isinstance(policy, ControllerPolicy) else 0.0,
        result.probe_steps,
        result.sequence_seconds,
        result.decision_seconds,
        latency,
        _digest(result.trace),
    )


def _digest(trace: Trace) -> str:
    """Hashes the arm, the batch and the tokens of every step: whole numbers, and no times."""
    steps = np.array([trace.arms, trace.batch_sizes, trace.kv_tokens, trace.tokens], dtype="<i8")
    return hashlib.sha256(steps.tobytes()).hexdigest()[:_DIGEST_DIGITS]


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
    with make_process_pool(workers) as pool:
        waiting = {
            pool.submit(run_seed, scenarios[i], task_seed, wanted, settings): i
            for i, task_seed in tasks
        }
        try:
            for future in as_completed(waiting):
                keep(waiting[future], future.result())
        except BaseException:
            # Ctrl-C, or a seed that failed: what has not begun is not run any more.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
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
