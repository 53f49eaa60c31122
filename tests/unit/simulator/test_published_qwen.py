"""The shapes give the figures that the appendices of "Adaptive speculative decoding" print."""

import pytest

from controller.core.cost.roofline import device_from_data_sheet
from controller.core.model_shapes import LinearAttention
from simulator.published_qwen import DRAFTERS, SURVIVAL, TARGET, expected_accepted
from tests.support.drafting import draft_seconds, state_bytes

B200 = device_from_data_sheet("B200")


def test_the_state_of_a_sequence_weighs_33_megabytes_and_a_context_token_20480_bytes():
    assert TARGET.kv_bytes_per_token == 20_480
    assert state_bytes(TARGET) == pytest.approx(33.4e6, rel=1e-3)
    assert state_bytes(TARGET) / TARGET.kv_bytes_per_token == pytest.approx(1600, rel=0.03)


def test_linear_layers_have_an_intensity_of_about_4_a_token():
    (linear,) = (kind for kind, _ in TARGET.attention if isinstance(kind, LinearAttention))
    matrices = 2 * 32 * 128 * 128
    assert linear.token_flops / matrices == 4
    assert linear.state_bytes == pytest.approx(matrices, rel=0.07)


def test_three_of_thirty_five_billion_parameters_are_active():
    experts = TARGET.experts
    assert experts is not None
    resident = experts.layers * (experts.experts + experts.shared) * experts.params_per_expert
    embedding = TARGET.head_params
    total = TARGET.dense_params + TARGET.head_params + embedding + resident
    assert total == pytest.approx(35e9, rel=0.02)
    assert TARGET.active_params == pytest.approx(3e9, rel=0.06)


def test_one_pass_of_a_drafter_takes_the_published_microseconds():
    mtp = draft_seconds(DRAFTERS["mtp"], B200, [1], [1, 8])[:, 0]
    assert mtp[0] == pytest.approx(141e-6, rel=0.005)
    assert mtp[1] == pytest.approx(8 * mtp[0])
    dflash = draft_seconds(DRAFTERS["dflash"], B200, [1], [1, 16])[:, 0]
    assert dflash[0] == pytest.approx(245e-6, rel=0.005)
    assert dflash[1] == dflash[0]


def test_drafters_weigh_what_was_published():
    head = TARGET.head_params
    assert head == pytest.approx(0.509e9, rel=0.001)
    assert DRAFTERS["mtp"].dense_params == pytest.approx(0.536e9, rel=0.001)
    assert DRAFTERS["mtp"].active_params == pytest.approx(0.564e9, rel=0.001)
    assert DRAFTERS["mtp"].active_params - head == pytest.approx(56e6, rel=0.01)
    assert DRAFTERS["dflash"].dense_params == pytest.approx(0.98e9, rel=0.005)


def test_positions_past_the_curve_add_nothing():
    assert expected_accepted("dflash", 0) == 0
    assert expected_accepted("dflash", 2) == pytest.approx(0.772 + 0.565)
    assert expected_accepted("dflash", 16) == expected_accepted("dflash", 15)
    assert expected_accepted("mtp", 8) == sum(SURVIVAL["mtp"])
