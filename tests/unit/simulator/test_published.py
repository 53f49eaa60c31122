"""Published surfaces say what was published, and nothing beyond it unasked."""

import numpy as np
import pytest

from controller.core.engine_spec import Arm
from simulator import published
from simulator.errors import InvalidInputError
from simulator.published import TIDE_MODELS

LLAMA, QWEN = "h100-llama3.1-8b", "b200-qwen3.6-35b-a3b"

# n = 1, 2, 4, ... of TIDE's Table 5, as printed there, in milliseconds.
TABLE_5 = {
    "tide-gpt-oss-120b": "3.416 3.844 4.341 5.236 6.123 7.637 9.345 11.79 15.50 21.50",
    "tide-qwen3-235b": "9.057 10.07 11.86 14.68 17.84 23.47 26.68 31.46",
    "tide-llama4-scout": "6.461 7.953 8.932 11.01 13.61 16.82 19.58 23.82 27.89 40.86",
    "tide-llama3.3-70b": "15.50 16.00 16.11 16.36 17.10 18.45 19.00 21.38 27.54 64.76",
}
D_0 = {
    "tide-gpt-oss-120b": 0.393,
    "tide-qwen3-235b": 0.137,
    "tide-llama4-scout": 0.330,
    "tide-llama3.3-70b": 0.843,
}


def row(surface, drafter, gamma):
    return surface.seconds[surface.arms.index(Arm(drafter, gamma))]


@pytest.mark.parametrize("name", published.surface_names())
def test_every_surface_is_whole_and_never_gets_cheaper(name):
    surface = published.published_surface(name)
    assert surface.name == name
    assert surface.seconds.shape == (len(surface.arms), surface.max_batch_size + 1)
    assert surface.kv_seconds.shape == (len(surface.arms),)
    assert (surface.seconds > 0).all()
    assert (np.diff(surface.seconds, axis=1) >= -1e-15).all()
    np.testing.assert_array_equal(surface.seconds[:, 0], surface.seconds[:, 1])
    for drafter in surface.drafters:
        assert drafter.gammas[0] == 0
        rows = np.vstack([row(surface, drafter.name, gamma) for gamma in drafter.gammas])
        assert (np.diff(rows, axis=0) > -1e-15).all()
    # A missed token is caught up faster than the target reads one.
    assert 0 < surface.catch_up_seconds_per_token < surface.prefill_seconds_per_token


@pytest.mark.parametrize("name", TABLE_5)
def test_table_5_comes_back_exactly(name):
    table = [float(value) / 1e3 for value in TABLE_5[name].split()]
    plain = row(published.published_surface(name, gammas=[0]), "eagle3", 0)
    np.testing.assert_array_equal([plain[2**i] for i in range(len(table))], table)
    assert len(plain) == 2 ** (len(table) - 1) + 1
    deep = published.published_surface(name, gammas=[3])
    assert row(deep, "eagle3", 3)[8] == pytest.approx(3 * D_0[name] / 1e3 + table[5], rel=1e-12)


@pytest.mark.parametrize("name", TABLE_5)
def test_between_and_behind_its_points_the_table_is_linear(name):
    table = [float(value) / 1e3 for value in TABLE_5[name].split()]
    last = 2 ** (len(table) - 1)
    wide = published.published_surface(name, gammas=[0], max_batch_size=2 * last, extrapolate=True)
    plain = row(wide, "eagle3", 0)
    assert plain[3] == pytest.approx((table[1] + table[2]) / 2)
    assert plain[2 * last] == pytest.approx(table[-1] + 2 * (table[-1] - table[-2]))


def test_a_batch_that_was_never_measured_has_to_be_meant():
    with pytest.raises(InvalidInputError, match="batches of 1 to 128 are known"):
        published.published_surface("tide-gpt-oss-120b", [3], max_batch_size=129)
    for name in (LLAMA, QWEN):
        largest = published.published_surface(name).max_batch_size
        with pytest.raises(InvalidInputError, match=f"batches of 1 to {largest} are known"):
            published.published_surface(name, max_batch_size=largest + 1)
    wide = published.published_surface(
        "tide-gpt-oss-120b", [3], max_batch_size=129, extrapolate=True
    )
    assert wide.max_batch_size == 129


