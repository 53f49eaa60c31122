"""How figures by stride, and seconds by choice, are judged and told; no engine."""

from collections.abc import Mapping

import pytest

from lab.harness.measured import Spread
from lab.learning.headline import Verdict
from lab.learning.strides import OWN, Halves, StrideFigures, choice_headline, strides_headline

PLAIN = Spread((140.0,))


def figures(speeds: Mapping[int, float], lengths: Mapping[int, float]) -> dict[int, StrideFigures]:
    return {
        stride: StrideFigures(
            Spread((lengths[stride], lengths[stride] + 0.1)), Spread((speed, speed)), 7
        )
        for stride, speed in speeds.items()
    }


LENGTHS = {0: 1.2, 5: 1.8, 1: 2.0}
BETWEEN = figures({0: 100.0, 5: 130.0, 1: 90.0}, LENGTHS)
# The most frequent updates equal those in between, but for less than 1 %.
AT_THE_END = figures({0: 100.0, 5: 130.0, 1: 129.0}, LENGTHS)
WITHOUT_EFFECT = figures({0: 100.0, 5: 130.0, 1: 90.0}, {0: 2.0, 5: 1.9, 1: 1.8})


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (BETWEEN, BETWEEN, Verdict.REPRODUCES),
        (AT_THE_END, BETWEEN, Verdict.PARTLY),
        (AT_THE_END, AT_THE_END, Verdict.NOT),
        (WITHOUT_EFFECT, BETWEEN, Verdict.NOT),
    ],
)
def test_the_best_stride_has_to_beat_both_ends_clearly(
    first: dict[int, StrideFigures], second: dict[int, StrideFigures], verdict: Verdict
) -> None:
    headline = strides_headline({1.0: first, 4.0: second}, PLAIN, same_tokens=True)
    assert headline.verdict is verdict


def halves(first: float, second: float) -> Halves:
    return (2000, first), (2000, second)


def test_the_choice_is_compared_over_the_whole_stream_and_its_second_half() -> None:
    stream = {
        "off": [halves(8.0, 8.0)],
        "online:20": [halves(8.0, 4.0)],
        "online:5": [halves(6.0, 4.0)],
        OWN: [halves(8.0, 3.0)],
    }
    headline = choice_headline({"learnable": stream})
    row = headline.facts["learnable"]
    assert row["best fixed"] == "online:5"
    assert row["tokens/s"]["online:5"]["median"] == 400.0
    assert row["chosen over best fixed"]["repeats"] == [round(10 / 11, 4)]
    assert row["chosen over off"]["median"] == round(16 / 11, 4)
    assert row["chosen over best fixed, second half"]["median"] == round(4 / 3, 4)
    assert headline.verdict is Verdict.NOT
    assert headline.because == "It falls short on: learnable."
    assert headline.rows[0][:2] == ("learnable", "5")


def test_a_choice_has_to_reach_the_bar_on_every_stream() -> None:
    good = {"off": [halves(2.0, 2.0)], OWN: [halves(2.0, 2.1)]}
    bad = {"off": [halves(2.0, 2.0)], OWN: [halves(2.0, 2.2)]}
    assert choice_headline({"a": good}).verdict is Verdict.REPRODUCES
    headline = choice_headline({"a": good, "b": bad})
    assert headline.verdict is Verdict.PARTLY
    assert headline.because == "It falls short on: b."
