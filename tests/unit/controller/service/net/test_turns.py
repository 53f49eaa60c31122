"""Work that takes the event loop for long leaves room for others between its pieces."""

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.service.net.errors import TooManyCallsError
from controller.service.net.limits import Turns
from tests.support.service_harness import serving

PIECE_SECONDS = 0.005


async def test_others_have_their_turn_after_every_piece():
    turns, order = Turns(10), []

    def piece() -> None:
        time.sleep(PIECE_SECONDS)
        order.append("piece")

    async def other() -> None:
        while order.count("piece") < 5:
            order.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(*(turns.take(piece) for _ in range(5)), other())
    pieces = [number for number, who in enumerate(order) if who == "piece"]
    assert len(pieces) == 5
    assert all(after > before + 1 for before, after in itertools.pairwise(pieces))


async def test_more_than_may_wait_are_refused_and_the_others_are_served():
    turns = Turns(3)
    results = await asyncio.gather(
        *(turns.take(lambda: "done") for _ in range(6)), return_exceptions=True
    )
    assert results[:4] == ["done"] * 4
    assert all(isinstance(result, TooManyCallsError) for result in results[4:])
    assert await turns.take(lambda: "later") == "later"


async def test_a_piece_that_fails_fails_alone():
    turns = Turns(3)

    def fail() -> None:
        raise TooManyCallsError("this one")

    results = await asyncio.gather(
        turns.take(fail), turns.take(lambda: "done"), return_exceptions=True
    )
    assert isinstance(results[0], TooManyCallsError)
    assert results[1] == "done"


async def test_introductions_and_explanations_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    taken, take = 0, Turns.take

    async def counted(self: Turns, work: Callable[[], object]) -> object:
        nonlocal taken
        taken += 1
        return await take(self, work)

    monkeypatch.setattr(Turns, "take", counted)
    async with serving(tmp_path) as running:
        await asyncio.gather(*(running.introduce(f"e{number}") for number in range(20)))
        await running.introduce()
        await asyncio.gather(*(running.explain() for _ in range(20)))
    assert taken == 41
