"""Chooses from the imposed table what is run at each concurrency."""

from collections.abc import Mapping
from math import ceil

import numpy as np

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import OWN, SECOND, StepCosts
from lab.harness.load_generator import StreamPhase
from lab.paced.day import Stream, drawn_request
from simulator import published_qwen

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
# A step of so many sequences takes the machine twice as long as a step of one.
_WORK_DOUBLES = 50.0
_LEAST_DILATION = 1.0


def name_of(arm: Arm) -> str:
    """Names an arm as the publication does: "off", or the drafter and its draft length."""
    return f"{PUBLISHED_NAME[arm.drafter]} {arm.gamma}" if arm.gamma else "off"


def arm_named(name: str) -> Arm:
    """The arm of a name that `name_of` has made."""
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


def dilation_at(dilation: float, costs: StepCosts, concurrency: int) -> float:
    """The dilation at a concurrency that leaves a step as much room as `dilation` leaves at one.

    The machine's own work grows more slowly with the batch than the imposed steps do at first, and
    faster in the end.
    """

    def work_over_pace(batch_size: int) -> float:
        pace = costs.decode_seconds(Arm(OWN, 1), batch_size, 0)
        return (1.0 + batch_size / _WORK_DOUBLES) / pace

    needed = dilation * work_over_pace(concurrency) / work_over_pace(1)
    return max(_LEAST_DILATION, round(needed, 1))


def closed_loop(
    name: str, concurrency: int, least_tokens: int, output_tokens: int, prompt_tokens: int = 1
) -> Stream:
    """Requests of equal length, in whole rounds, with at least so many output tokens in all.

    Prompts of one token are what was published, so almost nothing but decoding is timed.
    """
    requests = concurrency * ceil(least_tokens / (concurrency * output_tokens))
    rng = np.random.default_rng([SEED, concurrency])
    prompts = rng.integers(_VOCABULARY.start, _VOCABULARY.stop, (requests, prompt_tokens))
    # Other streams draw other luck: a request's number is part of what its acceptance comes from.
    first = 0 if name == "envelope" else 1_000_000
    drawn = tuple(
        drawn_request(_CLASS, first + number, output_tokens, prompt)
        for number, prompt in enumerate(prompts.tolist())
    )
    return Stream(name, SEED, (StreamPhase(name, concurrency, drawn),))
