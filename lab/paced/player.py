"""Plays a stream on a paced engine: a closed loop whose limit moves with the phases."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from lab.cpu_engine.pace.acceptance import RequestId
from lab.harness.errors import EngineFailedError
from lab.harness.load_generator import engine_session
from lab.paced.day import Request, Stream

# Nothing in a stream takes a tenth of this.
_REQUEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Served:
    """A request as its client saw it; sent, answered: seconds of the monotonic clock."""

    id: RequestId
    sent: float
    answered: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """A stream as it was played.  began: of each phase; ended: the last answer was in."""

    served: tuple[Served, ...]
    began: tuple[float, ...]
    ended: float


def play(stream: Stream, url: str) -> Played:
    """Plays the stream.  Raises EngineFailedError when the engine refuses or loses a request."""
    return asyncio.run(_play(stream, url))


async def _play(stream: Stream, url: str) -> Played:
    served: list[Served] = []
    began: list[float] = []
    async with engine_session(url, _REQUEST_SECONDS) as session:
        await _flush_cache(session)
        running: set[asyncio.Task[Served]] = set()

        def collect(done: set[asyncio.Task[Served]]) -> None:
            for task in done:
                running.discard(task)
                served.append(task.result())

        try:
            for number, phase in enumerate(stream.phases):
                if number == 0:
                    began.append(time.perf_counter())
                for request in phase.requests:
                    while len(running) >= phase.plan.concurrency:
                        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                        collect(done)
                    running.add(asyncio.create_task(_generate(session, request)))
                # The next limit holds from here on.
                began.append(time.perf_counter())
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                collect(done)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    ended = max(found.answered for found in served)
    return Played(tuple(served), tuple(began[:-1]), ended)


async def _flush_cache(session: aiohttp.ClientSession) -> None:
    async with session.post("/flush_cache", params={"timeout": "10"}) as response:
        if response.status != 200:
            raise EngineFailedError(f"{response.url} did not empty its prefix cache")


async def _generate(session: aiohttp.ClientSession, request: Request) -> Served:
    body = {
        "rid": str(request.id),
        "input_ids": list(request.prompt),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": request.id.output_tokens,
            "ignore_eos": True,
        },
    }
    sent = time.perf_counter()
    try:
        async with session.post("/generate", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                raise EngineFailedError(f"request {request.id}: {response.status} {text}")
            reply: dict[str, Any] = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailedError(f"request {request.id} was lost: {error!r}") from error
    answered = time.perf_counter()
    tokens = tuple(reply["output_ids"])
    if len(tokens) != request.id.output_tokens:
        raise EngineFailedError(f"request {request.id}: {len(tokens)} tokens were decoded")
    return Served(request.id, sent, answered, tokens)
