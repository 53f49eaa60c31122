"""Work that cannot be interrupted is waited for, whoever is cancelled."""

import asyncio

import pytest

from controller.util import tasks


async def test_a_cancelled_caller_waits_for_the_end_of_the_work():
    ending, ended = asyncio.Event(), list[str]()

    async def work() -> str:
        await ending.wait()
        ended.append("work")
        return "done"

    caller = asyncio.create_task(tasks.run_to_completion(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    ending.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == ["work"]


async def test_without_a_cancellation_it_is_the_work_itself():
    async def work() -> str:
        return "done"

    async def fail() -> None:
        raise ValueError("of the work")

    assert await tasks.run_to_completion(work()) == "done"
    with pytest.raises(ValueError, match="of the work"):
        await tasks.run_to_completion(fail())
