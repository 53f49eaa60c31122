"""The context is estimated for every batch size, from its own steps and from those near it."""

import numpy as np
import pytest

from controller.core.cost.live_estimates import ContextByBatch
from controller.core.settings import PlannerSettings

SIZES = (1, 2, 4, 8, 16, 32, 64)


def seen(*stretches, start=512.0):
    """stretches: (bucket, context, steps)."""
    context = ContextByBatch(SIZES, start, PlannerSettings())
    for bucket, tokens, steps in stretches:
        for _ in range(steps):
            context.observe(bucket, tokens)
    return context


def test_before_any_step_it_is_the_profile_s():
    assert seen(start=700.0).by_bucket() == pytest.approx(np.full(7, 700.0))


def test_batch_sizes_with_different_contexts_keep_their_own():
    stretches = [(1, 100_000.0, 20), (5, 500.0, 20)] * 4
    contexts = seen(*stretches).by_bucket()
    assert contexts[1] == pytest.approx(100_000, rel=0.1)
    assert contexts[5] == pytest.approx(500, rel=0.2)


def test_a_batch_size_that_was_never_seen_has_the_context_of_those_near_it():
    contexts = seen((1, 100_000.0, 20), (5, 500.0, 20)).by_bucket()
    assert contexts[0] == pytest.approx(100_000, rel=0.05)
    assert contexts[6] == pytest.approx(500, rel=0.2)


def test_a_batch_size_that_returns_adapts_within_a_few_steps():
    contexts = seen((2, 500.0, 100), (4, 500.0, 400), (2, 4000.0, 3)).by_bucket()
    assert contexts[2] == pytest.approx(4000, rel=0.25)


def test_one_odd_step_moves_a_settled_average_little():
    contexts = seen((3, 1000.0, 200), (3, 3000.0, 1)).by_bucket()
    assert contexts[3] == pytest.approx(1100, rel=0.02)
