import queue

import pytest

from lab.gpu_check.parts import switches
from lab.harness.sidecar import Pin
from speculation.v1 import engine_pb2, service_pb2


def step(gamma: int, seconds: float, batch_size: int = 8, **flags: bool) -> engine_pb2.StepReport:
    return engine_pb2.StepReport(
        drafter="eagle3",
        gamma=gamma,
        batch_size=batch_size,
        step_seconds=seconds,
        flags=engine_pb2.StepFlags(**flags),
    )


def test_a_change_costs_what_its_step_takes_more_than_the_arms_others():
    reports = [
        *[step(1, 0.010)] * 5,
        step(3, 0.0205, switched=True),
        *[step(3, 0.020)] * 5,
        step(1, 0.0101, switched=True),
        step(3, 0.0203, switched=True),
    ]
    switch_cost = switches.switch_cost(reports, 8)
    assert switch_cost["switches"] == 3
    assert switch_cost["microseconds"] == pytest.approx(300.0, abs=0.5)
    assert switch_cost["share"] == pytest.approx(0.015, abs=1e-3)


def test_steps_of_another_batch_and_after_a_prefill_say_nothing():
    reports = [
        *[step(1, 0.010)] * 3,
        step(1, 0.5, switched=True, after_gap=True),
        step(1, 0.5, switched=True, first_use=True),
        step(1, 0.5, batch_size=7, switched=True),
        step(5, 0.5, switched=True),  # of an arm with no other step
    ]
    assert switches.switch_cost(reports, 8) == {"switches": 0, "microseconds": 0.0, "share": 0.0}


def test_the_pin_goes_round_and_each_arm_runs_four_steps():
    moves: queue.SimpleQueue[service_pb2.MeasureRequest | None] = queue.SimpleQueue()
    pin = Pin(moves, "engine")
    pin.reports += [step(1, 0.010)] * 3
    with switches.ArmRotation(pin, [("eagle3", 1), ("dflash", 7)]):
        with pytest.raises(queue.Empty):
            moves.get(timeout=0.5)
        moved = []
        for steps in (1, 4, 4, 4):
            pin.reports += [step(1, 0.010)] * steps
            moved.append(moves.get(timeout=120))
    assert [(m.drafter, m.gamma) for m in moved if m] == [("dflash", 7), ("eagle3", 1)] * 2


def test_waking_is_priced_by_steps_into_drafting_alone():
    reports = [
        *[step(0, 0.010)] * 3,
        *[step(3, 0.020)] * 3,
        step(3, 0.0215, switched=True),
        step(0, 0.0500, switched=True),
    ]
    switch_cost = switches.switch_cost(reports, 8, into_drafting=True)
    assert (switch_cost["switches"], switch_cost["microseconds"]) == (1, pytest.approx(1500.0))
