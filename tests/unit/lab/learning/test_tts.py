"""What is concluded of optimiser steps, by rules on acceptance alone; no engine."""

import pytest

from lab.learning.headline import Verdict
from lab.learning.tts import judge_steps


@pytest.mark.parametrize(
    ("eagle", "dflash", "verdict"),
    [
        ({1: 1.5, 2: 1.4}, {1: 1.1, 2: 1.11}, Verdict.REPRODUCES),
        ({1: 1.5, 2: 1.6}, {1: 1.1, 2: 1.0}, Verdict.PARTLY),
        ({1: 1.5, 2: 1.6}, {1: 1.1, 2: 1.2}, Verdict.NOT),
    ],
)
def test_a_price_does_not_turn_more_acceptance_into_less(
    eagle: dict[int, float], dflash: dict[int, float], verdict: Verdict
):
    priced = {"EAGLE3": {1: 1.3, 2: 1.2}, "DFlash": {1: 0.8, 2: 0.6}}
    actual_verdict, because = judge_steps({"EAGLE3": eagle, "DFlash": dflash}, priced)
    assert actual_verdict is verdict
    assert because.count("no K above 1 accepts") == {
        Verdict.REPRODUCES: 2, Verdict.PARTLY: 1, Verdict.NOT: 0,
    }[verdict]  # fmt: skip
