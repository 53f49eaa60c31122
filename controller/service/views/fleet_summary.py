"""Publishes this sidecar's engines to the others, and reads what they publish, with distrust.

A summary is a short text in JSON, which a sidecar writes into the store every few seconds.  It runs
beside everything else: if the store is away, a text is lost, and nothing waits for it.  Whoever can
write to the store can write such a text.  So a reader checks every type, bound and character; what
is wrong with one engine hides that engine only, and is counted.
"""

import asyncio
import contextlib
import json
import math
import random
import secrets
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Final, Literal, Self

import structlog
from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    with_config,
)

import controller
from controller.core.engine_spec import MAX_BATCH_SIZE, MAX_GAMMA
from controller.service.views.engine_status import EngineLine
from controller.service.views.status_cache import StatusCache
from controller.store.interface import StoreUnavailableError, SummaryBoard
from controller.util.text import printable

# Engines of one text, and its bytes.
ENGINES_MAX: Final = 1024
BYTES_MAX: Final = 512 * 1024
# Ids of overrides that an engine's entry names; the others are counted.
OVERRIDES_MAX: Final = 8
# The shortest and the longest time between two texts of a sidecar.
EVERY_SECONDS: Final = (0.1, 120.0)
_WORDS_MAX = 200
_AMOUNT_MAX = 1e12
_STRICT = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
_Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
_Amount = Annotated[float, Field(ge=0, le=_AMOUNT_MAX)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
PUBLISH_SECONDS = 5.0
# The most of the event loop's time that summaries take: many engines are published less often.
_SHARE_MAX = 0.01
# Taking the text away at the end of a sidecar may take so long.
_LAST_WORDS_SECONDS = 1.0

_log = structlog.get_logger(__name__)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("characters that cannot be printed")
    return text


_Words = Annotated[str, Field(max_length=_WORDS_MAX), AfterValidator(_printable)]


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class EngineSummary:
    """Holds what is published of one engine; the fields are those of EngineLine.

    more_overrides: those that are in force beyond the ones that are named.
    """

    engine_id: _Id
    target_model: _Words
    batch_size: Annotated[int, Field(ge=0, le=MAX_BATCH_SIZE)]
    drafter: _Words
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)]
    link: Literal["steered", "alone", "away", "waiting", ""]
    reason: _Words
    seconds_since_report: _Amount
    accept_length: _Amount | None = None
    tokens_per_second: _Amount | None = None
    gain: _Amount | None = None
    overrides: Annotated[tuple[_Id, ...], Field(max_length=OVERRIDES_MAX)] = ()
    more_overrides: _Count = 0
    unavailable: _Words = ""
    generated_per_second: _Amount | None = None


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class SidecarSummary:
    """Holds the text of one sidecar.

    sidecar: its host's name.  every_seconds: until its next text.  left_out: engines that did not
    fit into it.
    """

    format: Literal["speculation-fleet/1"]
    sidecar: Annotated[_Words, Field(min_length=1)]
    version: _Words
    every_seconds: Annotated[float, Field(ge=EVERY_SECONDS[0], le=EVERY_SECONDS[1])]
    left_out: _Count
    engines: Annotated[list[Any], Field(max_length=ENGINES_MAX)]


@dataclass(frozen=True, slots=True)
class FleetMember:
    """This sidecar among others.

    source: stands for this process in the store.  name: for people.
    """

    source: str
    name: str

    @classmethod
    def of_this_process(cls) -> Self:
        """Takes the name of the host, which is the pod's in Kubernetes."""
        return cls(secrets.token_hex(8), _short(socket.gethostname()) or "unnamed")


_SIDECAR = TypeAdapter(SidecarSummary)
_ENGINE = TypeAdapter(EngineSummary)
_DEFAULTS = {field.name: field.default for field in fields(EngineSummary)}


def summary_of(line: EngineLine) -> EngineSummary:
    """Shortens what is long and no id; ids are never shortened."""
    return EngineSummary(
        engine_id=line.engine_id,
        target_model=_short(line.target_model),
        batch_size=line.batch_size,
        drafter=line.drafter,
        gamma=line.gamma,
        link=line.link,  # type: ignore[arg-type]  # EngineLine names the same
        reason=line.reason,
        seconds_since_report=_amount(line.seconds_since_report) or 0.0,
        accept_length=_amount(line.accept_length),
        tokens_per_second=_amount(line.tokens_per_second),
        gain=_amount(line.gain),
        overrides=line.overrides[:OVERRIDES_MAX],
        more_overrides=len(line.overrides[OVERRIDES_MAX:]),
        unavailable=_short(line.unavailable),
        generated_per_second=_amount(line.generated_per_second),
    )


