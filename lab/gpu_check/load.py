"""Builds the moving load as a stream of random prompts, so that no cache holds any of them."""

import random
from collections.abc import Iterable
from dataclasses import replace

from lab.gpu_check.shapes import Load, Shape
from lab.harness.load_generator import StreamPhase, StreamRequest

# The first ids of a vocabulary are often special ones.
_FIRST_ID = 16
# Of the context length, which SGLang keeps for drafts.
_SPARE_TOKENS = 64
# A shorter answer would be prompt reading and little else.
_MIN_NEW_TOKENS = 12
_MOVING_SEED, _WARM_UP_SEED = 7, 10
# Of an answer in the stream that warms an engine up.
_WARM_UP_TOKENS = 16


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
        phases.append(StreamPhase(name, load.concurrency, tuple(requests)))
    return tuple(phases)


def moving_loads(shape: Shape, answer_share: float) -> tuple[Load, ...]:
    """Returns the shape's moving load with answers of that share of their length."""
    return tuple(
        replace(load, new_tokens=max(_MIN_NEW_TOKENS, round(load.new_tokens * answer_share)))
        for load in shape.loads
    )


def moving_stream(shape: Shape, answer_share: float) -> tuple[StreamPhase, ...]:
    """Builds the stream of `moving_loads`."""
    return build_stream(shape, moving_loads(shape, answer_share), _MOVING_SEED)


def steady_load(shape: Shape, batch_size: int, share: float = 1.0) -> Load:
    """Returns one full batch of like requests.

    share: length of an answer over those of the moving load with the next smaller concurrency.
    """
    load = max(
        (load for load in shape.loads if load.concurrency <= batch_size),
        key=lambda load: (load.concurrency, -load.prompt_tokens),
        default=shape.loads[0],
    )
    max_new_tokens = shape.context_length - load.prompt_tokens - _SPARE_TOKENS
    tokens = min(max(_MIN_NEW_TOKENS, round(share * load.new_tokens)), max_new_tokens)
    return Load(batch_size, batch_size, load.prompt_tokens, tokens)


def steady_stream(
    shape: Shape, batch_size: int, seed: int, share: float = 1.0
) -> tuple[StreamPhase, ...]:
    """Builds the stream of `steady_load`."""
    return build_stream(shape, [steady_load(shape, batch_size, share)], seed)


def warm_up_loads(shape: Shape) -> tuple[Load, ...]:
    """Returns a short full batch for each concurrency of the moving load."""
    loads = (steady_load(shape, size) for size in dict.fromkeys(x.concurrency for x in shape.loads))
    return tuple(replace(load, new_tokens=min(load.new_tokens, _WARM_UP_TOKENS)) for load in loads)


def warm_up_stream(shape: Shape) -> tuple[StreamPhase, ...]:
    """Builds the stream of `warm_up_loads`."""
    return build_stream(shape, warm_up_loads(shape), _WARM_UP_SEED)
