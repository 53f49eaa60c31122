import asyncio
import time

from controller.service.rpc.streams import DecisionScheduler
from tests.support.service_harness import wait_until


async def test_whoever_asks_alone_decides_at_once():
    turns, decided = DecisionScheduler(), []
    turns.schedule(lambda: decided.append(1))
    assert decided == [1]


async def test_many_decide_in_the_order_in_which_they_asked_with_other_work_in_between():
    loop, turns = asyncio.get_running_loop(), DecisionScheduler()
    happened: list[str] = []
    done = asyncio.Event()

    def decide(name: str) -> None:
        happened.append(name)
        time.sleep(0.002)  # a decision occupies the event loop

    def read_reports() -> None:
        if not done.is_set():
            happened.append("reports")
            loop.call_later(0.0002, read_reports)

    for name in "abcd":
        turns.schedule(lambda name=name: decide(name))  # type: ignore[misc]
    turns.schedule(done.set)
    assert happened == ["a"]
    read_reports()
    await asyncio.wait_for(done.wait(), 60)
    assert [name for name in happened if name != "reports"] == ["a", "b", "c", "d"]
    for name in "bcd":
        assert happened[happened.index(name) - 1] == "reports"


async def test_a_turn_is_free_again_when_all_have_decided():
    turns, decided = DecisionScheduler(), []
    for _ in range(2):
        done = asyncio.Event()
        turns.schedule(lambda: decided.append("at once"))
        turns.schedule(done.set)
        await asyncio.wait_for(done.wait(), 60)
        # The turn of the last one ends.
        await wait_until(lambda: turns._is_idle)
    assert decided == ["at once", "at once"]
    turns.schedule(lambda: decided.append("now"))
    assert decided[-1] == "now"
