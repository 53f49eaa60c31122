"""Publishes this sidecar's engines to other sidecars, and validates the summaries of others.

A summary is a short JSON text that a sidecar writes to the store every few seconds, in the
background.  If the store is unavailable, a summary is lost, and nothing waits for it.  Any process
that can write to the store can write such a text.  A reader therefore checks every type, bound and
character.  An invalid entry hides one engine only, and is counted.
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
from controller.store.interface import StoreUnavailableError, SummaryStore
from controller.util.text import to_printable

# Engines of one summary, and its bytes.
ENGINES_MAX: Final = 1024
BYTES_MAX: Final = 512 * 1024
# Override ids that an engine's entry lists; further ones are counted.
OVERRIDES_MAX: Final = 8
# The shortest and the longest time between two summaries of a sidecar.
INTERVAL_SECONDS_RANGE: Final = (0.1, 120.0)
_TEXT_CHARACTERS_MAX = 200
_AMOUNT_MAX = 1e12
_STRICT = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
_Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]
_Amount = Annotated[float, Field(ge=0, le=_AMOUNT_MAX)]
_Count = Annotated[int, Field(ge=0, le=1_000_000)]
PUBLISH_SECONDS = 5.0
# The largest share of the event loop's time for summaries: many engines are published less often.
_SHARE_MAX = 0.01
# Time limit for removing the summary when the sidecar stops.
_CLOSE_TIMEOUT_SECONDS = 1.0

_log = structlog.get_logger(__name__)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("the text has characters that are not printable")
    return text


_Text = Annotated[str, Field(max_length=_TEXT_CHARACTERS_MAX), AfterValidator(_printable)]


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class EngineSummary:
    """Holds the published values of one engine; the fields are those of EngineLine.

    more_overrides: number of overrides in force that are not listed.
    """

    engine_id: _Id
    target_model: _Text
    batch_size: Annotated[int, Field(ge=0, le=MAX_BATCH_SIZE)]
    drafter: _Text
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)]
    link: Literal["steered", "alone", "away", "waiting", ""]
    reason: _Text
    seconds_since_report: _Amount
    accept_length: _Amount | None = None
    tokens_per_second: _Amount | None = None
    gain: _Amount | None = None
    overrides: Annotated[tuple[_Id, ...], Field(max_length=OVERRIDES_MAX)] = ()
    more_overrides: _Count = 0
    unavailable: _Text = ""
    generated_per_second: _Amount | None = None


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class SidecarSummary:
    """Holds the summary of one sidecar.

    sidecar: its host's name.  every_seconds: the time until its next summary.  left_out: number of
    engines that did not fit.
    """

    format: Literal["speculation-fleet/1"]
    sidecar: Annotated[_Text, Field(min_length=1)]
    version: _Text
    every_seconds: Annotated[
        float, Field(ge=INTERVAL_SECONDS_RANGE[0], le=INTERVAL_SECONDS_RANGE[1])
    ]
    left_out: _Count
    engines: Annotated[list[Any], Field(max_length=ENGINES_MAX)]


@dataclass(frozen=True, slots=True)
class FleetMember:
    """Identifies this sidecar in the fleet.

    source: this process in the store.  name: for people.
    """

    source: str
    name: str

    @classmethod
    def from_this_process(cls) -> Self:
        """Uses the host name, which is the pod's name in Kubernetes."""
        return cls(secrets.token_hex(8), _shorten(socket.gethostname()) or "unnamed")


_SIDECAR = TypeAdapter(SidecarSummary)
_ENGINE = TypeAdapter(EngineSummary)
_DEFAULTS = {field.name: field.default for field in fields(EngineSummary)}


def summary_of(line: EngineLine) -> EngineSummary:
    """Makes a summary; long texts are shortened, ids never are."""
    return EngineSummary(
        engine_id=line.engine_id,
        target_model=_shorten(line.target_model),
        batch_size=line.batch_size,
        drafter=line.drafter,
        gamma=line.gamma,
        link=line.link,  # type: ignore[arg-type]  # EngineLine names the same
        reason=line.reason,
        seconds_since_report=_finite_amount(line.seconds_since_report) or 0.0,
        accept_length=_finite_amount(line.accept_length),
        tokens_per_second=_finite_amount(line.tokens_per_second),
        gain=_finite_amount(line.gain),
        overrides=line.overrides[:OVERRIDES_MAX],
        more_overrides=len(line.overrides[OVERRIDES_MAX:]),
        unavailable=_shorten(line.unavailable),
        generated_per_second=_finite_amount(line.generated_per_second),
    )


