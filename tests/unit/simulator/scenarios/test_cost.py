"""The cost section: formulas, tables, published costs, and the prices beside them."""

import numpy as np
import pytest

from controller.core.model_shapes import DrafterKind
from simulator import published
from simulator.errors import InvalidInputError
from tests.unit.simulator.scenarios.minimal import file

STEP = {
    "base_seconds": 0.004,
    "seconds_per_sequence": 1e-4,
    "seconds_per_token": 2e-5,
    "seconds_per_kv_token": 3e-8,
}


def test_a_formula_is_what_the_surface_charges():
    serial = {
        "gammas": [2],
        "once_seconds": 1e-4,
        "seconds_per_pass": 3e-4,
        "seconds_per_token": 1e-6,
        "seconds_per_kv_token": 1e-9,
    }
    ngram = {"kind": "ngram", "gammas": [4], "share_of_step": 0.01}
    cost = {"formula": {"step": STEP, "drafters": {"eagle": serial, "ngram": ngram}}}
    traffic = {"code": {"geometric": {"eagle": 0.7, "ngram": 0.2}}}
    surface = file(cost=cost, traffic=traffic).make_scenario().surface
    assert [(d.name, d.kind, d.gammas) for d in surface.drafters] == [
        ("eagle", DrafterKind.MTP, (0, 2)),
        ("ngram", DrafterKind.NGRAM, (0, 4)),
    ]
    for batch, kv in ((1, 400), (8, 100_000)):
        plain = 0.004 + 1e-4 * batch + 3e-8 * kv
        eagle = plain + 2e-5 * batch * 3 + 1e-4 + 2 * 3e-4 + 1e-6 * batch * 2 + 1e-9 * kv
        expected = [
            plain + 2e-5 * batch,
            eagle,
            plain + 2e-5 * batch,
            1.01 * (plain + 2e-5 * batch * 5),
        ]
        assert surface.step_seconds(batch, kv) == pytest.approx(expected)
    assert surface.prefill_seconds_per_token == 2e-5
    assert surface.catch_up_seconds(100) == pytest.approx(3e-4 + 100 * 1e-6)


def test_published_costs_are_those_of_their_name():
    cost = {"published": "b200-qwen3.6-35b-a3b", "drafters": ["mtp"], "extrapolate": True}
    traffic = {"code": {"geometric": {"mtp": 0.7}}}
    scenario = file(engine={"max_batch_size": 1024}, cost=cost, traffic=traffic).make_scenario()
    known = published.published_surface(
        "b200-qwen3.6-35b-a3b", max_batch_size=1024, extrapolate=True
    )
    assert (scenario.surface.seconds == known.with_drafters("mtp").seconds).all()
    assert scenario.max_batch_size == 1024


def test_prices_replace_those_of_the_source_and_scale_multiplies_everything():
    cost = {
        "published": "h100-llama3.1-8b",
        "drafters": ["eagle"],
        "gammas": [1, 3],
        "seconds_per_kv_token": 5e-8,
        "kv_reference": 1000,
        "catch_up_seconds_per_token": 1e-6,
        "catch_up_pass_seconds": 1e-3,
        "switch_seconds": 5e-4,
        "scale": 2,
    }
    known = published.published_surface("h100-llama3.1-8b", [1, 3]).with_drafters("eagle")
    scenario = file(cost=cost).make_scenario()
    surface = scenario.surface
    assert surface.seconds == pytest.approx(2 * known.seconds[:, :33])
    assert surface.kv_seconds == pytest.approx(np.full(3, 1e-7))
    assert surface.kv_reference == 1000
    assert surface.prefill_seconds_per_token == 2 * known.prefill_seconds_per_token
    assert surface.catch_up_seconds(10) == pytest.approx(2 * (1e-3 + 10 * 1e-6))
    assert scenario.options.switch_seconds == 1e-3


@pytest.mark.parametrize(
    ("cost", "fault"),
    [
        ({}, "cost: one of published, table, profile, formula is needed; there is nothing"),
        ({"published": "h100-llama3.1-8b", "profile": "a.json"}, "there is published and profile"),
        ({"table": {"eagle": "a.csv"}, "gammas": [1]}, "gammas has no meaning beside table"),
        ({"published": "h100-llama3.1-8b", "kinds": {"eagle": "mtp"}}, "kinds has no meaning"),
        ({"published": "b200-qwen3.6-35b-a3b", "gammas": [17]}, "drafts 17 tokens"),
        ({"formula": {"step": {"base_seconds": 0}, "drafters": {}}}, "base_seconds"),
        ({"formula": {"step": STEP, "drafters": {}}}, "cost.formula.drafters"),
        ({"formula": {"step": STEP, "drafters": {"eagle": {"gammas": []}}}}, "gammas"),
        ({"formula": {"step": STEP, "drafters": {f"d{i}": {"gammas": [1]} for i in range(9)}}},
         "at most 8 drafters with"),
        ({"formula": {"step": STEP | {"seconds_per_sequence": 3600},
                      "drafters": {"eagle": {"gammas": [1]}}}}, "a step takes more than 3600 s"),
    ],
)  # fmt: skip
def test_costs_that_cannot_be_are_refused(cost, fault):
    with pytest.raises(InvalidInputError, match=r"small") as error:
        file(cost=cost).make_scenario()
    assert fault in str(error.value)


def test_mixtures_stand_behind_the_drafters_and_are_scaled_with_them():
    both = {"main": "eagle", "free": "ngram", "share_of_step": 0.01}
    cost = {
        "published": "h100-llama3.1-8b",
        "gammas": [2, 4],
        "scale": 2.0,
        "mixtures": {"both": both},
    }
    traffic = {"code": {"geometric": {"eagle": 0.7, "ngram": 0.2}}}
    surface = file(cost=cost, traffic=traffic).make_scenario().surface
    assert [(d.name, d.gammas) for d in surface.drafters][2] == ("both", (2, 4))
    assert surface.seconds[-2:] == pytest.approx(1.01 * surface.seconds[1:3])
    both["free"] = "other"
    with pytest.raises(InvalidInputError, match=r"cost\.mixtures: .*'other' is not one of"):
        file(cost=cost, traffic=traffic).make_scenario()
