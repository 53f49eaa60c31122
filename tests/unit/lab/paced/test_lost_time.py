from dataclasses import replace

import numpy as np
import pytest

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import load_step_costs
from lab.cpu_engine.pace.step_log import LoggedStep
from lab.paced.lost_time import DecidedPlan, StepValues, lost_time
from speculation.v1 import plan_pb2

COSTS = load_step_costs("h100-llama3.1-8b", (0, 1, 4))
# Whoever drafts is always right, or never.
CURVES = {"good": {"eagle3": [1.0] * 8}, "bad": {"eagle3": [0.0] * 8}}
VALUES = StepValues(COSTS, CURVES)


def step(number: int, gamma: int, kind: str = "good", **more: object) -> LoggedStep:
    """A step of eight sequences, launched at its number, at its price."""
    arm = Arm("eagle3", gamma)
    seconds = COSTS.decode_seconds(arm, 8, 800)
    logged_step = LoggedStep(
        began=number, launched=number, ended=number + 0.5, due=number + 0.5, seconds=seconds,
        batch_size=8, kv_tokens=800, kinds={kind: 8}, drafter="eagle3", gamma=gamma, steered=True,
        epoch=1,
    )  # fmt: skip
    return replace(logged_step, **more)  # type: ignore[arg-type]


def plan(seconds: float, epoch: int, gamma: int) -> DecidedPlan:
    row = plan_pb2.PlanRow(max_batch_size=8, drafter="eagle3", gamma=gamma)
    return DecidedPlan(seconds, plan_pb2.Plan(epoch=epoch, rows=[row]))


def wasted(gamma: int, kind: str) -> float:
    """The share of a step that the best arm of its kind would not have needed."""
    worth = VALUES.rates(step(0, gamma, kind))
    return 1.0 - float(worth[VALUES.executed_row(step(0, gamma, kind))] / worth.max())


def test_an_arm_is_worth_its_expected_tokens_by_its_price():
    worth = VALUES.rates(step(0, 4, "good"))
    seconds = [COSTS.decode_seconds(arm, 8, 800) for arm in VALUES.arms]
    assert worth == pytest.approx(np.array([8, 16, 40]) / seconds)


def test_a_mix_of_classes_is_worth_what_each_brings():
    mixed = step(0, 4, kinds={"good": 2, "bad": 6})
    gained = np.array([8, 6 + 2 * 2, 6 + 2 * 5])
    assert VALUES.rates(mixed) == pytest.approx(
        gained / [COSTS.decode_seconds(arm, 8, 800) for arm in VALUES.arms]
    )


def test_nothing_is_lost_at_the_best_arm():
    losses = lost_time([step(i, 4) for i in range(5)], [plan(0, 1, 4)], VALUES)
    assert losses.total == 0.0


def test_a_probe_is_probing():
    steps = [step(0, 4), step(1, 0, probe=7), step(2, 4)]
    losses = lost_time(steps, [plan(0, 1, 4)], VALUES)
    total = sum(s.seconds for s in steps)
    assert losses.probing == pytest.approx(wasted(0, "good") * steps[1].seconds / total)
    assert losses.total == losses.probing


def test_a_change_of_traffic_is_waited_for_until_a_good_arm_runs():
    steps = [step(0, 4), step(1, 4, "bad"), step(2, 1, "bad"), step(3, 0, "bad"), step(4, 0, "bad")]
    losses = lost_time(steps, [plan(0, 1, 4)], VALUES)
    total = sum(s.seconds for s in steps)
    expected = wasted(4, "bad") * steps[1].seconds + wasted(1, "bad") * steps[2].seconds
    assert losses.waiting == pytest.approx(expected / total)
    assert losses.total == losses.waiting


def test_leaving_a_good_arm_without_a_change_is_a_wrong_estimate():
    steps = [step(0, 4), step(1, 1), step(2, 4)]
    losses = lost_time(steps, [plan(0, 1, 4)], VALUES)
    assert losses.estimates > 0
    assert losses.total == losses.estimates


def test_a_change_that_is_never_understood_is_a_wrong_estimate_in_the_end():
    steps = [step(0, 4), *(step(i, 4, "bad") for i in range(1, 201))]
    losses = lost_time(steps, [plan(0, 1, 4)], VALUES)
    assert losses.waiting == pytest.approx(losses.estimates)


def test_a_plan_that_was_decided_but_not_known_yet_is_the_links_lag():
    steps = [step(0, 4), step(1, 4, "bad"), step(2, 4, "bad"), step(3, 0, "bad", epoch=2)]
    plans = [plan(0, 1, 4), plan(1.5, 2, 0)]
    losses = lost_time(steps, plans, VALUES)
    total = sum(s.seconds for s in steps)
    assert losses.link == pytest.approx(wasted(4, "bad") * steps[2].seconds / total)
    assert losses.waiting == pytest.approx(wasted(4, "bad") * steps[1].seconds / total)


def test_a_newer_plan_that_says_the_same_is_no_lag():
    steps = [step(0, 4), step(1, 1), step(2, 4)]
    losses = lost_time(steps, [plan(0, 1, 4), plan(0.5, 2, 1)], VALUES)
    assert losses.link == 0.0


def test_a_step_that_no_plan_steers_is_the_links():
    losses = lost_time([step(0, 4), step(1, 1, steered=False)], [plan(0, 1, 4)], VALUES)
    assert losses.link > 0
    assert losses.total == losses.link


def test_switches_and_catching_up_are_switching_and_the_shims_work_is_apart():
    plain = step(0, 4)
    longer = replace(
        plain, seconds=plain.seconds + 0.003, switch_seconds=0.001, catch_up_seconds=0.002,
        shim_seconds=0.004,
    )  # fmt: skip
    losses = lost_time([longer], [plan(0, 1, 4)], VALUES)
    assert losses.switching == pytest.approx(0.003 / longer.seconds)
    assert losses.total == losses.switching
    assert losses.shim == pytest.approx(0.004 / longer.seconds)


def test_each_change_is_waited_for_anew():
    # 60 steps of searching, a good one, and 60 more after the next change.
    bad = [step(i, 4, "bad") for i in range(1, 61)]
    good = [step(61, 0, "bad")]
    again = [step(i, 0) for i in range(62, 122)]
    losses = lost_time([step(0, 4), *bad, *good, *again], [plan(0, 1, 4)], VALUES)
    assert losses.waiting > 0
    assert losses.estimates == 0.0


def test_what_a_switch_takes_is_not_lost_twice():
    slow = replace(step(1, 1), seconds=step(1, 1).seconds + 0.002, switch_seconds=0.002)
    losses = lost_time([step(0, 4), slow], [plan(0, 1, 4)], VALUES)
    total = step(0, 4).seconds + slow.seconds
    assert losses.estimates == pytest.approx(wasted(1, "good") * step(1, 1).seconds / total)
    assert losses.switching == pytest.approx(0.002 / total)
