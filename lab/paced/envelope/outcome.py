"""Chooses what is run at each concurrency, and holds what the runs gave, in the model's time.

The best draft length of each drafter, the dilation and the requests follow from the imposed table.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import OWN, SECOND, StepCosts
from lab.cpu_engine.pace.step_log import LoggedStep
from lab.harness.errors import HarnessError
from lab.harness.load_generator import StreamPhase
from lab.paced.plays import LATE_SHARE_MAX
from lab.paced.traffic import Stream, make_request
from simulator import published_qwen

OFF, MTP, DFLASH, STEERED = "off", "mtp", "dflash", "steered"
STATIC = (OFF, MTP, DFLASH)
# The first steps of a full batch: a pinned arm takes a few to arrive.
_SETTLING_STEPS = 8
_MIN_STEPS = 20
_HEADROOM = 1.2
TABLE = "b200-qwen3.6-35b-a3b"
# Every best draft length that was published for up to 128 sequences is among them.
GAMMAS = (0, 1, 2, 3, 5, 8, 15)
CONCURRENCIES = tuple(b for b in published_qwen.CONCURRENCIES if b <= 128)
# The published drafters, by their names in the engine.
PUBLISHED_NAME: Mapping[str, str] = {OWN: "mtp", SECOND: "dflash"}
PLAIN = Arm(OWN, 0)
_CLASS = "published"
SEED = 2024
_VOCABULARY = range(16, 120)
# A step of this many sequences takes the machine twice as long as a step of one.
_WORK_DOUBLING_BATCH = 50.0
_MIN_DILATION = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """Holds the figures of one run, from its steps of a full batch.

    arm: what it was held to; None where it was steered.  rate: tokens/s.  late_steps: steps that
    the machine missed.  needed_dilation: the dilation that all but a few steps would have kept.
    acceptance_length: tokens that a sequence gains in a step.  shares: arm -> share of the steps.
    asleep: share of the steps through which the drafters slept.
    """

    policy: str
    arm: Arm | None
    rate: float
    steps: int
    late_steps: int
    needed_dilation: float
    acceptance_length: float
    shares: Mapping[Arm, float]
    asleep: float

    @property
    def late_share(self) -> float:
        """Share of the steps in which the machine missed the pace."""
        return self.late_steps / self.steps


@dataclass(frozen=True, slots=True)
class Point:
    """Holds the runs of one concurrency.

    dilation: in force there.  table: arm -> tokens/s that the imposed table promises.  runs: by
    policy.  foreign_cores: kept busy by other programs meanwhile.
    """

    concurrency: int
    dilation: float
    table: Mapping[Arm, float]
    runs: Mapping[str, Run]
    foreign_cores: float

    @property
    def published_winner(self) -> Arm:
        """The drafter and draft length that was published as the best."""
        index = published_qwen.CONCURRENCIES.index(self.concurrency)
        drafter = published_qwen.BEST_DRAFTER[index]
        return Arm(OWN if drafter == MTP else drafter, published_qwen.BEST_GAMMA[drafter][index])

    @property
    def table_winner(self) -> Arm:
        """The best arm by the imposed table."""
        return max(self.table, key=lambda arm: self.table[arm])

    @property
    def winner(self) -> Arm:
        """The best arm that was run."""
        best = max((self.runs[policy] for policy in STATIC), key=lambda run: run.rate)
        return best.arm or PLAIN

    @property
    def envelope(self) -> float:
        """Tokens/s of the best arm that was run."""
        return max(self.runs[policy].rate for policy in STATIC)

    @property
    def steered_share(self) -> float:
        """Tokens/s steered over those of the envelope."""
        return self.runs[STEERED].rate / self.envelope


def measure(
    policy: str, arm: Arm | None, steps: Sequence[LoggedStep], concurrency: int, dilation: float
) -> Run:
    """Takes the steps of a full batch from a run's decode steps, the first of them left out.

    Raises HarnessError for too few of them, and for steps of another arm than the run's.
    """
    full = [s for s in steps if s.batch_size == concurrency][_SETTLING_STEPS:]
    if len(full) < _MIN_STEPS:
        raise HarnessError(f"{policy}: {len(full)} steps of {concurrency} sequences are too few")
    seconds = sum(step.ended - step.began for step in full) / dilation
    tokens = sum(step.tokens for step in full)
    counts = Counter(_arm_of(step) for step in full)
    if arm is not None and counts[arm] < len(full):
        arm_counts_text = ", ".join(f"{arm_name(a)} {n}" for a, n in counts.most_common())
        raise HarnessError(f"{policy}: held to {arm_name(arm)}, the engine ran {arm_counts_text}")
    used = [step.used_seconds / step.seconds for step in full]
    return Run(
        policy,
        arm,
        tokens / seconds,
        len(full),
        sum(step.late for step in full),
        float(np.quantile(used, 1.0 - LATE_SHARE_MAX / 2)),
        tokens / (len(full) * concurrency),
        {ran_arm: count / len(full) for ran_arm, count in counts.most_common()},
        sum(step.asleep for step in full) / len(full),
    )


def suggest_dilation(requested_dilation: float, run: Run, dilation: float) -> int:
    """The `--dilation` at which this run would have kept its pace.

    requested_dilation: what was given, of which `dilation` was in force.
    """
    return ceil(requested_dilation * max(_HEADROOM, _HEADROOM * run.needed_dilation / dilation))


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The points as they stand in result.json; rates in tokens/s."""
    return [
        {
            "concurrency": point.concurrency,
            "dilation": point.dilation,
            "published": arm_name(point.published_winner),
            "table": {arm_name(arm): round(rate, 1) for arm, rate in point.table.items()},
            "table winner": arm_name(point.table_winner),
            "winner": arm_name(point.winner),
            "envelope": round(point.envelope, 1),
            "steered ÷ envelope": round(point.steered_share, 4),
            "runs": {policy: _run_as_json(run) for policy, run in point.runs.items()},
            "foreign_cores": round(point.foreign_cores, 2),
        }
        for point in points
    ]


