"""Held-out prompts: repeatable, distinct, of the asked size, and refused if they are missing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.cpu_engine.models.corpus import VOCABULARY_SIZE
from lab.cpu_engine.models.prompts import (
    DOMAINS,
    LONGEST_PROMPT,
    held_out_prompts,
)

A_DOMAIN = st.sampled_from(DOMAINS)


@given(A_DOMAIN, st.integers(0, 20), st.integers(1, LONGEST_PROMPT - 2), st.integers(0, 2**32))
@settings(deadline=None)
def test_prompts_have_the_asked_shape_and_repeat_with_the_seed(
    domain: str, count: int, length: int, seed: int
) -> None:
    prompts = held_out_prompts(domain, count, length, seed)
    assert len(prompts) == count
    assert all(len(prompt) == length for prompt in prompts)
    assert all(0 <= token < VOCABULARY_SIZE for prompt in prompts for token in prompt)
    assert held_out_prompts(domain, count, length, seed) == prompts


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_of_one_call_differ_and_so_do_seeds(domain: str) -> None:
    prompts = held_out_prompts(domain, 50, 64, seed=0)
    assert len({tuple(prompt) for prompt in prompts}) == 50
    assert held_out_prompts(domain, 50, 64, seed=1) != prompts
