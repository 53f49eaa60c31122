"""Held-out prompts: repeatable, distinct, of the asked size, and refused where there are none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.cpu_engine.models.corpus import VOCABULARY_SIZE
from lab.cpu_engine.models.prompts import (
    DOMAINS,
    FOLDER,
    LONGEST_PROMPT,
    PASSAGES,
    held_out_prompts,
    passage_file,
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


def test_tokens_are_plain_integers_an_engine_can_serialise() -> None:
    assert {type(token) for token in held_out_prompts("json", 1, 16, seed=0)[0]} == {int}


def test_every_passage_can_be_had_whole() -> None:
    prompts = held_out_prompts("code", PASSAGES, LONGEST_PROMPT, seed=0)
    assert len({tuple(prompt) for prompt in prompts}) == PASSAGES


@pytest.mark.parametrize(
    ("domain", "count", "length", "message"),
    [
        ("poetry", 1, 10, "unknown domain 'poetry': choose one of code, prose, json, csv"),
        ("code", 1, 0, "a prompt has 1 to 1024 tokens, not 0"),
        ("code", 1, 1025, "a prompt has 1 to 1024 tokens, not 1025"),
        ("code", 19, 1024, "code has 18 prompts of 1024 tokens, not 19: ask for shorter ones"),
        ("code", -1, 10, "not -1"),
    ],
)
def test_prompts_that_do_not_exist_are_refused(
    domain: str, count: int, length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        held_out_prompts(domain, count, length, seed=0)


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_domain_ships_in_at_most_forty_kilobytes(domain: str) -> None:
    assert passage_file(FOLDER, domain).stat().st_size <= 40_000


def test_prompts_need_neither_torch_nor_tokenizers() -> None:
    script = (
        "import sys; from lab.cpu_engine.models.prompts import held_out_prompts;"
        "held_out_prompts('csv', 2, 8, 0);"
        "sys.exit(bool({'torch', 'tokenizers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
