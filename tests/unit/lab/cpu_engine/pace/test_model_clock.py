"""The clock of passes: of the machine, standing still, and moved by prices alone."""

import time

from lab.cpu_engine.pace.model_clock import ModelClock


def test_a_held_clock_is_the_machines_less_the_time_it_stood_still():
    clock = ModelClock()
    before = time.perf_counter() - clock.now()
    assert abs(before) < 1.0
    with clock.paused():
        began = clock.now()
        time.sleep(0.05)
    stood = time.perf_counter() - clock.now()
    assert stood >= 0.05
    assert clock.now() >= began


def test_a_held_clock_waits_until_a_pass_is_due():
    clock = ModelClock()
    # Read before what is due is reported: the machine may do something else in between.
    began = time.perf_counter()
    due = clock.now() + 0.02
    assert clock.wait_until(due) >= due
    assert time.perf_counter() - began >= 0.0199
    # What has passed is not waited for.
    assert clock.wait_until(due - 1.0) >= due


def test_a_clock_that_is_not_held_moves_by_what_it_waits_for_alone():
    clock = ModelClock(real_time=False)
    assert clock.now() == 0.0
    assert clock.wait_until(1000.0) == 1000.0
    with clock.paused():
        time.sleep(0.001)
    assert clock.now() == 1000.0
    assert clock.wait_until(999.0) == 1000.0
