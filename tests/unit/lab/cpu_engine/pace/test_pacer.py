"""How a pace is named, and what is refused before an engine begins with it."""

import math
from dataclasses import replace

import pytest

from lab.cpu_engine.pace.pacer import Pace, Pacer
from lab.cpu_engine.pace.updates import UpdateCosts
from simulator.errors import InvalidInputError

PACE = Pace("h100-llama3.1-8b", 4.0, gammas=(0, 1, 3), curves={"code": {"eagle3": [0.5, 0.25]}})


def test_the_variable_is_read_back_as_it_was():
    assert Pace.from_json(PACE.as_json()) == PACE
    learning = replace(PACE, updates=UpdateCosts(scale=4.0), held=False)
    assert Pace.from_json(learning.as_json()) == learning


def test_a_price_of_updates_that_is_none_is_refused():
    learning = replace(PACE, updates=UpdateCosts(scale=4.0))
    with pytest.raises(ValueError, match="an update's scale is a number above 0"):
        Pace.from_json(learning.as_json().replace('"scale":4.0', '"scale":-4.0'))


@pytest.mark.parametrize("dilation", [0.0, -1.0, math.nan, math.inf])
def test_a_dilation_is_a_finite_number_above_0(dilation):
    with pytest.raises(ValueError, match="a dilation is a number above 0"):
        replace(PACE, dilation=dilation)
    text = PACE.as_json().replace('"dilation":4.0', f'"dilation":{dilation}')
    # A parser may refuse what is no number in JSON before its meaning is read.
    with pytest.raises(ValueError, match="dilation" if math.isfinite(dilation) else None):
        Pace.from_json(text)


@pytest.mark.parametrize("text", ["", "fast", "nan", "0", "-2"])
def test_a_dilation_file_without_such_a_number_is_an_error_at_once(tmp_path, text):
    file = tmp_path / "dilation"
    file.write_text(text)
    with pytest.raises(ValueError, match="dilation: a dilation is a number above 0, not"):
        Pacer(replace(PACE, dilation_file=str(file)))


def test_a_missing_dilation_file_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        Pacer(replace(PACE, dilation_file=str(tmp_path / "none")))


def test_a_log_that_cannot_be_written_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        Pacer(replace(PACE, log=str(tmp_path / "none" / "log")))


def test_an_unknown_table_is_an_error_at_once():
    with pytest.raises(InvalidInputError, match="is neither a file nor one of"):
        Pacer(replace(PACE, table="h200"))
