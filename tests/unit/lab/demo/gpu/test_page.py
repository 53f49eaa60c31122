"""The page of a run says what was measured, and what was not reached."""

import json
from dataclasses import replace

import pytest

from lab.demo.gpu import page
from lab.demo.outcome import as_json
from tests.unit.lab.demo.outcomes import outcome

FACTS = {
    "command": ["python", "-m", "lab.demo.gpu"],
    "machine": {"gpus": [], "processor": "a processor", "cores": 2, "system": "Linux"},
    "versions": {"python": "3.12.3", "sglang": "0.5.23"},
    "complete": True,
    "stopped": "",
    "shape": "small",
    "seconds": 91.0,
    "seconds_allowed": 540.0,
    "share_of_answers": 0.5,
    "planned": [
        {"name": "start", "policy": "steered", "counts": "", "seconds": 56.0},
        {"name": "start", "policy": "static-best", "counts": "", "seconds": 41.0},
        {"name": "start", "policy": "off", "counts": "", "seconds": 39.0},
    ],
    "took": [
        {"name": "start", "policy": "steered", "seconds": 61.2},
        {"name": "start", "policy": "off", "seconds": 44.4},
    ],
    "not_played": {},
}


@pytest.fixture
def document():
    measured = replace(outcome(), paced=False)
    return json.loads(json.dumps({**FACTS, **as_json(measured)}))


def test_a_policy_is_a_row_with_rate_share_of_the_oracle_and_times(document):
    text = page.markdown(document)
    assert "The run came to its end." in text
    rows = [line for line in text.splitlines() if line.startswith("| steered |")]
    assert rows[0].startswith("| steered | 2 | 0.750 |  | 1125.00 | 1125.00 | 9.00 | 9.00 |")
    assert "| busy ×2 | 0 | 1 (0.33) | 1 (0.67)" in text


def test_what_was_imposed_is_said_to_be_nothing(document):
    assert document["label"]["measured"] == "the duration of every step: nothing is imposed"
    assert "dilation" not in document["label"]
    assert "Nothing is imposed" in page.markdown(document)


def test_a_run_that_was_cut_off_says_so_and_what_was_not_played(document):
    document |= {"complete": False, "stopped": "the 540 seconds were over"}
    document["not_played"] = {"off": "12 s were left, and it takes about 80 s"}
    text = page.markdown(document)
    assert "**The run is incomplete**: the 540 seconds were over." in text
    assert "off was not played: 12 s were left" in text
    assert "| steered |" in text


def test_a_run_without_a_play_still_has_a_page():
    text = page.markdown({**FACTS, "complete": False, "stopped": "it was told to end"})
    assert "it was told to end" in text
    assert "## The whole day" not in text


def test_pieces_stand_beside_what_was_planned_of_them(document):
    document["took"].append({"name": "start", "policy": "static-4", "seconds": 47.0})
    text = page.markdown(document)
    assert "| start | steered | 56 | 61 |" in text
    assert "| start | off | 39 | 44 |" in text
    assert "| start | static-4 | 41 | 47 |" in text
