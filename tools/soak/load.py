"""Plays changing load: phases of 1 to 16 clients, pauses, requests that are ended early.

All requests are greedy and from a pool of prompts whose plain decoding is known, so that every
token that comes back can be checked.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.harness.load_generator import engine_session

NEW_TOKENS = 128
_PROMPTS_PER_DOMAIN = 6
# One long context among them, which moves what a step costs.
_PROMPT_TOKENS = (48, 56, 64, 64, 96, 384)
# The first phases come in this order, so that a short run sees large and small batches too.
_CLIENTS = (16, 1, 4, 8, 2)
_MIXED = "mixed"
# One request in this many is ended by its client, in turn by an abort and by hanging up.
_EARLY_INTERVAL = 7
_PHASE_SECONDS = (5.0, 12.0)
_PAUSE_SECONDS = (0.5, 3.0)
# After one phase in this many the pause is longer than a plan's lease.
_LONG_PAUSE_INTERVAL = 5
_LONG_PAUSE_SECONDS = 7.0
_REQUEST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of token ids.  plain: plain decoding's answer, `NEW_TOKENS` tokens."""

    domain: str
    ids: tuple[int, ...]
    plain: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """The answer to a request.  is_complete: it was not ended early.

    verify_steps, accepted: SGLang's own counters of the request.
    """

    rid: str
    tokens: tuple[int, ...]
    plain: tuple[int, ...]
    token_limit: int
    is_complete: bool
    verify_steps: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A number of clients for some seconds, then a pause."""

    domain: str
    clients: int
    seconds: float
    pause_seconds: float


def pool() -> tuple[Prompt, ...]:
    """The prompts, without their plain decoding."""
    longest = max(_PROMPT_TOKENS)
    return tuple(
        Prompt(domain, tuple(ids[:length]))
        for domain in DOMAINS
        for ids, length in zip(
            held_out_prompts(domain, _PROMPTS_PER_DOMAIN, longest, seed=31),
            _PROMPT_TOKENS,
            strict=True,
        )
    )


def phases(rng: random.Random) -> Iterator[Phase]:
    """Yields phases without an end; each number of clients comes as often as the others."""
    number = 0
    order = list(_CLIENTS)
    while True:
        for clients in order:
            number += 1
            pause = rng.uniform(*_PAUSE_SECONDS)
            yield Phase(
                rng.choice((*DOMAINS, _MIXED)),
                clients,
                rng.uniform(*_PHASE_SECONDS),
                pause if number % _LONG_PAUSE_INTERVAL else _LONG_PAUSE_SECONDS,
            )
        rng.shuffle(order)


class Load:
    """Plays on the engine at `url`.

    answers, aborted, hung_up: outcomes of the requests so far.  lost_requests: a sentence for each
    request that the engine did not answer although its client had not ended it.
    """

    def __init__(self, url: str, prompts: Sequence[Prompt], seed: int) -> None:
        self._url = url
        self._prompts = prompts
        self._rng = random.Random(seed)
        self._number = 0
        self.answers: list[Served] = []
        self.lost_requests: list[str] = []
        self.aborted = self.hung_up = self.phases = 0

    async def play(self, seconds: float) -> None:
        """Plays for `seconds`, and until the last answer is in."""
        end = time.monotonic() + seconds
        async with engine_session(self._url, _REQUEST_SECONDS) as http:
            for phase in phases(self._rng):
                deadline = min(time.monotonic() + phase.seconds, end)
                self.phases += 1
                await asyncio.gather(
                    *(self._client(http, phase.domain, deadline) for _ in range(phase.clients))
                )
                if time.monotonic() >= end:
                    return
                await asyncio.sleep(min(phase.pause_seconds, max(0.0, end - time.monotonic())))

    async def _client(self, http: aiohttp.ClientSession, domain: str, deadline: float) -> None:
        candidates = [prompt for prompt in self._prompts if domain in (prompt.domain, _MIXED)]
        while time.monotonic() < deadline:
            self._number += 1
            rid = f"soak-{self._number}"
            prompt = self._rng.choice(candidates)
            token_limit = self._rng.randint(16, NEW_TOKENS)
            early, in_turn = divmod(self._number, _EARLY_INTERVAL)
            generating = asyncio.create_task(self._generate(http, rid, prompt, token_limit))
            try:
                if not in_turn:
                    await asyncio.wait({generating}, timeout=self._rng.uniform(0.05, 1.5))
                    if not generating.done():
                        await self._end_early(http, rid, generating, hang_up=early % 2 == 0)
                await asyncio.wait({generating})
                if not generating.cancelled():
                    self.answers.append(generating.result())
            except (aiohttp.ClientError, TimeoutError) as error:
                generating.cancel()
                self.lost_requests.append(f"request {rid} was lost: {error!r}")

    async def _end_early(
        self,
        http: aiohttp.ClientSession,
        rid: str,
        generating: "asyncio.Task[Served]",
        *,
        hang_up: bool,
    ) -> None:
        if hang_up:
            self.hung_up += 1
            generating.cancel()
            return
        self.aborted += 1
        async with http.post("/abort_request", json={"rid": rid}) as response:
            response.raise_for_status()

    async def _generate(
        self, http: aiohttp.ClientSession, rid: str, prompt: Prompt, token_limit: int
    ) -> Served:
        sampling = {"temperature": 0, "max_new_tokens": token_limit, "ignore_eos": True}
        body = {"rid": rid, "input_ids": prompt.ids, "sampling_params": sampling}
        async with http.post("/generate", json=body) as response:
            response.raise_for_status()
            reply: dict[str, Any] = await response.json()
        meta = reply["meta_info"]
        return Served(
            rid,
            tuple(reply.get("output_ids", ())),
            prompt.plain,
            token_limit,
            meta["finish_reason"]["type"] == "length",
            int(meta.get("spec_verify_ct", 0)),
            int(meta.get("spec_num_correct_drafts", 0)),
        )