def encode_summary(
    sidecar: str, version: str, every_seconds: float, engines: Iterable[EngineSummary]
) -> bytes:
    """Encodes a sidecar's summary; engines beyond its bounds are left out and counted."""
    head = SidecarSummary("speculation-fleet/1", sidecar, version, every_seconds, 0, [])
    bytes_left = BYTES_MAX - len(_json(asdict(head))) - len(str(10**7))
    engine_texts: list[str] = []
    left_out = 0
    for engine in engines:
        text = _json({k: v for k, v in asdict(engine).items() if v != _DEFAULTS[k]})
        bytes_left -= len(text) + 1
        if bytes_left < 0 or len(engine_texts) == ENGINES_MAX:
            left_out += 1
        else:
            engine_texts.append(text)
    values = asdict(head) | {"left_out": left_out}
    del values["engines"]
    return f'{_json(values)[:-1]},"engines":[{",".join(engine_texts)}]}}'.encode()


def decode_summary(body: bytes) -> tuple[SidecarSummary, list[EngineSummary], int]:
    """Decodes a summary into its head, its usable engines, and the number of unusable ones.

    Raises ValueError for a text that is not a summary.
    """
    head = _SIDECAR.validate_json(body)
    engines: dict[str, EngineSummary] = {}
    refused = 0
    for item in head.engines:
        try:
            # As JSON, for which strict mode accepts objects for dataclasses and lists for tuples.
            engine = _ENGINE.validate_json(_json(item))
        except ValueError:
            refused += 1
            continue
        refused += engine.engine_id in engines
        engines.setdefault(engine.engine_id, engine)
    return head, list(engines.values()), refused


def _json(values: Any) -> str:
    """Writes ASCII only, so that a text has as many bytes as characters."""
    return json.dumps(values, separators=(",", ":"), allow_nan=True)


def _finite_amount(value: float | None) -> float | None:
    """Limits a number to the range that readers accept; None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{min(max(value, 0.0), _AMOUNT_MAX):.6g}")


def _shorten(words: str) -> str:
    """Truncates a text and replaces unprintable characters, which readers would refuse."""
    shown = to_printable(words)
    return shown if len(shown) <= _TEXT_CHARACTERS_MAX else shown[: _TEXT_CHARACTERS_MAX - 1] + "…"


@dataclass(slots=True)
class PublishCounts:
    """Counts summaries since the start.  failed: those that the store refused."""

    written: int = 0
    failed: int = 0


@dataclass(eq=False, repr=False)
class FleetPublisher:
    """Publishes this sidecar's summary.  board: None without a shared store."""

    board: SummaryStore | None
    status_cache: StatusCache
    member: FleetMember
    published: PublishCounts = field(default_factory=PublishCounts, init=False)
    _has_published: bool = field(default=False, init=False)

    async def close(self) -> None:
        """Removes the summary, so that a stopped sidecar is not shown as silent."""
        if self.board is None or not self._has_published:
            return
        with contextlib.suppress(StoreUnavailableError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await self.board.remove(self.member.source)

    async def publish(self) -> None:
        """Publishes periodically, until cancelled."""
        assert self.board is not None
        board, trouble = self.board, ""
        self._has_published = True
        while True:
            lines = await self.status_cache.lines()
            interval_seconds = self._interval_seconds()
            # In a thread: a thousand engines take some tens of milliseconds.
            body = await asyncio.to_thread(self._encode, lines, interval_seconds)
            try:
                await board.put(self.member.source, body)
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
            await asyncio.sleep(interval_seconds * random.uniform(0.8, 1.2))

    def _encode(self, lines: Sequence[EngineLine], every_seconds: float) -> bytes:
        engines = map(summary_of, lines)
        return encode_summary(self.member.name, controller.__version__, every_seconds, engines)

    def _interval_seconds(self) -> float:
        """Returns the seconds until the next summary."""
        busy_seconds = self.status_cache.lines_seconds
        return min(max(PUBLISH_SECONDS, busy_seconds / _SHARE_MAX), INTERVAL_SECONDS_RANGE[1])
