"""A step is compared with the one before, and a shape is new once."""

from engine_shim.common.arm_history import ArmHistory, ExecutedArm
from tests.support.step_reports import fill_report, flags_of


def change(arms: ArmHistory, ran: ExecutedArm) -> set[str]:
    return flags_of(fill_report(lambda report: arms.flag_change(ran, report)))


def test_the_first_step_has_a_new_shape_and_switches_nothing():
    assert change(ArmHistory(), (0, 3, False, 2)) == {"first_use"}


def test_another_draft_length_switches_and_another_batch_does_not():
    arms = ArmHistory()
    change(arms, (0, 3, False, 2))
    assert change(arms, (0, 3, False, 4)) == {"first_use"}
    assert change(arms, (0, 5, False, 4)) == {"first_use", "switched"}
    assert change(arms, (0, 3, False, 2)) == {"switched"}
    assert arms.last_arm == (0, 3, False, 2)


def test_batches_that_are_padded_to_the_same_graph_have_one_shape():
    arms = ArmHistory((1, 4, 8))
    change(arms, (0, 3, False, 2))
    assert change(arms, (0, 3, False, 4)) == set()
    assert change(arms, (0, 3, False, 5)) == {"first_use"}
    assert [arms.padded_batch_size(size) for size in (1, 2, 8, 9)] == [1, 4, 8, 9]
