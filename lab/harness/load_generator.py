"""Plays a stream against one engine's HTTP API and keeps what it answered.

Token ids go in and come out, greedy and with `ignore_eos`, so that plays can be compared token by
token.  Steps and accepted drafts are taken from SGLang's per-request counters; its
`spec_accept_rate` divides by the startup draft length and is wrong as soon as that moves.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from lab.harness.errors import EngineFailedError, LostRequestError
from lab.harness.foreign_load import ForeignLoad
from lab.harness.spread import Spread
from lab.harness.stream import StreamPhase, StreamRequest

# Nothing in the stream takes a tenth of this; a request that does is lost.
_REQUEST_TIMEOUT_SECONDS = 120.0
# A phase that lost a request is played again so many times before the play fails.
_REPLAYS_MAX = 2

Progress = Callable[[StreamPhase], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    verify_steps: decode steps that verified drafts of this sequence, 0 without speculation;
    accepted: draft tokens accepted in them; seconds: from sending to the whole answer.
    """

    request: StreamRequest
    tokens: tuple[int, ...]
    verify_steps: int
    accepted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PhasePlay:
    """A phase as it was played; `started` is on the monotonic clock."""

    phase: StreamPhase
    answers: tuple[Answer, ...]
    started: float
    seconds: float

    @property
    def tokens(self) -> int:
        """The number of tokens that were decoded."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """The rate of all its clients together."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Play:
    """One pass over the stream.

    foreign_cores: how many cores other programs kept busy meanwhile, on average.
    lost: one sentence for every time that a phase lost a request and was played again; `phases`
    holds only the attempt that was answered in full.
    """

    phases: tuple[PhasePlay, ...]
    foreign_cores: float = 0.0
    lost: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers, in the order of the stream."""
        found = [answer for phase in self.phases for answer in phase.answers]
        return tuple(sorted(found, key=lambda answer: answer.request.index))

    @property
    def seconds(self) -> float:
        """The time spent in phases; the load generator's own work between them is left out."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_second(self) -> float:
        """All tokens divided by all time."""
        return sum(phase.tokens for phase in self.phases) / self.seconds


def engine_session(url: str, timeout_seconds: float) -> aiohttp.ClientSession:
    """A session for the engine at `url` that opens a new connection for every request.

    An HTTP server closes a connection that has been idle for some seconds (uvicorn: 5 s).  A client
    that reuses such a connection in the same moment loses its request, and a generation cannot be
    sent again silently.  A new connection on loopback costs less than a millisecond.

    timeout_seconds: for one whole request, from connecting to the last byte of the answer.
    """
    return aiohttp.ClientSession(
        url,
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    )


def paired_ratio(ours: Sequence[Play], theirs: Sequence[Play], phase: int | None = None) -> Spread:
    """Tokens/s of ours over theirs, play by play, so that slow drift of the machine cancels.

    phase: counted from 0; None for the whole stream.
    """
    rates = zip(phase_rates(ours, phase).values, phase_rates(theirs, phase).values, strict=True)
    return Spread(tuple(a / b for a, b in rates))


def phase_rates(plays: Sequence[Play], phase: int | None = None) -> Spread:
    """Tokens/s of each play, of one phase (counted from 0) or of the whole stream."""
    parts = plays if phase is None else [play.phases[phase] for play in plays]
    return Spread(tuple(part.tokens_per_second for part in parts))


def acceptance_length(answers: Sequence[Answer]) -> float:
    """Tokens that a sequence gained per decode step, on average (1.0 without speculation)."""
    steps = sum(answer.verify_steps for answer in answers)
    return 1.0 + sum(answer.accepted for answer in answers) / steps if steps else 1.0


async def play(stream: Sequence[StreamPhase], url: str, progress: Progress | None = None) -> Play:
    """Plays the phases one after the other.

    The engine's prefix cache is emptied first, so that every play computes its prompts.  A phase
    that loses a request is played again from its beginning.
    Raises EngineFailedError when the engine refuses a request, LostRequestError when the same phase
    loses requests time and again.
    """
    async with engine_session(url, _REQUEST_TIMEOUT_SECONDS) as session:
        await _flush_cache(session)
        played: list[PhasePlay] = []
        lost: list[str] = []
        with ForeignLoad() as others:
            for phase in stream:
                if progress is not None:
                    progress(phase)
                played.append(await _play_whole_phase(phase, session, lost))
    return Play(tuple(played), others.cores, tuple(lost))


async def _play_whole_phase(
    phase: StreamPhase, session: aiohttp.ClientSession, lost: list[str]
) -> PhasePlay:
    """Plays a phase until every request was answered; appends a sentence to `lost` otherwise."""
    for _ in range(_REPLAYS_MAX):
        try:
            return await _play_phase(phase, session)
        except LostRequestError as error:
            lost.append(f"phase {phase.name!r} was played again: {error}")
            await _post(
                session, "/abort_request", "did not abort its requests", json={"abort_all": True}
            )
            await _flush_cache(session)
    return await _play_phase(phase, session)


async def _flush_cache(session: aiohttp.ClientSession) -> None:
    # The engine refuses while it still has a request; it waits that long for its own health probe.
    await _post(session, "/flush_cache", "did not empty its prefix cache", params={"timeout": "10"})


async def _post(session: aiohttp.ClientSession, path: str, failure: str, **arguments: Any) -> None:
    try:
        async with session.post(path, **arguments) as response:
            if response.status != 200:
                raise EngineFailedError(
                    f"the engine at {response.url} {failure}: "
                    f"{response.status} {(await response.text())[:200]}"
                )
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailedError(f"the engine does not answer: {error!r}") from error


async def _play_phase(phase: StreamPhase, session: aiohttp.ClientSession) -> PhasePlay:
    waiting = iter(phase.requests)
    answers: list[Answer] = []

    async def client() -> None:
        for request in waiting:
            answers.append(await _generate(request, session))  # noqa: PERF401  # as they come

    started = time.monotonic()
    clients = [asyncio.create_task(client()) for _ in range(phase.concurrency)]
    try:
        await asyncio.gather(*clients)
    finally:
        # When one client failed, the others must not play on beside what comes next.
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    seconds = time.monotonic() - started
    answers.sort(key=lambda answer: answer.request.index)
    return PhasePlay(phase, tuple(answers), started, seconds)


async def _generate(request: StreamRequest, session: aiohttp.ClientSession) -> Answer:
    body = {
        "input_ids": list(request.prompt),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": request.new_tokens,
            "ignore_eos": True,
        },
    }
    sent = time.monotonic()
    try:
        async with session.post("/generate", json=body) as response:
            if response.status != 200:
                raise EngineFailedError(
                    f"request {request.index}: the engine answered {response.status} "
                    f"{(await response.text())[:200]}"
                )
            reply: dict[str, Any] = await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LostRequestError(f"request {request.index} was lost: {error!r}") from error
    seconds = time.monotonic() - sent
    tokens = tuple(reply["output_ids"])
    if len(tokens) != request.new_tokens:
        raise EngineFailedError(
            f"request {request.index}: asked for {request.new_tokens} tokens, got {len(tokens)}"
        )
    meta = reply["meta_info"]
    return Answer(
        request,
        tokens,
        int(meta.get("spec_verify_ct", 0)),
        int(meta.get("spec_num_correct_drafts", 0)),
        seconds,
    )