def from_json(document: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    """Reads what `as_json` has made."""
    return tuple(
        Point(
            entry["concurrency"],
            entry["dilation"],
            _parse_arm_values(entry["table"]),
            {policy: _run_from_json(policy, run) for policy, run in entry["runs"].items()},
            entry["foreign_cores"],
        )
        for entry in document
    )


def count_agreeing(points: Sequence[Point]) -> tuple[int, int]:
    """At how many concurrencies drafter, and draft length too, are the published ones by runs."""
    pairs = [(point.winner, point.published_winner) for point in points]
    return sum(a.drafter == b.drafter for a, b in pairs), sum(a == b for a, b in pairs)


def _arm_of(step: LoggedStep) -> Arm:
    return Arm(step.drafter, step.gamma) if step.gamma else PLAIN


def _run_as_json(run: Run) -> dict[str, Any]:
    return {
        "arm": None if run.arm is None else arm_name(run.arm),
        "tokens_per_second": round(run.rate, 1),
        "acceptance_length": round(run.acceptance_length, 3),
        "steps": run.steps,
        "late": run.late_steps,
        "dilation_needed": round(run.needed_dilation, 1),
        "asleep": round(run.asleep, 4),
        "shares": {arm_name(arm): round(share, 4) for arm, share in run.shares.items()},
    }


def _run_from_json(policy: str, entry: Mapping[str, Any]) -> Run:
    return Run(
        policy,
        None if entry["arm"] is None else parse_arm(entry["arm"]),
        entry["tokens_per_second"],
        entry["steps"],
        entry["late"],
        entry["dilation_needed"],
        entry["acceptance_length"],
        _parse_arm_values(entry["shares"]),
        entry["asleep"],
    )


def _parse_arm_values(values: Mapping[str, float]) -> dict[Arm, float]:
    return {parse_arm(name): value for name, value in values.items()}


def arm_name(arm: Arm) -> str:
    """Names an arm as the publication does: "off", or the drafter and its draft length."""
    return f"{PUBLISHED_NAME[arm.drafter]} {arm.gamma}" if arm.gamma else "off"


def parse_arm(name: str) -> Arm:
    """The arm of a name that `arm_name` has made."""
    drafter, _, gamma = name.partition(" ")
    roles = {published: role for role, published in PUBLISHED_NAME.items()}
    return Arm(roles[drafter], int(gamma)) if gamma else PLAIN


def table_rates(costs: StepCosts, concurrency: int) -> dict[Arm, float]:
    """Arm -> tokens/s that the imposed table promises in the long run, at the published context.

    B (1 + E[accepted | gamma]) / C(B, gamma, 512 B); plain decoding is in it once.
    """
    kv_tokens = int(published_qwen.MEAN_CONTEXT * concurrency)
    rates = {}
    for arm in costs.surface.arms:
        if arm.gamma == 0 and arm != PLAIN:
            continue
        accepted = published_qwen.expected_accepted(PUBLISHED_NAME[arm.drafter], arm.gamma)
        seconds = costs.decode_seconds(arm, concurrency, kv_tokens)
        rates[arm] = concurrency * (1.0 + accepted) / seconds
    return rates


def best_arm(rates: Mapping[Arm, float], drafter: str) -> Arm:
    """The drafter's draft length above 0 with the largest rate."""
    arms = [arm for arm in rates if arm.drafter == drafter and arm.gamma > 0]
    return max(arms, key=lambda arm: rates[arm])


def dilation_for(dilation: float, costs: StepCosts, concurrency: int) -> float:
    """The dilation that leaves a step at a concurrency the same headroom as `dilation` at one.

    The machine's own work grows more slowly with the batch than the imposed steps do at first, and
    faster in the end.
    """

    def work_over_pace(batch_size: int) -> float:
        pace = costs.decode_seconds(Arm(OWN, 1), batch_size, 0)
        return (1.0 + batch_size / _WORK_DOUBLING_BATCH) / pace

    needed = dilation * work_over_pace(concurrency) / work_over_pace(1)
    return max(_MIN_DILATION, round(needed, 1))


def closed_loop(
    name: str, concurrency: int, min_tokens: int, output_tokens: int, prompt_tokens: int = 1
) -> Stream:
    """Requests of equal length, in whole rounds, with at least `min_tokens` output tokens.

    Prompts of one token are what was published, so almost nothing but decoding is timed.
    """
    requests = concurrency * ceil(min_tokens / (concurrency * output_tokens))
    rng = np.random.default_rng([SEED, concurrency])
    prompts = rng.integers(_VOCABULARY.start, _VOCABULARY.stop, (requests, prompt_tokens))
    # Other streams have other draws: acceptance is drawn by the request's number, among others.
    first = 0 if name == "envelope" else 1_000_000
    stream_requests = tuple(
        make_request(_CLASS, first + number, output_tokens, prompt)
        for number, prompt in enumerate(prompts.tolist())
    )
    return Stream(name, SEED, (StreamPhase(name, concurrency, stream_requests),))
