"""A pass of the drafter is recognised by the tokens that it reads."""

from dataclasses import replace

import pytest

from controller.core.cost.profile import ProfileCell
from controller.core.engine_spec import Capabilities
from controller.core.step_report import StepReport
from controller.profiling.wake_cost import WakeUpRecorder
from tests.support.virtual_engine import engine_spec

SPEC = replace(engine_spec((0, 1)), capabilities=Capabilities(can_sleep=True))
SIZES = (1, 8, 64)
PLAIN, DRAFT, TOKEN = 0.007, 0.002, 1e-5
KV = 100.0
CELLS = [
    ProfileCell("mtp", gamma, size, PLAIN + gamma * DRAFT, 0.0, 20)
    for gamma in (0, 1)
    for size in SIZES
]


def price(sizes, pass_seconds, rounds=6, slept=20):
    """Sleeps and wakes in turn in each batch; returns the price of a token."""
    wakings = WakeUpRecorder(SPEC)
    for size in sizes:
        wakings.begin_load()
        kv = int(KV * size)
        for _ in range(rounds):
            for _ in range(slept):
                wakings.observe(StepReport(1, size, kv, "mtp", 0, (size,), PLAIN))
            seconds = PLAIN + DRAFT + pass_seconds + TOKEN * slept * size
            wakings.observe(StepReport(1, size, kv, "mtp", 1, (size, 0), seconds))
    return wakings.seconds_per_token(CELLS, KV, 0.0)


@pytest.mark.parametrize("pass_seconds", [0.0, 0.5 * DRAFT, DRAFT])
def test_a_pass_is_told_from_the_tokens_where_wakings_differ(pass_seconds):
    seconds_per_token, wakings = price(SIZES, pass_seconds)
    assert seconds_per_token == pytest.approx(TOKEN, rel=0.05)
    assert wakings == 18


def test_a_pass_is_not_taken_for_the_price_of_a_few_tokens():
    seconds_per_token, _ = price((1,), DRAFT, slept=5)
    assert seconds_per_token == pytest.approx(TOKEN, rel=0.05)


def test_a_pass_takes_no_more_than_a_draft():
    # Whatever else was slow is the price of the tokens then.
    seconds_per_token, _ = price((8,), 3 * DRAFT)
    assert seconds_per_token == pytest.approx(TOKEN + 2 * DRAFT / 160, rel=0.2)


def test_a_few_wakings_say_nothing():
    assert price((1,), DRAFT, rounds=4) == (0.0, 0)
