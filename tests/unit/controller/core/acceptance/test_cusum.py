"""A change is called for what the estimates do not explain, and not for what they have learnt."""

from controller.core.acceptance.shifts import Cusum
from controller.core.settings import PlannerSettings

SETTINGS = PlannerSettings()


def steps_until_called(believed, exposures, *, learning):
    """Steps of 4 sequences, all rejected, until a shift is called; 200: none was."""
    cusum = Cusum(SETTINGS)
    for step in range(200):
        if step % 4 == 0:
            a = believed
            if learning:
                a = believed * exposures / (exposures + 4 * step)
            cusum.set_reference([a], [exposures + 4 * step])
        if cusum.observe([4, 0]):
            return step
    return 200


def test_a_change_of_what_is_well_known_is_called_within_a_few_steps():
    assert steps_until_called(0.7, 500.0, learning=True) < 8


def test_an_estimate_that_is_hardly_more_than_its_prior_learns_instead():
    assert steps_until_called(0.7, 2.0, learning=True) == 200
    assert steps_until_called(0.7, 2.0, learning=False) < 200


def test_a_change_is_called_although_some_answers_end_in_every_step():
    """One of eight rows is cut behind its first draft, and shows that draft."""
    cusum = Cusum(SETTINGS)
    cusum.set_reference([0.7, 0.7], [500.0, 300.0])
    called = [cusum.observe([7, 0, 0], [0, 1]) for _ in range(12)]
    assert -1 in called
    cut, narrow = Cusum(SETTINGS), Cusum(SETTINGS)
    for each in (cut, narrow):
        each.set_reference([0.7, 0.7], [500.0, 300.0])
    # A row that was cut behind its first draft shows what a step of one draft does.
    cut.observe([3, 0, 0], [0, 1])
    narrow.observe([3, 1])
    assert 0 < cut._downward_sum == narrow._downward_sum
