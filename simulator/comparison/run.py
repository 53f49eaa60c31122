"""Runs all scenarios: every static arm, the oracle, every peer and the controller, seed by seed.

The oracle is the best run of all policies that know the true values and of all static arms.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from controller.core.settings import PlannerSettings
from simulator.comparison import contestants
from simulator.comparison.oracle import (
    BEST_ARM,
    by_request_factories,
    is_repetition,
    oracle_factories,
)
from simulator.comparison.truth import Truth
from simulator.controller_policy import ControllerPolicy
from simulator.engine import RunResult, Trace, simulate
from simulator.errors import InvalidInputError
from simulator.peers.sglang_adaptive import PeerUnavailableError
from simulator.policy import Policy
from simulator.process_pool import run_in_parallel
from simulator.results import Latency, PolicyOrigin, Timeline, summarise_seconds
from simulator.scenarios.scenario_file import Scenario
from simulator.surface import MIN_COST_SHARE, CostSurface
from simulator.workload import ClosedLoop

_TIMELINE_POINTS = 200
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
    def tokens_per_second(self) -> float:
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
    selected: Collection[str] | None = None,
    settings: PlannerSettings | None = None,
) -> SeedRun:
    """Runs all policies (or the wanted ones; static arms and the oracle are always run)."""
    surface = scenario.surface
    workload = scenario.workload(seed)
    truth = Truth(workload, surface)

    def run_policy(name: str, policy: Policy) -> tuple[PolicyRun, RunResult]:
        result = simulate(workload, surface, policy, scenario.options, seed)
        recovery = (
            recovery_steps(workload, truth, result) if isinstance(workload, ClosedLoop) else []
        )
        return _make_policy_run(name, policy, result, recovery), result

    def run_candidates(
        factories: Mapping[str, contestants.Factory],
    ) -> list[tuple[PolicyRun, RunResult]]:
        """Runs the candidates but those that would repeat the run of the first one, BEST_ARM."""
        best_arm_pair = run_policy(BEST_ARM, factories[BEST_ARM]())
        return [
            best_arm_pair,
            *(
                run_policy(name, factory())
                for name, factory in factories.items()
                if name != BEST_ARM
                and not is_repetition(name, surface, scenario.options, best_arm_pair[1])
            ),
        ]

    static_results = {
        name: run_policy(name, factory())
        for name, factory in contestants.static_factories(surface, truth.rules).items()
    }
    static_runs = {name: result for name, (_, result) in static_results.items()}
    best = max(static_runs, key=lambda name: static_runs[name].score)
    runs = [run for run, _ in static_results.values()]
    oracle_candidates = oracle_factories(scenario, workload, truth, static_runs)
    oracle, oracle_result = max(
        (static_results[best], *run_candidates(oracle_candidates)), key=lambda pair: pair[0].score
    )
    runs.append(replace(oracle, name=contestants.ORACLE, origin=PolicyOrigin.HINDSIGHT))
    if by_request_candidates := by_request_factories(scenario, truth):
        by_request_runs = [run for run, _ in run_candidates(by_request_candidates)]
        best_by_request = max((oracle, *by_request_runs), key=lambda run: run.score)
        runs.append(
            replace(best_by_request, name=contestants.BY_REQUEST, origin=PolicyOrigin.HINDSIGHT)
        )
    missing: dict[str, str] = {}
    for name, factory in contestants.peer_factories(scenario, static_runs).items():
        if selected is None or name in selected:
            try:
                runs.append(run_policy(name, factory())[0])
            except PeerUnavailableError as error:
                missing[name] = str(error)
    timeline = None
    if selected is None or contestants.OURS in selected:
        run, result = run_policy(contestants.OURS, contestants.make_controller(scenario, settings))
        runs.append(run)
        if scenario.shifting:
            timeline = _timeline(surface, result, oracle_result)
    return SeedRun(seed, tuple(runs), best, missing, timeline)


def _make_policy_run(
    name: str, policy: Policy, result: RunResult, recovery: list[float]
) -> PolicyRun:
    latency = None
    if result.open_loop:
        latencies = result.latencies
        latency = Latency(
            summarise_seconds(latencies.per_token),
            summarise_seconds(latencies.tpot),
            summarise_seconds(latencies.end_to_end),
        )
    return PolicyRun(
        name,
        getattr(policy, "origin", PolicyOrigin.RESTATED),
        result.score,
        result.tokens,
        result.seconds,
        result.steps,
        result.switches,
        tuple(recovery),
        policy.controller.explorer.spent_share if isinstance(policy, ControllerPolicy) else 0.0,
        result.probe_steps,
        result.sequence_seconds,
        result.decision_seconds,
        latency,
        _decision_digest(result.trace),
    )


def _decision_digest(trace: Trace) -> str:
    """Hashes the arm, the batch and the tokens of every step: integers only, no times."""
    steps = np.array([trace.arms, trace.batch_sizes, trace.kv_tokens, trace.tokens], dtype="<i8")
    return hashlib.sha256(steps.tobytes()).hexdigest()[:_DIGEST_DIGITS]


def run_all(
    scenarios: Sequence[Scenario],
    seed: int,
    selected: Collection[str] | None = None,
    settings: PlannerSettings | None = None,
    processes: int | None = None,
    on_done: Callable[[Scenario], None] | None = None,
) -> list[list[SeedRun]]:
    """Runs every scenario on its seeds (seed, seed + 1, ...), in parallel on all processors.

    Raises InvalidInputError if a wanted policy exists in no scenario.
    """
    if selected is not None:
        known_names = {
            name for scenario in scenarios for name in contestants.policy_names(scenario)
        }
        for name in selected:
            if name not in known_names:
                raise InvalidInputError(
                    "--policy",
                    0,
                    f"{name!r} is unknown; there are {', '.join(sorted(known_names))}",
                )
    seed_runs: list[list[SeedRun]] = [[] for _ in scenarios]
    tasks = [(i, seed + k) for i, s in enumerate(scenarios) for k in range(s.seeds)]

    def add_run(i: int, run: SeedRun) -> None:
        seed_runs[i].append(run)
        if on_done is not None:
            on_done(scenarios[i])

    workers = processes or len(os.sched_getaffinity(0))
    if workers == 1 or len(tasks) == 1:
        for i, task_seed in tasks:
            add_run(i, run_seed(scenarios[i], task_seed, selected, settings))
        return seed_runs
    work = partial(run_seed, selected=selected, settings=settings)
    seeded = [(scenarios[i], task_seed) for i, task_seed in tasks]
    for task, run in run_in_parallel(work, seeded, workers):
        add_run(tasks[task][0], run)
    for seeds in seed_runs:
        seeds.sort(key=lambda run: run.seed)
    return seed_runs


def _timeline(surface: CostSurface, ours: RunResult, oracle: RunResult) -> Timeline:
    """Divides both runs into about `_TIMELINE_POINTS` intervals of equal numbers of steps."""
    seconds, gamma, rate, batch_size = _downsample(surface, ours)
    return Timeline(seconds, batch_size, gamma, rate, *_downsample(surface, oracle)[:3])


def _downsample(surface: CostSurface, run: RunResult) -> tuple[tuple[float, ...], ...]:
    """Returns per interval its end in seconds, and the means of gamma, tokens/s and batch size."""
    trace = run.trace
    gammas = np.array([arm.gamma for arm in surface.arms], dtype=np.float64)[np.array(trace.arms)]
    ends, tokens = np.array(trace.ends), np.array(trace.tokens, dtype=np.float64)
    begins, batch_sizes = np.concatenate(([0.0], ends[:-1])), np.array(trace.batch_sizes)
    parts = np.array_split(np.arange(len(ends)), min(_TIMELINE_POINTS, len(ends)))
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
    steps.  Gradual changes (not `is_sudden`, another pool) are not counted.
    """
    trace = run.trace
    starts = [*trace.phase_starts, (len(trace.arms), -1)]
    if len(starts) < 3:
        return []
    steps_to_recover = []
    arms, seconds = np.array(trace.arms), _true_seconds(truth.surface, trace)
    for (_, previous_phase), (first_step, phase), (end, _) in zip(
        starts, starts[1:], starts[2:], strict=False
    ):
        current, previous = workload.phases[phase], workload.phases[previous_phase]
        if not current.is_sudden and current.pool is not previous.pool:
            continue
        expected = truth.replay_of(current.pool).expected
        rates = (1 + expected)[:, None] / seconds[:, first_step:end]
        quality = rates[arms[first_step:end], np.arange(end - first_step)] / rates.max(axis=0)
        window = np.convolve(quality, np.ones(_RECOVERED_STEPS) / _RECOVERED_STEPS, "valid")
        recovered = np.flatnonzero(window >= _RECOVERED_SHARE)
        steps_to_recover.append(float(recovered[0]) if len(recovered) else float(end - first_step))
    return steps_to_recover


def _true_seconds(surface: CostSurface, trace: Trace) -> NDArray[np.float64]:
    """Returns [arms, steps] seconds of every arm at the batch and kv of each step."""
    batch, kv = np.array(trace.batch_sizes), np.array(trace.kv_tokens)
    plain = surface.seconds[:, batch]
    context = surface.kv_seconds[:, None] * (kv - batch * surface.kv_reference)
    seconds: NDArray[np.float64] = np.maximum(plain + context, MIN_COST_SHARE * plain)
    return seconds
