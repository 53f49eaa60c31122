"""What is concluded of TIDE's claims, by rules that were there before the numbers; no engine."""

from pathlib import Path

import pytest

from lab.harness.measured import Spread
from lab.harness.terminal import Terminal
from lab.learning.engines import LabSetting
from lab.learning.headline import Verdict
from lab.learning.tide import ServedDomain, judge_matrix, judge_time
from lab.learning.tide_control import eq5, judge_domains
from simulator.published import TIDE_MODELS


def test_what_was_accepted_gives_the_curve_and_the_length():
    served = ServedDomain((), (), (40, 30, 20, 10))
    assert served.conditional == pytest.approx((0.6, 0.5, 1 / 3))
    assert served.acceptance_length == pytest.approx(2.0)
    assert ServedDomain((), (), (5, 0, 0, 0)).conditional == (0, 0, 0)


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ((2.0, 2.0, 2.0), Verdict.REPRODUCES),
        ((2.0, 2.0, 1.0), Verdict.PARTLY),
        ((2.0, 1.0, 1.0), Verdict.NOT),
    ],
)
def test_each_domains_own_drafter_has_to_be_the_best_one_there(
    own: tuple[float, ...], verdict: Verdict
):
    names = ("code", "json", "csv")
    lengths = {
        name: {other: mine if other == name else 1.5 for other in names} | {"as loaded": 9.0}
        for name, mine in zip(names, own, strict=True)
    }
    actual_verdict, because = judge_matrix(lengths)
    assert actual_verdict is verdict
    assert "25% in the mean" in because or verdict is not Verdict.REPRODUCES


def spread(*values: float) -> Spread:
    return Spread(values)


@pytest.mark.parametrize(
    ("offline", "computed", "verdict"),
    [
        ((1.4, 1.5), 2.0, Verdict.REPRODUCES),
        ((1.1, 1.5), 2.0, Verdict.PARTLY),
        ((1.01, 1.5), 2.0, Verdict.NOT),
        # Time that is saved at the price of the drafter does not count.
        ((1.4, 1.5), 2.5, Verdict.NOT),
    ],
)
def test_time_is_saved_where_the_drafter_becomes_as_good(
    offline: tuple[float, ...], computed: float, verdict: Verdict
):
    assert judge_time(spread(*offline), spread(2.0), spread(computed))[0] is verdict


def test_eq_5_is_compared_only_with_costs_that_it_does_not_define(tmp_path: Path):
    comparison = eq5(LabSetting(tmp_path, tmp_path, True, 1, Terminal()))
    assert comparison.verdict is Verdict.UNCHECKED
    # On tables that price a step by Eq. 3 the crossover is that of Eq. 5, whatever it says.
    assert not any(name in str(comparison.rows) for name in TIDE_MODELS)
    assert [row[0] for row in comparison.rows] == ["1", "4"]


@pytest.mark.parametrize(
    ("one", "total", "verdict"),
    [
        (1.3, 1.1, Verdict.REPRODUCES),
        (1.01, 1.0, Verdict.PARTLY),
        (1.3, 0.99, Verdict.PARTLY),
        (1.3, 0.9, Verdict.NOT),
    ],
)
def test_adaptive_has_to_be_no_slower_and_somewhere_faster(
    one: float, total: float, verdict: Verdict
):
    def make_spreads(ratio: float) -> dict[str, Spread]:
        return {"always on": spread(ratio), "off": spread(1.0)}

    ratios = {
        "code": make_spreads(1.0),
        "csv": make_spreads(one),
        "all in turn": make_spreads(total),
    }
    assert judge_domains(ratios)[0] is verdict
