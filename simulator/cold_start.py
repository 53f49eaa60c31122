"""The first steps of an engine without a profile, on a device that is in no cost table.

    rate = sum(B (1 + E[accepted | arm])) / sum(C(arm, B))      over the steps that ran

Expected tokens over true costs measure the choices without the noise of the draws.  The controller
sees what it would see of a real engine: drawn acceptance and noisy step times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.step_report import StepFlags
from controller.util.text import TextColumn, TextTable, number_columns
from simulator import published
from simulator.controller_policy import ControllerPolicy
from simulator.curves import IndependentCurves
from simulator.policy import StepRecord
from simulator.process_pool import run_in_parallel
from simulator.surface import CostSurface

# Conditional acceptance of four kinds of traffic by position; the last value is repeated.
TRAFFIC_CURVES: Mapping[str, tuple[float, ...]] = {
    "json": (0.92, 0.93, 0.93, 0.92),
    "code": (0.72, 0.68, 0.66, 0.66),
    "prose": (0.52, 0.45, 0.42, 0.40),
    "garbled": (0.10, 0.10, 0.10, 0.10),
}

# Steps in which the controller may lose no more than 2 % to plain decoding.
CAUTIOUS_STEPS = 200
# Its choices are compared with the best arm in this many steps from this step on.
SETTLED_FROM, SETTLED_STEPS = 400, 100
# Speculation that gains less than this may be missed.
WORTHWHILE_GAIN = 1.1
# Bars: of plain decoding, and of the best arm where speculation is worthwhile.
OFF_BAR, SETTLED_BAR = 0.98, 0.95
# No drafter of the published surfaces drafts more in a step.
_DEPTH = 16
_STEP_NOISE = 0.03
_LAG_STEPS = 1


@dataclass(frozen=True, slots=True)
class ColdStartCase:
    """One engine at one batch size.  conditional: a_1, a_2, ...; the last value is repeated."""

    surface: CostSurface
    traffic: str
    conditional: tuple[float, ...]
    batch_size: int

    @property
    def name(self) -> str:
        """Returns the name of the case in tables and tests."""
        return f"{self.surface.name}/{self.traffic}/B={self.batch_size}"


@dataclass(frozen=True, slots=True)
class ColdStartRun:
    """Holds the result of one seed.

    ratio_to_off: rate over that of gamma = 0, in the first CAUTIOUS_STEPS steps.  settled_ratio:
    rate over that of the best arm, in the SETTLED_STEPS steps from SETTLED_FROM on.  gain: the best
    arm's rate over that of gamma = 0.  gammas: what ran, step by step.
    """

    case: ColdStartCase
    seed: int
    ratio_to_off: float
    settled_ratio: float
    gain: float
    gammas: tuple[int, ...]


def cold_start_cases(batch_sizes: Sequence[int] = (1, 2, 8, 32, 64, 128)) -> list[ColdStartCase]:
    """Returns a case for each published surface, kind of traffic and batch size; one drafter."""
    cases = []
    for name in published.surface_names():
        surface = published.published_surface(name)
        surface = surface.with_drafters(surface.drafters[0].name)
        cases += [
            ColdStartCase(surface, traffic, curve, size)
            for traffic, curve in TRAFFIC_CURVES.items()
            for size in batch_sizes
            if size <= surface.max_batch_size
        ]
    return cases


def run_cold_start(
    case: ColdStartCase, seed: int, steps: int = SETTLED_FROM + SETTLED_STEPS
) -> ColdStartRun:
    """Steers `steps` steps of a constant batch at the surface's own context."""
    surface, size = case.surface, case.batch_size
    policy = ControllerPolicy(surface, None, surface.max_batch_size)
    rng = np.random.default_rng([seed, size])
    curve = [*case.conditional, *[case.conditional[-1]] * _DEPTH][:_DEPTH]
    chains = IndependentCurves("", {"": curve})
    kv_tokens = round(size * surface.kv_reference)
    now, missed_tokens, last_arm = 0.0, 0.0, -1
    arms, seconds, pending_records = [], [], []
    for step in range(1, steps + 1):
        choice = policy.choose(size, now)
        gamma = surface.arms[choice.arm].gamma
        accepted = np.minimum(chains.draw("", rng, size), gamma)
        counts = np.bincount(accepted, minlength=gamma + 1).tolist()
        true_seconds = float(surface.seconds[choice.arm, size])
        if gamma:
            true_seconds += surface.catch_up_seconds(min(missed_tokens, kv_tokens))
        missed_tokens = missed_tokens + size if gamma == 0 and choice.asleep else 0.0
        step_seconds = true_seconds * float(rng.lognormal(0.0, _STEP_NOISE))
        now += step_seconds
        arms.append(choice.arm)
        seconds.append(true_seconds)
        pending_records.append(
            StepRecord(
                step, size, kv_tokens, choice.arm, counts, step_seconds,
                StepFlags(switched=last_arm not in (-1, choice.arm)), choice.probe_id,
            )
        )  # fmt: skip
        last_arm = choice.arm
        if len(pending_records) > _LAG_STEPS:
            policy.observe(pending_records.pop(0), now)
    return _make_run(case, seed, np.array(arms), np.array(seconds), np.cumsum(np.cumprod(curve)))


