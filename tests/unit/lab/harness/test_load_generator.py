import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lab.harness.load_generator import (
    StreamPhase,
    StreamRequest,
    acceptance_length,
    play,
    play_overlapping,
)
from tests.support.closing_server import ClosingServer

Body = dict[str, Any]
Generate = Callable[["Echo", Body], Awaitable[web.Response]]


@dataclass
class Echo:
    """An HTTP server that answers as SGLang does; the tokens are the prompt's first one."""

    generate: Generate | None = None
    flush_status: int = 200
    calls: list[str] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    open_now: int = 0
    open_most: int = 0

    async def handle_generate(self, request: web.Request) -> web.Response:
        self.calls.append("generate")
        body = await request.json()
        self.prompts.append(body["input_ids"][0])
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        try:
            if self.generate is not None:
                return await self.generate(self, body)
            await asyncio.sleep(0.002)
            return self.answer(body)
        finally:
            self.open_now -= 1

    def answer(self, body: Body, **meta: int) -> web.Response:
        assert body["sampling_params"]["temperature"] == 0
        assert body["sampling_params"]["ignore_eos"] is True
        tokens = [body["input_ids"][0]] * body["sampling_params"]["max_new_tokens"]
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    async def handle_flush(self, request: web.Request) -> web.Response:
        self.calls.append("flush")
        return web.Response(status=self.flush_status, text="no")


@asynccontextmanager
async def served(echo: Echo) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_post("/generate", echo.handle_generate)
    application.router.add_post("/flush_cache", echo.handle_flush)
    async with TestServer(application) as server:
        yield str(server.make_url("/"))


def phase(name: str, concurrency: int, first: int, count: int) -> StreamPhase:
    requests = tuple(StreamRequest(i, "json", (100 + i, 1), 3) for i in range(first, first + count))
    return StreamPhase(name, concurrency, requests)


async def test_each_phase_keeps_its_concurrency_and_the_next_waits_for_its_end():
    echo = Echo()
    most: list[int] = []

    def progress(_: StreamPhase) -> None:
        most.append(echo.open_most)
        assert echo.open_now == 0
        echo.open_most = 0

    async with served(echo) as url:
        played = await play((phase("a", 1, 0, 3), phase("b", 4, 3, 9)), url, progress)
    assert most == [0, 1]
    assert echo.open_most == 4
    assert [p.phase.name for p in played.phases] == ["a", "b"]
    assert played.phases[1].started >= played.phases[0].started + played.phases[0].seconds


async def test_a_phase_may_begin_while_the_last_ones_requests_run():
    async def slow_first(echo: Echo, body: Body) -> web.Response:
        await asyncio.sleep(0.05 if body["input_ids"][0] == 100 else 0.001)
        assert body["rid"] == f"r{body['input_ids'][0] - 100}"
        return echo.answer(body)

    requests = [StreamRequest(i, "json", (100 + i, 1), 3, f"r{i}") for i in range(6)]
    stream = StreamPhase("a", 2, tuple(requests[:2])), StreamPhase("b", 3, tuple(requests[2:]))
    echo = Echo(slow_first)
    async with served(echo) as url:
        played = await play_overlapping(stream, url)
    assert echo.calls[0] == "flush"
    assert echo.open_most == 3
    first, second = played.phases
    # The next phase began when all of the first one's requests had, and one of them still ran.
    assert first.answers[0].seconds > first.seconds
    assert first.started + first.seconds == pytest.approx(second.started)
    assert [answer.request.index for answer in played.answers] == list(range(6))
    assert played.seconds == pytest.approx(second.started + second.seconds - first.started)


async def test_requests_are_sent_in_order_and_answers_come_back_in_order():
    async def slow_first(echo: Echo, body: Body) -> web.Response:
        await asyncio.sleep(0.05 if body["input_ids"][0] == 100 else 0.001)
        return echo.answer(body)

    echo = Echo(slow_first)
    async with served(echo) as url:
        played = await play((phase("a", 2, 0, 6),), url)
    assert echo.prompts == [100, 101, 102, 103, 104, 105]
    assert [answer.request.index for answer in played.answers] == list(range(6))
    assert [answer.tokens for answer in played.answers] == [(100 + i,) * 3 for i in range(6)]


async def test_the_prefix_cache_is_emptied_before_the_first_request():
    echo = Echo()
    async with served(echo) as url:
        await play((phase("a", 1, 0, 2),), url)
    assert echo.calls == ["flush", "generate", "generate"]


async def test_rates_count_all_tokens_over_the_time_in_phases():
    async with served(Echo()) as url:
        played = await play((phase("a", 2, 0, 4), phase("b", 1, 4, 1)), url)
    assert sum(p.tokens for p in played.phases) == 15
    assert played.tokens_per_second == pytest.approx(15 / played.seconds)
    assert played.phases[0].tokens_per_second == pytest.approx(12 / played.phases[0].seconds)


async def test_acceptance_comes_from_the_counters_weighted_by_steps():
    async def with_counters(echo: Echo, body: Body) -> web.Response:
        easy = body["input_ids"][0] == 100
        return echo.answer(
            body, spec_verify_ct=10 if easy else 30, spec_num_correct_drafts=30 if easy else 10
        )

    async with served(Echo(with_counters)) as url:
        played = await play((phase("a", 1, 0, 2),), url)
    assert acceptance_length(played.answers) == pytest.approx(1 + 40 / 40)


async def test_no_request_is_sent_on_a_connection_that_the_server_may_be_closing():
    with ClosingServer() as server:
        played = await play((phase("a", 8, 0, 16), phase("b", 2, 16, 6)), server.url)
    assert len(played.answers) == 22
    assert played.lost_requests == ()
    assert server.reused == 0


async def test_a_phase_that_loses_a_request_is_played_again_and_says_so():
    with ClosingServer(lose=1) as server:
        # One client: with two, the server may read the second one's request after what follows it.
        played = await play((phase("a", 1, 0, 6), phase("b", 1, 6, 1)), server.url)
    assert [answer.request.index for answer in played.answers] == list(range(7))
    (text,) = played.lost_requests
    assert "phase 'a' was played again: request " in text
    # What the lost attempt left is ended and forgotten before the next attempt begins.
    again = server.requests.index("/abort_request")
    assert server.requests[again : again + 2] == ["/abort_request", "/flush_cache"]
    assert server.requests[again + 2 :] == ["/generate"] * 7