@pytest.mark.parametrize(
    ("name", "gamma_max", "sizes"),
    [
        ("tide-gpt-oss-120b", 3, (1, 2, 4, 8, 16, 32, 64, 128)),
        ("tide-gpt-oss-120b", 5, (1, 2, 4, 8, 16, 32, 64, 85)),
        ("tide-qwen3-235b", 0, (1, 2, 4, 8, 16, 32, 64, 128)),
        ("tide-qwen3-235b", 63, (1, 2)),
        (LLAMA, 8, (1, 8, 16, 32, 64)),
        (QWEN, 16, tuple(2**i for i in range(12))),
    ],
)
def test_measured_batches_end_where_the_publication_does(name, gamma_max, sizes):
    assert published.measured_batch_sizes(name, gamma_max) == sizes
    largest = published.published_surface(name, [gamma_max]).max_batch_size
    assert largest == sizes[-1]


def test_the_fit_is_the_published_one():
    surface = published.published_surface(LLAMA)
    batch, gamma, kv = 16, 5, 16 * 512
    verify = 5.88590713e-3 + 2.10103129e-5 * batch * (gamma + 1) + 3.92645679e-8 * kv
    eagle = 2.13526175e-3 + 8.41429603e-7 * gamma * batch + 2.37768493e-9 * kv
    overhead = 1.20683946e-3
    assert surface.kv_reference == 512
    assert row(surface, "eagle", gamma)[batch] == pytest.approx(verify + eagle + overhead)
    assert row(surface, "ngram", gamma)[batch] == pytest.approx(1.005875 * verify + overhead)
    plain = 5.88590713e-3 + 2.10103129e-5 * batch + 3.92645679e-8 * kv + overhead
    assert row(surface, "eagle", 0)[batch] == pytest.approx(plain)
    assert row(surface, "ngram", 0)[batch] == pytest.approx(plain)
    by_arm = dict(zip(surface.arms, surface.kv_seconds, strict=True))
    assert by_arm[Arm("eagle", 0)] == by_arm[Arm("ngram", 0)] == 3.92645679e-8
    assert by_arm[Arm("eagle", 1)] == pytest.approx(3.92645679e-8 + 2.37768493e-9)
    assert by_arm[Arm("ngram", 1)] == pytest.approx(1.005875 * 3.92645679e-8)


def test_drafters_take_only_the_draft_lengths_that_they_can_do():
    surface = published.published_surface(QWEN, gammas=[4, 12])
    assert [(d.name, d.gammas) for d in surface.drafters] == [
        ("mtp", (0, 4)),
        ("dflash", (0, 4, 12)),
    ]


def test_plain_decoding_costs_the_same_whichever_drafter_stands_by():
    for name in (LLAMA, QWEN):
        surface = published.published_surface(name)
        first, second = (row(surface, drafter.name, 0) for drafter in surface.drafters)
        np.testing.assert_array_equal(first, second)


def test_curves_are_there_where_they_were_published():
    curves = published.acceptance_curves(QWEN)
    assert {name: len(curve) for name, curve in curves.items()} == {"mtp": 8, "dflash": 15}
    # Tokens a round as the text has them: 3.0 commits beside the bonus token, and 3.4.
    assert sum(curves["mtp"]) == pytest.approx(3.0, abs=0.05)
    assert sum(curves["dflash"]) == pytest.approx(3.4, abs=0.05)
    for curve in curves.values():
        assert list(curve) == sorted(curve, reverse=True)
    assert not any(
        published.acceptance_curves(name) for name in published.surface_names() if name != QWEN
    )


@pytest.mark.parametrize(
    "call",
    [
        published.published_surface,
        published.acceptance_curves,
        lambda n: published.measured_batch_sizes(n, 1),
    ],
)
def test_an_unknown_name_is_refused_and_the_known_ones_are_listed(call):
    with pytest.raises(InvalidInputError, match="'tide'") as caught:
        call("tide")
    assert all(name in str(caught.value) for name in published.surface_names())


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda: published.published_surface(QWEN, [17]), "no drafter of it drafts 17"),
        (lambda: published.published_surface(LLAMA, [-1]), r"are not all in \[0, 64\]"),
        (lambda: published.published_surface(LLAMA, max_batch_size=0), "max_batch_size 0"),
        (lambda: published.measured_batch_sizes(LLAMA, -1), "draft length of -1"),
        (lambda: published.measured_batch_sizes(QWEN, 17), "draft length of 17"),
    ],
)
def test_sizes_that_are_not_known_are_refused(call, fault):
    with pytest.raises(InvalidInputError, match=fault):
        call()


def test_every_table_is_a_surface():
    assert set(TIDE_MODELS) == set(TABLE_5) < set(published.surface_names())
