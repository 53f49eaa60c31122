"""The arms, dilations and streams of the envelope, which follow from the imposed table."""

import pytest

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import load_step_costs
from lab.paced.envelope.outcome import (
    CONCURRENCIES,
    GAMMAS,
    PLAIN,
    TABLE,
    arm_name,
    best_arm,
    closed_loop,
    dilation_for,
    table_rates,
)
from lab.paced.traffic import published_curves
from simulator import published_qwen

COSTS = load_step_costs(TABLE, GAMMAS, 128)


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
def test_the_table_s_best_arms_are_the_published_ones(concurrency):
    index = published_qwen.CONCURRENCIES.index(concurrency)
    rates = table_rates(COSTS, concurrency)
    assert best_arm(rates, "eagle3").gamma == published_qwen.BEST_GAMMA["mtp"][index]
    assert best_arm(rates, "dflash").gamma == published_qwen.BEST_GAMMA["dflash"][index]
    winner = max(rates, key=lambda arm: rates[arm])
    assert arm_name(winner).startswith(published_qwen.BEST_DRAFTER[index])


@pytest.mark.parametrize(("concurrency", "goodput"), [(1, 1394.1), (16, 4292.2), (128, 14096.1)])
def test_plain_decoding_has_the_published_goodput(concurrency, goodput):
    assert table_rates(COSTS, concurrency)[PLAIN] == pytest.approx(goodput, rel=0.01)


def test_a_dilation_leaves_the_machine_as_much_of_a_step_as_its_work_grows():
    room = {
        b: dilation_for(26.0, COSTS, b) * COSTS.decode_seconds(Arm("eagle3", 1), b, 0)
        for b in (1, 8, 128)
    }
    assert room[8] / room[1] == pytest.approx(58 / 51, rel=0.02)
    assert room[128] / room[1] == pytest.approx(178 / 51, rel=0.02)


def test_a_stream_is_of_whole_rounds_and_has_tokens_enough():
    stream = closed_loop("envelope", 4, 5000, 1024)
    assert (stream.requests, stream.tokens) == (8, 8192)
    assert stream.max_concurrency == 4
    assert all(len(request.prompt) == 1 for request in stream.phases[0].requests)
    assert closed_loop("envelope", 4, 5000, 1024) == stream


def test_a_stream_s_requests_have_a_curve():
    kinds = {r.domain for r in closed_loop("envelope", 2, 1, 64).phases[0].requests}
    assert kinds == set(published_curves(TABLE))


def test_a_warm_up_has_other_requests_so_other_luck():
    numbers = {
        name: {r.index for r in closed_loop(name, 2, 1, 64).phases[0].requests}
        for name in ("envelope", "warm-up")
    }
    assert not numbers["envelope"] & numbers["warm-up"]
