"""Compares two engines, or one engine in two configurations, by pairs of answers in turn."""

import time
from collections.abc import Callable
from typing import TypeVar

from lab.cpu_engine.models.prompts import held_out_prompts
from tests.support.engine import EngineProcess

_PROMPT_TOKENS = 60

Side = TypeVar("Side")


def ratios(
    first_side: Side, second_side: Side, measure: Callable[[Side], float], repeats: int
) -> list[float]:
    """measure(one) / measure(other), each pair one after the other, the order in turn.

    Both are measured once before as a warm-up, which is left out.
    """
    measure(first_side), measure(second_side)
    values = []
    for repeat in range(repeats):
        first = measure(first_side) if repeat % 2 else None
        second = measure(second_side)
        values.append((measure(first_side) if first is None else first) / second)
    return values


def measure_step_seconds(engine: EngineProcess, domain: str, batch_size: int, tokens: int) -> float:
    """Seconds of the same prompts' answers, over the verifications of the request that had most.

    tokens: new ones of each request; all requests come at once.
    """
    start = time.perf_counter()
    answers = engine.generate(make_prompts(domain, batch_size), [tokens] * batch_size)
    steps: int = max(answer.meta["spec_verify_ct"] for answer in answers)
    return (time.perf_counter() - start) / steps


def make_prompts(domain: str, count: int) -> list[list[int]]:
    """Always the same ones."""
    return held_out_prompts(domain, count=count, length_tokens=_PROMPT_TOKENS, seed=5)
