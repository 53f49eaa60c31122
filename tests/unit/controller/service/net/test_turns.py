"""Work that takes the event loop for long leaves room for others between its pieces."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from pathlib import Path

import pytest

from controller.service.net import limits
from controller.service.net.errors import TooManyCallsError
from controller.service.net.limits import FairQueue
from speculation.v1 import policy_pb2, service_pb2
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    RunningSidecar,
    running_sidecar,
    with_timeout,
)

PIECE_SECONDS = 0.005


async def test_others_have_their_turn_after_every_piece():
    turns, order = FairQueue(10), []

    def piece() -> None:
        time.sleep(PIECE_SECONDS)
        order.append("piece")

    async def other() -> None:
        while order.count("piece") < 5:
            order.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(*(turns.run(piece) for _ in range(5)), other())
    pieces = [number for number, who in enumerate(order) if who == "piece"]
    assert len(pieces) == 5
    assert all(after > before + 1 for before, after in itertools.pairwise(pieces))


async def test_more_than_may_wait_are_refused_and_the_others_are_served():
    turns = FairQueue(3)
    results = await asyncio.gather(
        *(turns.run(lambda: "done") for _ in range(6)), return_exceptions=True
    )
    assert results[:4] == ["done"] * 4
    assert all(isinstance(result, TooManyCallsError) for result in results[4:])
    assert await turns.run(lambda: "later") == "later"


async def test_a_piece_that_fails_fails_alone():
    turns = FairQueue(3)

    def fail() -> None:
        raise TooManyCallsError("this one")

    results = await asyncio.gather(
        turns.run(fail), turns.run(lambda: "done"), return_exceptions=True
    )
    assert isinstance(results[0], TooManyCallsError)
    assert results[1] == "done"


def pieces(order: list[str], name: str, count: int) -> Generator[None, None, str]:
    for _ in range(count):
        time.sleep(PIECE_SECONDS)
        order.append(name)
        yield
    return name


async def test_calls_of_several_pieces_alternate_and_others_come_between():
    turns, order = FairQueue(10), list[str]()

    async def other() -> None:
        while order.count("long") < 6:
            order.append("other")
            await asyncio.sleep(0)

    long, short, _ = await asyncio.gather(
        turns.run_sliced(pieces(order, "long", 6)),
        turns.run_sliced(pieces(order, "short", 2)),
        other(),
    )
    assert (long, short) == ("long", "short")
    worked = [number for number, who in enumerate(order) if who != "other"]
    # The short one asked when the long one had begun and waited for its second piece.
    assert [order[number] for number in worked] == ["long", *["long", "short"] * 2, *["long"] * 3]
    assert all(after > before + 1 for before, after in itertools.pairwise(worked))


async def test_after_a_piece_the_loop_is_free_for_longer_than_it_took():
    turns, times = FairQueue(10), list[tuple[float, float]]()

    def piece() -> None:
        began = time.monotonic()
        time.sleep(PIECE_SECONDS)
        times.append((began, time.monotonic()))

    await asyncio.gather(*(turns.run(piece) for _ in range(4)))
    pauses = [after[0] - before[1] for before, after in itertools.pairwise(times)]
    # Three times as long; a loop's timers may ring a little early.
    assert min(pauses) > 2 * PIECE_SECONDS


async def test_work_that_is_short_is_not_interrupted(monkeypatch: pytest.MonkeyPatch):
    # However long the machine takes for it.
    monkeypatch.setattr(limits, "_SLICE_SECONDS", PATIENCE_SECONDS)
    turns, order = FairQueue(1), list[str]()

    def short() -> Generator[None, None, None]:
        for _ in range(3):
            asyncio.get_running_loop().call_soon(order.append, "other")
            order.append("short")
            yield

    await turns.run_sliced(short())
    assert order == ["short"] * 3


async def test_work_that_has_begun_is_not_refused():
    turns, order = FairQueue(2), list[str]()
    calls = [turns.run_sliced(pieces(order, str(number), 3)) for number in range(4)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[:2] == ["0", "1"]
    assert all(isinstance(result, TooManyCallsError) for result in results[2:])


async def test_a_turn_is_the_only_one_until_its_block_ends_and_a_cancelled_one_is_free():
    turns, active_numbers = FairQueue(5), list[int]()

    async def take(number: int, ending: asyncio.Event) -> None:
        async with turns.turn():
            active_numbers.append(number)
            await ending.wait()
            active_numbers.remove(number)

    never, now = asyncio.Event(), asyncio.Event()
    now.set()
    first = asyncio.create_task(take(1, never))
    await asyncio.sleep(0)
    others = [asyncio.create_task(take(number, now)) for number in (2, 3)]
    await asyncio.sleep(0.01)
    assert active_numbers == [1]
    first.cancel()
    await asyncio.gather(*others)
    assert first.cancelled()


def kinds(running: RunningSidecar) -> Mapping[str, Awaitable[object]]:
    """One call of each list."""
    return {
        "ListEngines": running.inspection.ListEngines(service_pb2.ListEnginesRequest()),
        "Overview": running.inspection.Overview(service_pb2.OverviewRequest()),
        "ListFleet": running.inspection.ListFleet(service_pb2.ListFleetRequest()),
        "ListProfiles": running.profiling.ListProfiles(service_pb2.ListProfilesRequest()),
        "ListOverrides": running.policy.ListOverrides(policy_pb2.ListOverridesRequest()),
    }


@pytest.mark.parametrize(
    "kind", ["ListEngines", "Overview", "ListFleet", "ListProfiles", "ListOverrides"]
)
async def test_every_list_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    taken = 0
    take = FairQueue.run_sliced

    async def counted(self: FairQueue, work: Generator[None, None, object]) -> object:
        nonlocal taken
        taken += 1
        return await take(self, work)

    async with running_sidecar(tmp_path, warm_start=False) as running:
        await running.introduce()
        monkeypatch.setattr(FairQueue, "run_sliced", counted)
        await with_timeout(kinds(running)[kind])
    assert taken


async def test_introductions_and_explanations_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    taken, take = 0, FairQueue.run

    async def counted(self: FairQueue, work: Callable[[], object]) -> object:
        nonlocal taken
        taken += 1
        return await take(self, work)

    monkeypatch.setattr(FairQueue, "run", counted)
    async with running_sidecar(tmp_path) as running:
        await asyncio.gather(*(running.introduce(f"e{number}") for number in range(20)))
        await running.introduce()
        await asyncio.gather(*(running.explain() for _ in range(20)))
    assert taken == 41
