"""Plays a stream of requests against one engine's HTTP API and keeps what it answered.

A stream has phases.  A phase is a closed loop: a fixed number of requests run at a time, and the
next one is sent when one is answered.  `play` begins a phase when the last answer of the one before
is in, so the batch also shrinks at the end of each burst; in `play_overlapping` the next phase's
limit holds as soon as all requests of a phase have begun, and what still runs ends beside it, as
traffic does.

Token ids go in and come out, greedy and with `ignore_eos`, so that plays can be compared token by
token.  Steps and accepted drafts are taken from SGLang's per-request counters; its
`spec_accept_rate` divides by the startup draft length and is wrong as soon as that moves.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import aiohttp

from lab.harness.errors import EngineFailedError, LostRequestError
from lab.harness.measured import Spread

# Nothing in a stream takes a tenth of these; a request that does is lost.
REQUEST_SECONDS = 120.0
# For engines whose steps a pace stretches, or whose queue is long.
PATIENT_REQUEST_SECONDS = 600.0
# How often a phase that loses requests is played again before the play fails.
_REPLAYS_MAX = 2


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One prompt (token ids) and how many tokens to decode, whatever they are.

    index: in the stream.  rid: the id that the engine is given; "": it makes one.
    """

    index: int
    domain: str
    prompt: tuple[int, ...]
    new_tokens: int
    rid: str = ""


@dataclass(frozen=True, slots=True)
class StreamPhase:
    """Requests that are played `concurrency` at a time."""

    name: str
    concurrency: int
    requests: tuple[StreamRequest, ...]

    @classmethod
    def from_prompts(
        cls, domain: str, concurrency: int, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> Self:
        """Makes the phase of a stream that has no other: prompts of one domain, like answers."""
        requests = (
            StreamRequest(index, domain, tuple(prompt), new_tokens)
            for index, prompt in enumerate(prompts)
        )
        return cls(domain, concurrency, tuple(requests))

    @property
    def new_tokens(self) -> int:
        """Tokens that the phase decodes."""
        return sum(request.new_tokens for request in self.requests)

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of its requests, sorted."""
        return tuple(sorted({request.domain for request in self.requests}))


Progress = Callable[[StreamPhase], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    verify_steps: decode steps that verified drafts of this sequence, 0 without speculation;
    accepted: draft tokens accepted in them; seconds: from sending to the whole answer.
    accepted_counts: [drafts + 1] verifications by the number of drafts that they accepted; empty
    without speculation.
    """

    request: StreamRequest
    tokens: tuple[int, ...]
    verify_steps: int
    accepted: int
    seconds: float
    accepted_counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PhasePlay:
    """The played phase: until its last answer, or until the next one began.

    started: on the monotonic clock.
    """

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

    lost_requests: one sentence for every time that a phase lost a request and was played again;
    `phases` holds only the attempt that was answered in full.
    """

    phases: tuple[PhasePlay, ...]
    lost_requests: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers, in the order of the stream."""
        answers = [answer for phase in self.phases for answer in phase.answers]
        return tuple(sorted(answers, key=lambda answer: answer.request.index))

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


def paired_ratio(
    candidate_plays: Sequence[Play], baseline_plays: Sequence[Play], phase: int | None = None
) -> Spread:
    """Tokens/s of ours over theirs, play by play, so that slow drift of the machine cancels.

    phase: counted from 0; None for the whole stream.
    """
    return phase_rates(candidate_plays, phase).ratio_to(phase_rates(baseline_plays, phase))


def phase_rates(plays: Sequence[Play], phase: int | None = None) -> Spread:
    """Tokens/s of each play, of one phase (counted from 0) or of the whole stream."""
    parts = plays if phase is None else [play.phases[phase] for play in plays]
    return Spread(tuple(part.tokens_per_second for part in parts))


def acceptance_length(answers: Sequence[Answer]) -> float:
    """Tokens that a sequence gained per decode step, on average (1.0 without speculation)."""
    steps = sum(answer.verify_steps for answer in answers)
    return 1.0 + sum(answer.accepted for answer in answers) / steps if steps else 1.0


async def play(
    stream: Sequence[StreamPhase],
    url: str,
    progress: Progress | None = None,
    request_seconds: float = REQUEST_SECONDS,
) -> Play:
    """Plays the phases one after the other.

    The engine's prefix cache is emptied first, so that every play computes its prompts.  A phase
    that loses a request is played again from its beginning.
    Raises EngineFailedError when the engine refuses a request, LostRequestError when a phase loses
    requests in every attempt.
    """
    async with engine_session(url, request_seconds) as session:
        await _flush_cache(session)
        played: list[PhasePlay] = []
        lost_requests: list[str] = []
        for phase in stream:
            if progress is not None:
                progress(phase)
            played.append(await _play_until_answered(phase, session, lost_requests))
    return Play(tuple(played), tuple(lost_requests))


async def play_overlapping(stream: Sequence[StreamPhase], url: str) -> Play:
    """Plays the phases as a closed loop whose limit moves, with an empty prefix cache.

    Raises EngineFailedError when the engine refuses or loses a request.
    """
    phase_starts: list[float] = []
    async with engine_session(url, PATIENT_REQUEST_SECONDS) as session:
        await _flush_cache(session)
        async with _ClosedLoop(session) as loop:
            for phase in stream:
                phase_starts.append(time.monotonic())
                await loop.send(phase)
            await loop.drain()
        phase_starts.append(time.monotonic())
    answers = {answer.request.index: answer for answer in loop.answers}
    return Play(
        tuple(
            PhasePlay(phase, tuple(answers[r.index] for r in phase.requests), begin, end - begin)
            for phase, (begin, end) in zip(stream, pairwise(phase_starts), strict=True)
        )
    )


async def _play_until_answered(
    phase: StreamPhase, session: aiohttp.ClientSession, lost_requests: list[str]
) -> PhasePlay:
    """Plays a phase until all requests are answered; notes others in `lost_requests`."""
    for _ in range(_REPLAYS_MAX):
        try:
            return await _play_phase(phase, session)
        except LostRequestError as error:
            lost_requests.append(f"phase {phase.name!r} was played again: {error}")
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
    started = time.monotonic()
    async with _ClosedLoop(session) as loop:
        await loop.send(phase)
        await loop.drain()
    seconds = time.monotonic() - started
    answers = sorted(loop.answers, key=lambda answer: answer.request.index)
    return PhasePlay(phase, tuple(answers), started, seconds)


class _ClosedLoop:
    """Sends requests while fewer than the limit run.  Leaving the context ends what still runs.

    answers: so far, as they came.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._running: set[asyncio.Task[Answer]] = set()
        self.answers: list[Answer] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # When one request has failed, the others must not run beside the next play.
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def send(self, phase: StreamPhase) -> None:
        """Begins all requests of a phase, in order, at most its concurrency at a time."""
        for request in phase.requests:
            while len(self._running) >= phase.concurrency:
                await self._collect()
            self._running.add(asyncio.create_task(_generate(request, self._session)))

    async def drain(self) -> None:
        """Waits for all answers."""
        while self._running:
            await self._collect()

    async def _collect(self) -> None:
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            self._running.discard(task)
            self.answers.append(task.result())


async def _generate(request: StreamRequest, session: aiohttp.ClientSession) -> Answer:
    body: dict[str, Any] = {
        "input_ids": list(request.prompt),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": request.new_tokens,
            "ignore_eos": True,
        },
    }
    if request.rid:
        body["rid"] = request.rid
    send_time = time.monotonic()
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
    seconds = time.monotonic() - send_time
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
        tuple(meta.get("spec_correct_drafts_histogram") or ()),
    )
