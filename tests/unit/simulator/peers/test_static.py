"""The static arm."""

import pytest

from simulator.errors import InvalidInputError
from simulator.peers.static import StaticPolicy
from tests.unit.simulator.peers.loop import ARMS, Loop


def test_it_runs_its_arm_at_every_batch_size():
    loop = Loop(StaticPolicy(ARMS, 3))
    assert set(loop.run(5, 1, 0.7) + loop.run(5, 65_536, 0.0)) == {3}


@pytest.mark.parametrize("index", [-1, len(ARMS)])
def test_an_arm_that_does_not_exist_is_refused(index):
    with pytest.raises(InvalidInputError, match="does not exist"):
        StaticPolicy(ARMS, index)
