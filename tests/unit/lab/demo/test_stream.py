from collections import Counter
from itertools import pairwise

import pytest

from lab.demo.stream import FULL, QUICK, SEED, PhasePlan, build_stream, halved, warm_up_stream


@pytest.mark.parametrize("plans", [FULL, QUICK])
def test_the_same_arguments_give_the_same_stream(plans):
    assert build_stream(plans, SEED) == build_stream(plans, SEED)


def test_another_seed_gives_other_prompts():
    first, second = build_stream(FULL, 1), build_stream(FULL, 2)
    assert not {r.prompt for p in first for r in p.requests} & {
        r.prompt for p in second for r in p.requests
    }


@pytest.mark.parametrize("plans", [FULL, QUICK])
def test_no_prompt_is_the_beginning_of_another(plans):
    prompts = sorted(r.prompt for phase in build_stream(plans, SEED) for r in phase.requests)
    for shorter, longer in pairwise(prompts):
        assert longer[: len(shorter)] != shorter


def test_concurrency_moves_between_1_and_16_and_every_domain_comes():
    stream = build_stream(FULL, SEED)
    assert {1, 16} <= {phase.concurrency for phase in stream} <= set(range(1, 17))
    assert {r.domain for phase in stream for r in phase.requests} == {
        "code", "prose", "json", "csv",
    }  # fmt: skip


def test_prompts_and_answers_keep_to_their_lengths():
    for phase in build_stream(FULL, SEED):
        for request in phase.requests:
            assert 48 <= len(request.prompt) <= 64
            assert 48 <= request.new_tokens <= 160


def test_a_mixed_phase_holds_all_domains_evenly():
    (phase,) = build_stream((PhasePlan("mixed", 4, 8),), SEED)
    assert set(Counter(r.domain for r in phase.requests).values()) == {2}


def test_requests_are_numbered_through():
    stream = build_stream(FULL, SEED)
    numbers = [r.index for phase in stream for r in phase.requests]
    assert numbers == list(range(len(numbers)))


def test_halving_changes_the_answers_only():
    stream = build_stream(FULL, SEED)
    for phase, short in zip(stream, halved(stream), strict=True):
        assert (short.name, short.concurrency) == (phase.name, phase.concurrency)
        for request, less in zip(phase.requests, short.requests, strict=True):
            assert less.prompt == request.prompt
            assert less.new_tokens == request.new_tokens // 2


def test_warming_up_reaches_both_ends_of_concurrency_with_other_prompts():
    warm_up = warm_up_stream()
    assert {phase.concurrency for phase in warm_up} == {1, 16}
    assert not {r.prompt for p in warm_up for r in p.requests} & {
        r.prompt for p in build_stream(FULL, SEED) for r in p.requests
    }
