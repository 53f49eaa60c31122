import json
from pathlib import Path

import pytest

from lab.gpu_check.budget import Deadline, OutOfTimeError, Prices, Tally, Work
from lab.harness.errors import HarnessError

PRICES = Prices(launch=40.0, capture=0.5, decode_pass=0.01, request=0.1, source="a test")


def test_work_is_added_and_priced():
    work = Work(launches=1, captures=4) + Work(passes=100, requests=3).multiply(2)
    assert work == Work(1, 4, 200, 6)
    assert PRICES.seconds(work + Work(wait_seconds=7.0)) == pytest.approx(40 + 2 + 2 + 0.6 + 7)


def test_the_shipped_price_list_says_where_it_is_from():
    assert Prices.read().source


@pytest.mark.parametrize("text", ["{", "[]", '{"launch": 1}', '{"lunch": 1}'])
def test_what_is_no_price_list_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(HarnessError, match=r"prices\.json"):
        Prices.read(path)


def test_a_step_that_would_end_after_the_budget_is_refused():
    now = 100.0
    deadline = Deadline(60.0, lambda: now)
    now = 130.0
    assert (deadline.elapsed, deadline.remaining_seconds) == (30.0, 30.0)
    deadline.require(30.0, "a play")
    with pytest.raises(OutOfTimeError, match="a play takes about 31 s, and 30 s are left"):
        deadline.require(31.0, "a play")


def test_a_run_prices_the_next_one(tmp_path: Path):
    tally = Tally()
    assert tally.prices("a run", 0.01) is None
    tally.launches, tally.launch_seconds = 2, 100.0
    tally.captures, tally.capture_seconds = 40, 20.0
    tally.passes, tally.requests, tally.play_seconds = 1000, 100, 13.0
    prices = tally.prices("a run", 0.01)
    assert prices == Prices(40.0, 0.5, 0.012, 0.01, "a run")
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(prices.as_json()))
    assert Prices.read(path) == prices
