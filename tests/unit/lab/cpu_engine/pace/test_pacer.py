"""How a pace is named, and what is refused before an engine begins with it."""

import math
from dataclasses import replace

import pytest

from lab.cpu_engine.pace.pacer import Pace
from lab.cpu_engine.pace.updates import UpdateCosts

PACE = Pace("h100-llama3.1-8b", 4.0, gammas=(0, 1, 3), curves={"code": {"eagle3": [0.5, 0.25]}})


def test_the_variable_is_read_back_as_it_was():
    assert Pace.from_json(PACE.as_json()) == PACE
    learning = replace(PACE, updates=UpdateCosts(scale=4.0), held=False)
    assert Pace.from_json(learning.as_json()) == learning


@pytest.mark.parametrize("dilation", [0.0, -1.0, math.nan, math.inf])
def test_a_dilation_is_a_finite_number_above_0(dilation):
    with pytest.raises(ValueError, match="a dilation is a number above 0"):
        replace(PACE, dilation=dilation)
    text = PACE.as_json().replace('"dilation":4.0', f'"dilation":{dilation}')
    # A parser may refuse what is not a number in JSON before its meaning is read.
    with pytest.raises(ValueError, match="dilation" if math.isfinite(dilation) else None):
        Pace.from_json(text)
