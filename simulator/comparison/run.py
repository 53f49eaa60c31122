"""Runs all scenarios: every static arm, the oracle, every peer and the controller, seed by seed.

The oracle is the best run of all policies that know the true values and of all static arms.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from controller.core.settings import PlannerSettings
from simulator.comparison import contestants
from simulator.comparison.oracle import by_request_candidates, oracle_candidates
from simulator.comparison.truth import Truth
from simulator.controller_policy import ControllerPolicy
from simulator.engine import RunResult, Trace, simulate
from simulator.errors import InvalidInputError
from simulator.peers.sglang_adaptive import PeerUnavailableError
from simulator.policy import Policy
from simulator.process_pool import run_side_by_side
from simulator.results import Latency, PolicyOrigin, Timeline, spread
from simulator.scenarios.scenario_file import Scenario
from simulator.surface import MINIMAL_SHARE, CostSurface
from simulator.workload import ClosedLoop

_POINTS = 200
# 64 bits: enough to make collisions among a few thousand runs negligible.
_DIGEST_DIGITS = 16


# A policy has recovered when the mean over this many steps reaches this share of the best arm.
_RECOVERED_STEPS = 10
_RECOVERED_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy on one seed.

    score: the value by which policies are compared, see `RunResult.score`.  recovery: steps after
    each sudden change, in order.  latency: in an open loop.  decisions: a digest of the steps;
    equal digests mean equal decisions.
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
        """Returns tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class SeedRun:
    """All policies of one scenario on one seed; `missing`: peers that could not run -> reason."""

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

    fixed = {
        name: play(name, factory())
        for name, factory in contestants.statics(surface, truth.rules).items()
    }
    static_runs = {name: result for name, (_, result) in fixed.items()}
    best = max(static_runs, key=lambda name: static_runs[name].score)
    runs = [run for run, _ in fixed.values()]
    knowing = oracle_candidates(scenario, workload, truth, static_runs)
    oracle, oracle_result = max(
        (fixed[best], *(play(name, factory()) for name, factory in knowing.items())),
        key=lambda pair: pair[0].score,
    )
    runs.append(replace(oracle, name=contestants.ORACLE, origin=PolicyOrigin.HINDSIGHT))
    if following := by_request_candidates(scenario, truth):
        found = [play(name, factory())[0] for name, factory in following.items()]
        best_one = max((oracle, *found), key=lambda run: run.score)
        runs.append(replace(best_one, name=contestants.BY_REQUEST, origin=PolicyOrigin.HINDSIGHT))
    missing: dict[str, str] = {}
    for name, factory in contestants.peers(scenario, static_runs).items():
        if wanted is None or name in wanted:
            try:
                runs.append(play(name, factory())[0])
            except PeerUnavailableError as error:
                missing[name] = str(error)
    picture = None
    if wanted is None or contestants.OURS in wanted:
        run, result = play(contestants.OURS, contestants.controller(scenario, settings))
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
    """Hashes the arm, the batch and the tokens of every step: integers only, no times."""
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
    """Runs every scenario on its seeds (seed, seed + 1, ...), in parallel on all processors.

    Raises InvalidInputError if a wanted policy exists in no scenario.
    """
    if wanted is not None:
        known = {name for scenario in scenarios for name in contestants.policy_names(scenario)}
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
    work = partial(run_seed, wanted=wanted, settings=settings)
    seeded = [(scenarios[i], task_seed) for i, task_seed in tasks]
    for task, run in run_side_by_side(work, seeded, workers):
        keep(tasks[task][0], run)
    for seeds in found:
        seeds.sort(key=lambda run: run.seed)
    return found


def _timeline(surface: CostSurface, ours: RunResult, oracle: RunResult) -> Timeline:
    """Divides both runs into about `_POINTS` intervals of equal numbers of steps."""
    seconds, gamma, rate, batch_size = _coarse(surface, ours)
    return Timeline(seconds, batch_size, gamma, rate, *_coarse(surface, oracle)[:3])


def _coarse(surface: CostSurface, run: RunResult) -> tuple[tuple[float, ...], ...]:
    """Returns per interval its end in seconds, and the means of gamma, tokens/s and batch size."""
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


def recovery_steps(workload: ClosedLoop, truth: Truth, run: RunResult) -> list[float]:
    """Counts the steps after every sudden change until the run's arms match the best one again.

    They match when the mean true value over `_RECOVERED_STEPS` steps reaches `_RECOVERED_SHARE` of
    the best arm's at the same batch and context.  A phase without recovery counts with all its
    steps.  Gradual changes (not `at_once`, another pool) are not counted.
    """
    trace = run.trace
    starts = [*trace.phase_starts, (len(trace.arms), -1)]
    found = []
    for (_, before), (first, phase), (end, _) in zip(starts, starts[1:], starts[2:], strict=False):
        now, then = workload.phases[phase], workload.phases[before]
        if not now.at_once and now.pool is not then.pool:
            continue
        quality = _quality(truth.of(now.pool).expected, truth.surface, run, first, end)
        window = np.convolve(quality, np.ones(_RECOVERED_STEPS) / _RECOVERED_STEPS, "valid")
        good = np.flatnonzero(window >= _RECOVERED_SHARE)
        found.append(float(good[0]) if len(good) else float(end - first))
    return found


def _quality(
    expected: NDArray[np.float64], surface: CostSurface, run: RunResult, first: int, end: int
) -> NDArray[np.float64]:
    """Returns [steps] true value of the arm that ran over the best arm's, at the batch and kv."""
    trace = run.trace
    arms = np.array(trace.arms[first:end])
    batch = np.array(trace.batch_sizes[first:end])
    kv = np.array(trace.kv_tokens[first:end])
    plain = surface.seconds[:, np.minimum(batch, surface.max_batch_size)]
    context = surface.kv_seconds[:, None] * (kv - batch * surface.kv_reference)
    rates = (1 + expected)[:, None] / np.maximum(plain + context, MINIMAL_SHARE * plain)
    quality: NDArray[np.float64] = rates[arms, np.arange(len(arms))] / rates.max(axis=0)
    return quality