def encode_summary(
    sidecar: str, version: str, every_seconds: float, engines: Iterable[EngineSummary]
) -> bytes:
    """Returns a sidecar's text; what goes beyond its bounds is left out, and counted in it."""
    head = SidecarSummary("speculation-fleet/1", sidecar, version, every_seconds, 0, [])
    room = BYTES_MAX - len(_json(asdict(head))) - len(str(10**7))
    kept: list[str] = []
    left_out = 0
    for engine in engines:
        text = _json({k: v for k, v in asdict(engine).items() if v != _DEFAULTS[k]})
        room -= len(text) + 1
        if room < 0 or len(kept) == ENGINES_MAX:
            left_out += 1
        else:
            kept.append(text)
    values = asdict(head) | {"left_out": left_out}
    del values["engines"]
    return f'{_json(values)[:-1]},"engines":[{",".join(kept)}]}}'.encode()


def decode_summary(body: bytes) -> tuple[SidecarSummary, list[EngineSummary], int]:
    """Returns a text's head, its engines, and how many of these cannot be used.

    Raises ValueError for what is no such text.
    """
    head = _SIDECAR.validate_json(body)
    found: dict[str, EngineSummary] = {}
    refused = 0
    for item in head.engines:
        try:
            # As JSON, where the strict mode takes an object for a dataclass and a list for a tuple.
            engine = _ENGINE.validate_json(_json(item))
        except ValueError:
            refused += 1
            continue
        refused += engine.engine_id in found
        found.setdefault(engine.engine_id, engine)
    return head, list(found.values()), refused


def _json(values: Any) -> str:
    """Only ASCII, so that characters and bytes are as many."""
    return json.dumps(values, separators=(",", ":"), allow_nan=True)


def _amount(value: float | None) -> float | None:
    """Returns what a reader takes; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{min(max(value, 0.0), _AMOUNT_MAX):.6g}")


def _short(words: str) -> str:
    """Cuts words, and replaces what cannot be printed: others refuse it."""
    shown = printable(words)
    return shown if len(shown) <= _WORDS_MAX else shown[: _WORDS_MAX - 1] + "…"


@dataclass(slots=True)
class Published:
    """Counts texts since the start.  failed: those that the store did not take."""

    written: int = 0
    failed: int = 0


@dataclass(eq=False, repr=False)
class FleetPublisher:
    """One per sidecar.  board: None if no other sidecar would read it."""

    board: SummaryBoard | None
    status_cache: StatusCache
    me: FleetMember
    published: Published = field(default_factory=Published, init=False)
    _began: bool = field(default=False, init=False)

    async def close(self) -> None:
        """Takes the text away: a sidecar that was stopped is not silent, but gone."""
        if self.board is None or not self._began:
            return
        with contextlib.suppress(StoreUnavailableError, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self.board.remove(self.me.source)

    async def publish(self) -> None:
        """Publishes from time to time, until cancelled."""
        assert self.board is not None
        board, trouble = self.board, ""
        self._began = True
        while True:
            lines = await self.status_cache.lines()
            every = self._seconds()
            # A thread's work: a thousand engines take some tens of milliseconds.
            body = await asyncio.to_thread(self._encoded, lines, every)
            try:
                await board.put(self.me.source, body)
            except StoreUnavailableError as error:
                self.published.failed += 1
                if not trouble:
                    _log.warning("fleet_not_published", error=str(error))
                trouble = str(error)
            else:
                self.published.written += 1
                if trouble:
                    _log.info("fleet_published_again")
                trouble = ""
            await asyncio.sleep(every * random.uniform(0.8, 1.2))

    def _encoded(self, lines: Sequence[EngineLine], every_seconds: float) -> bytes:
        engines = map(summary_of, lines)
        return encode_summary(self.me.name, controller.__version__, every_seconds, engines)

    def _seconds(self) -> float:
        """Seconds until the next text."""
        busy = self.status_cache.lines_seconds
        return min(max(PUBLISH_SECONDS, busy / _SHARE_MAX), EVERY_SECONDS[1])
