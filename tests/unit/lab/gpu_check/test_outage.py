import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lab.gpu_check.budget import Deadline, OutOfTimeError
from lab.gpu_check.parts.outage import RepeatedPlay, wait_until
from lab.harness.errors import HarnessError
from lab.harness.load_generator import Play


def test_the_stream_is_played_until_the_context_is_left():
    twice = threading.Event()
    plays: list[Play] = []

    def play() -> Play:
        plays.append(Play(()))
        if len(plays) >= 2:
            twice.set()
        return plays[-1]

    with RepeatedPlay(play) as player:
        assert twice.wait(30)
    assert player.plays == plays
    assert player.error is None


def test_an_engine_that_fails_ends_it():
    def play() -> Play:
        raise HarnessError("the engine is gone")

    with RepeatedPlay(play) as player:
        player._thread.join(30)
    assert str(player.error) == "the engine is gone"
    assert player.plays == []


def test_a_wait_that_the_budget_ends_is_out_of_time():
    check: Any = SimpleNamespace(deadline=Deadline(0.0))
    with pytest.raises(OutOfTimeError, match="until the engine is steered"):
        wait_until(check, lambda: False, RepeatedPlay(lambda: Play(())), "the engine is steered")
