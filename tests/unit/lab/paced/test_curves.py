"""`python -m lab.paced.curves`: survival curves of recorded requests."""

import json

import numpy as np
import pytest

from lab.paced.curves import read_curves, replay_request, survival
from lab.paced.traffic import CLASSES, own_curves, published_curves
from simulator.curves import conditional_curve
from simulator.errors import InvalidInputError


@pytest.fixture
def recorded(tmp_path):
    """Ten requests; request i accepts i drafts at every position."""
    path = tmp_path / "ten.jsonl"
    lines = [
        json.dumps({"prompt_token_ids": [1, 2], "acc_eagle": {"acc_len": [i + 1] * 24}})
        for i in range(10)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_request_is_replayed_from_where_the_last_step_ended():
    accepted = np.array([2, 9, 9, 0, 20, 5, 5, 5, 5, 5, 5, 5, 5, 1], dtype=np.uint8)
    # Steps begin at 0, 3, 4 and, 8 drafts and a bonus token on, at 13.
    assert replay_request(accepted).tolist() == [2, 0, 8, 1]


def test_survival_counts_the_steps_that_accepted_so_many():
    assert survival(np.array([0, 1, 1, 8], dtype=np.uint8)) == [0.75, *[0.25] * 7]


def test_the_tenths_accept_least_and_most(recorded):
    curves = read_curves(recorded)
    assert curves["eagle", "least"] == [0.0] * 8
    assert curves["eagle", "most"] == [1.0] * 8
    # 24 positions take request i ceil(24 / (min(i, 8) + 1)) steps.
    steps = [-(-24 // (min(i, 8) + 1)) for i in range(10)]
    assert curves["eagle", "all"] == [round(sum(steps[k:]) / sum(steps), 3) for k in range(1, 9)]


def test_every_class_has_a_curve_that_the_engine_can_draw_from():
    curves = own_curves()
    for name, traffic in CLASSES.items():
        assert curves[name]["eagle3"] == conditional_curve(traffic.survival)
        assert traffic.source


def test_published_curves_go_by_the_engines_names():
    curves = published_curves("b200-qwen3.6-35b-a3b")["published"]
    assert set(curves) == {"eagle3", "dflash"}
    with pytest.raises(InvalidInputError, match="no acceptance was published with it"):
        published_curves("tide-qwen3-235b")
