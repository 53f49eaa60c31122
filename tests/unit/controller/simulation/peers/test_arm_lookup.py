"""Arms by draft length."""

import pytest

from controller.core.engine_spec import Arm
from controller.simulation.peers.arm_lookup import by_gamma, nearest, off_arm, speculating_arm

TWO = (Arm("mtp", 0), Arm("mtp", 3), Arm("dflash", 0), Arm("dflash", 8), Arm("dflash", 4))


def test_a_drafters_arms_come_in_ascending_draft_length():
    assert list(by_gamma(TWO, "dflash").items()) == [(0, 2), (4, 4), (8, 3)]


@pytest.mark.parametrize(("wanted", "found"), [(0, 1), (2, 1), (3, 3), (9, 5)])
def test_the_nearest_draft_length_is_the_shorter_one_of_two(wanted, found):
    assert nearest((5, 1, 3), wanted) == found


def test_an_arm_that_speculates_is_never_plain_decoding_while_there_is_another():
    assert speculating_arm(TWO, "mtp", 0) == 1
    assert speculating_arm((Arm("mtp", 0),), "mtp", 3) == 0


def test_plain_decoding_is_the_drafters_own_where_it_has_one():
    assert off_arm(TWO, "dflash") == 2
    assert off_arm(TWO[:2] + TWO[3:], "dflash") == 0
    assert off_arm(TWO[1:2], "mtp") is None