def _make_run(
    case: ColdStartCase,
    seed: int,
    arms: NDArray[np.int64],
    seconds: NDArray[np.float64],
    expected: NDArray[np.float64],
) -> ColdStartRun:
    gammas = np.array([arm.gamma for arm in case.surface.arms])
    tokens = case.batch_size * (1 + np.concatenate(([0.0], expected))[gammas])
    rates = tokens / case.surface.seconds[:, case.batch_size]
    off_rate, best_rate = float(rates[gammas == 0].max()), float(rates.max())

    def rate(first: int, end: int) -> float:
        return float(tokens[arms[first:end]].sum() / seconds[first:end].sum())

    return ColdStartRun(
        case,
        seed,
        rate(0, CAUTIOUS_STEPS) / off_rate,
        rate(SETTLED_FROM, SETTLED_FROM + SETTLED_STEPS) / best_rate,
        best_rate / off_rate,
        tuple(gammas[arms].tolist()),
    )


def run_cold_starts(
    cases: Sequence[ColdStartCase], seeds: Sequence[int], processes: int | None = None
) -> list[ColdStartRun]:
    """Runs every cell on every seed, in this order, side by side on all processors."""
    tasks = [(case, seed) for case in cases for seed in seeds]
    runs = dict(run_in_parallel(run_cold_start, tasks, processes))
    return [runs[i] for i in range(len(tasks))]


def cold_start_table(runs: Sequence[ColdStartRun]) -> TextTable:
    """Makes one row for each case, the worst of its seeds; missed bars are marked with "!"."""
    columns = [
        TextColumn("engine / traffic / batch size"),
        *number_columns(
            [
                "best arm over off",
                f"over off, first {CAUTIOUS_STEPS} steps",
                f"of the best arm, from step {SETTLED_FROM}",
            ],
            {"best arm over off": 1},
        ),
    ]
    rows = []
    for name in dict.fromkeys(run.case.name for run in runs):
        case_runs = [run for run in runs if run.case.name == name]
        off, settled = (
            min(run.ratio_to_off for run in case_runs),
            min(run.settled_ratio for run in case_runs),
        )
        is_worthwhile = case_runs[0].gain >= WORTHWHILE_GAIN
        rows.append((
            name,
            f"{case_runs[0].gain:.2f}",
            _mark_missed(off, off < OFF_BAR),
            _mark_missed(settled, is_worthwhile and settled < SETTLED_BAR),
        ))  # fmt: skip
    return TextTable("The first steps without a profile", columns, rows)


def cold_start_text(runs: Sequence[ColdStartRun]) -> str:
    """Describes how many runs miss each bar, and the worst of them."""
    below_off_bar = sum(run.ratio_to_off < OFF_BAR for run in runs)
    worthwhile_runs = [run for run in runs if run.gain >= WORTHWHILE_GAIN]
    below_settled_bar = sum(run.settled_ratio < SETTLED_BAR for run in worthwhile_runs)
    return (
        f"Below {OFF_BAR} of off: {below_off_bar} of {len(runs)} runs, the worst "
        f"{min(run.ratio_to_off for run in runs):.3f}. Below {SETTLED_BAR} of the best arm where "
        "it "
        f"gains {WORTHWHILE_GAIN - 1:.0%} or more: {below_settled_bar} of {len(worthwhile_runs)} "
        "runs, the worst "
        f"{min((run.settled_ratio for run in worthwhile_runs), default=1.0):.3f}."
    )


def _mark_missed(value: float, missed: bool) -> str:
    return f"{value:.3f} !" if missed else f"{value:.3f}"
