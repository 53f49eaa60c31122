"""What an update costs: a roofline, and who pays for it."""

import pytest

from lab.cpu_engine.pace.updates import PARAMETERS, UpdateCosts
from lab.papers.stride_simulation import streams_of_table_3, streams_of_table_7

# A step of one and of four sequences with 3 drafts, in the table h100-llama3.1-8b.
STEPS = {1: 9.32e-3, 4: 9.61e-3}


def test_a_small_round_costs_what_memory_costs_and_a_large_one_arithmetic():
    costs = UpdateCosts()
    memory = PARAMETERS * 46 / 3.35e12
    assert costs.work_seconds(1, 1, 3) == pytest.approx(memory, rel=0.01)
    one, many = costs.work_seconds(16, 48, 3), costs.work_seconds(16, 256, 3)
    assert many - one == pytest.approx(6 * PARAMETERS * 16 * 208 * 3 / (0.5 * 989e12))


def test_in_steps_it_costs_about_what_the_papers_tables_say():
    stated = [
        (stream.step_seconds[1] - stream.step_seconds[0]) / stream.step_seconds[0]
        for stream in (*streams_of_table_3(), *streams_of_table_7())
    ]
    cost_steps = [UpdateCosts().work_seconds(size, 48, 3) / step for size, step in STEPS.items()]
    assert cost_steps == [pytest.approx(0.71, abs=0.01), pytest.approx(0.92, abs=0.01)]
    assert min(stated) < min(cost_steps)
    assert max(cost_steps) < max(stated)


def test_a_more_expensive_student_takes_so_many_times_as_long():
    assert UpdateCosts(scale=4.0).seconds(4, 48, 3) == 4 * UpdateCosts().seconds(4, 48, 3)


@pytest.mark.parametrize("share", [0.25, 1.0, 3.0])
def test_an_update_that_takes_less_of_each_step_takes_longer(share: float):
    costs = UpdateCosts(share=share)
    seconds = costs.seconds(4, 48, 3)
    assert seconds * share / (1 + share) == pytest.approx(costs.work_seconds(4, 48, 3))
