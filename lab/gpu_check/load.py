"""Builds the moving load as a stream of random prompts, so that no cache holds any of them."""

import random
from collections.abc import Iterable

from lab.gpu_check.shapes import Load, Shape
from lab.harness.stream import StreamPhase, StreamRequest

# The first ids of a vocabulary are often special ones.
_FIRST_ID = 16
# Of the context length, which SGLang keeps for drafts.
_SPARE_TOKENS = 64


def build_stream(shape: Shape, loads: Iterable[Load], seed: int) -> tuple[StreamPhase, ...]:
    """Builds one phase for each load; the same arguments give the same stream."""
    rng = random.Random(seed)
    phases: list[StreamPhase] = []
    index = 0
    for number, load in enumerate(loads, start=1):
        requests = []
        for _ in range(load.requests):
            prompt = rng.choices(range(_FIRST_ID, shape.vocabulary // 2), k=load.prompt_tokens)
            requests.append(StreamRequest(index, "random", tuple(prompt), load.new_tokens))
            index += 1
        name = f"{number} ×{load.concurrency}, {load.prompt_tokens} tokens"
        phases.append(StreamPhase(name, "random", load.concurrency, tuple(requests)))
    return tuple(phases)


def steady_stream(
    shape: Shape, batch_size: int, seed: int, times: int = 1
) -> tuple[StreamPhase, ...]:
    """Builds one full batch of like requests; answers are `times` as long as the moving load's."""
    load = next((x for x in shape.loads if x.concurrency == batch_size), shape.loads[0])
    tokens = min(times * load.new_tokens, shape.context_length - load.prompt_tokens - _SPARE_TOKENS)
    return build_stream(shape, [Load(batch_size, batch_size, load.prompt_tokens, tokens)], seed)
