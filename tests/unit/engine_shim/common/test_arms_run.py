"""A step is compared with the one before, and a shape is new once."""

from engine_shim.common.arms_run import ArmsRun
from engine_shim.link.packets import FIRST_USE, SWITCHED


def test_the_first_step_has_a_new_shape_and_switches_nothing():
    assert ArmsRun().change((0, 3, False, 2)) == FIRST_USE


def test_another_draft_length_switches_and_another_batch_does_not():
    arms = ArmsRun()
    arms.change((0, 3, False, 2))
    assert arms.change((0, 3, False, 4)) == FIRST_USE
    assert arms.change((0, 5, False, 4)) == FIRST_USE | SWITCHED
    assert arms.change((0, 3, False, 2)) == SWITCHED
    assert arms.last == (0, 3, False, 2)


def test_batches_that_are_padded_to_the_same_graph_have_one_shape():
    arms = ArmsRun((1, 4, 8))
    arms.change((0, 3, False, 2))
    assert arms.change((0, 3, False, 4)) == 0
    assert arms.change((0, 3, False, 5)) == FIRST_USE
    assert [arms.padded(size) for size in (1, 2, 8, 9)] == [1, 4, 8, 9]
