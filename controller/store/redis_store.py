"""The fleet's store: Redis, with everything it says also held here.

    write, clear     one script in Redis; refused when Redis cannot take it
    entries          what Redis has, or, while it is away, what is held here
    news             a published message, and a look at one counter every `reconcile_seconds`

What Redis has lost (restarted empty, failed over) and a sidecar still holds, the sidecar puts back:
the higher revision of an id stays, so that all sidecars doing it at once agree.  Entries that Redis
has not confirmed for as long as tombstones are kept are not put back: they may have been cleared.
"""

import asyncio
import contextlib
import functools
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import redis.exceptions
import structlog

from controller.core.errors import MALFORMED
from controller.store.interface import (
    TOMBSTONE_SECONDS,
    Actor,
    AuditRecord,
    ConflictError,
    Entry,
    Health,
    Listener,
    StoreUnavailableError,
)
from controller.store.redis_blobs import RedisBlobStore
from controller.store.redis_client import close, connect, in_words, is_out_of_memory
from controller.store.redis_mirror import MirroredEntry, RedisMirror
from controller.store.redis_scripts import FETCH, RECORD, REFUSED, SEED, WRITE
from controller.store.redis_summaries import RedisSummaries
from controller.util.redaction import redact
from controller.util.supervisor import Work

# Part of every key: another layout of keys is another number.
SCHEMA = 1
_BACKOFF_SECONDS = (0.2, 5.0)
# Errors of a command that Redis refused before it began.
_BEFORE_ANY_WRITE = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.AuthenticationError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.BusyLoadingError,
)
# An entry this near its end is not worth putting back.
_TOO_LATE_SECONDS = 5.0

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class RedisStore:
    """See the module.  mirror: a file that holds the entries over a restart of this sidecar.

    timeout_seconds: for one command.  password_file: read for every connection.  replicas: how
    many must have a write before it is acknowledged.
    """

    def __init__(
        self,
        url: str,
        mirror: Path | None = None,
        *,
        namespace: str = "speculation",
        timeout_seconds: float = 2.0,
        reconcile_seconds: float = 0.5,
        replicas: int = 0,
        password_file: Path | None = None,
    ) -> None:
        self._client = connect(url, timeout_seconds, password_file)
        self._redacted = functools.partial(redact, url=url)
        self._where = self._redacted(url)
        tag = f"{{{namespace}:{SCHEMA}}}"
        self._keys = [f"{tag}:{name}" for name in ("revision", "live", "traces", "audit")]
        self._common = [f"{tag}:entry:", f"{tag}:news"]
        self._timeout_seconds = timeout_seconds
        self._reconcile_seconds = reconcile_seconds
        self._replicas = replicas
        self._file = RedisMirror(mirror) if mirror is not None else None
        self._held: dict[str, MirroredEntry] = {}
        self._revision = "?"
        self._confirmed_at = time.monotonic()
        self._changed: Listener = _nobody
        self._trouble = "not asked yet"
        # A key that keeps Redis from taking writes, though it answers; "" for none.
        self._wrong_key = ""
        self._since = time.monotonic()
        self.commands = 0
        self._blobs = RedisBlobStore(self._client, self._ask, tag)
        self._summaries = RedisSummaries(self._client, tag, self._redacted, timeout_seconds)

    @property
    def blobs(self) -> RedisBlobStore:
        """In the same Redis, under the same namespace."""
        return self._blobs

    @property
    def summaries(self) -> RedisSummaries:
        """Returns those in the same Redis; their troubles do not count as the store's."""
        return self._summaries

    async def open(self, changed: Listener) -> None:
        """Takes what the mirror holds; Redis may be away.  Raises StoreBrokenError."""
        if self._file is not None:
            self._held, idle = await asyncio.to_thread(self._file.read)
            self._confirmed_at -= idle
        with contextlib.suppress(StoreUnavailableError):
            await self._refresh()
        self._changed = changed

    @property
    def tasks(self) -> Mapping[str, Work]:
        """Returns those that bring news."""
        return {"store_news": self._listen, "store_counter": self._reconcile}

    async def close(self) -> None:
        """Implements the method of the store interface."""
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            await close(self._client)

    async def entries(self) -> Sequence[Entry]:
        """Returns what Redis has; while it is away, what is held here."""
        with contextlib.suppress(StoreUnavailableError):
            await self._refresh()
        now = time.monotonic()
        return [held.entry(now) for held in self._held.values() if not held.over(now)]

    async def write(
        self, override_id: str, body: str, seconds: float | None, expected: int, who: Actor
    ) -> Entry:
        """Implements the method of the store interface."""
        ms = -1 if seconds is None else max(1, round(seconds * 1000))
        asked = json.dumps({"author": who.author, "reason": who.reason, "origin": who.origin})
        done, text, left = await self._ask(
            lambda: self._script(WRITE, override_id, body, ms, expected, asked), writes=True
        )
        held = MirroredEntry.of(override_id, text, int(left), time.monotonic()) if text else None
        if not int(done):
            raise ConflictError(
                f"override {override_id!r} is not at revision {expected}",
                held.entry(time.monotonic()) if held else None,
            )
        assert held is not None
        await self._replicated()
        await self._hold({**self._held, override_id: held})
        return held.entry(time.monotonic())

    async def clear(self, override_id: str, expected: int, who: Actor) -> Entry:
        """Implements the method of the store interface."""
        return await self.write(override_id, "", TOMBSTONE_SECONDS, expected, who)

    async def record(self, action: str, subject: str, who: Actor) -> None:
        """Implements the method of the store interface."""
        asked = json.dumps({"author": who.author, "reason": who.reason, "origin": who.origin})
        await self._ask(lambda: self._script(RECORD, action, subject, asked), writes=True)
        await self._replicated()

    async def audit(self, limit: int, subject: str = "", before: str = "") -> Sequence[AuditRecord]:
        """Reads audit records; sequences are stream ids.  It searches the newest 10,000 at most."""
        end = f"({before}" if before else "+"
        found: list[AuditRecord] = []
        looked = 0
        while len(found) < limit and looked < 10_000:
            page = await self._ask(
                functools.partial(self._client.xrevrange, self._keys[3], max=end, count=500)
            )
            for sequence, fields in page:
                if subject in {"", fields["subject"]}:
                    found.append(_audit(sequence, fields))
            looked += len(page)
            if len(page) < 500:
                break
            end = f"({page[-1][0]}"
        return found[:limit]

    @property
    def health(self) -> Health:
        """Trouble is a Redis that does not answer or does not take writes."""
        detail, trouble = f"redis {self._where}", self._trouble
        if not trouble and self._wrong_key:
            trouble = f"takes no writes: {self._wrong_key}"
        if trouble:
            detail = f"{detail}: {trouble}; going on with what is held here"
        return Health(not trouble, detail, time.monotonic() - self._since)

    async def _refresh(self) -> None:
        """Brings what is held here and what Redis has together."""
        wrong, revision, *flat = await self._ask(lambda: self._script(FETCH))
        self._note_key(wrong)
        now = time.monotonic()
        fetched = {}
        for name, text, left in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            try:
                fetched[name] = MirroredEntry.of(name, text, int(left), now)
            except MALFORMED as error:
                _log.error("override_not_read", override=name, error=str(error))
        lost = self._lost(fetched, now)
        self._confirmed_at = now
        if lost and not wrong:
            _log.warning(
                "store_had_lost", store=self._where, overrides=[h.override_id for h in lost]
            )
            await self._ask(
                lambda: self._script(SEED, json.dumps([h.seed(now) for h in lost])), writes=True
            )
        # Also where nothing can be put back: what was acknowledged stays in force.
        fetched.update({h.override_id: h for h in lost})
        self._revision = str(revision)
        await self._hold(fetched)

    def _lost(self, fetched: Mapping[str, MirroredEntry], now: float) -> list[MirroredEntry]:
        if now - self._confirmed_at > TOMBSTONE_SECONDS / 2:
            return []
        return [
            held
            for name, held in self._held.items()
            if held.left(now) > _TOO_LATE_SECONDS
            and (name not in fetched or fetched[name].revision < held.revision)
        ]

    async def _hold(self, entries: dict[str, MirroredEntry]) -> None:
        now = time.monotonic()
        entries = {name: held for name, held in entries.items() if not held.over(now)}
        same = {n: h.revision for n, h in entries.items()} == {
            n: h.revision for n, h in self._held.items()
        }
        self._held = entries
        if self._file is not None and not same:
            await asyncio.to_thread(self._file.write, entries)

    async def _script(self, script: str, *arguments: object) -> Any:
        return await self._client.eval(
            script, len(self._keys), *self._keys, *self._common, *map(str, arguments)
        )

    async def _replicated(self) -> None:
        if self._replicas:
            ms = round(self._timeout_seconds * 500)
            have = await self._ask(lambda: self._client.wait(self._replicas, ms), writes=True)
            if int(have) < self._replicas:
                raise StoreUnavailableError(
                    f"written, but only {have} of {self._replicas} replicas have it: not "
                    "acknowledged; repeat it with the same id"
                )

    async def _ask(self, command: Callable[[], Awaitable[T]], *, writes: bool = False) -> T:
        self.commands += 1
        try:
            async with asyncio.timeout(2 * self._timeout_seconds):
                answer = await command()
        except (TimeoutError, redis.exceptions.TimeoutError) as error:
            self._note("does not answer in time")
            raise StoreUnavailableError(
                f"redis {self._where} does not answer in time"
                + ("; whether it was done is not known: repeat it with the same id" * writes)
            ) from error
        except redis.exceptions.NoScriptError:
            raise
        except redis.exceptions.ResponseError as error:
            if not (wrong := str(error)).startswith(REFUSED):
                raise self._failed(error, writes=writes) from error
            # Of the keys of overrides the next look notes it, too.
            raise StoreUnavailableError(
                f"redis {self._where} takes no writes: {wrong.removeprefix(REFUSED)}; nothing was "
                "changed"
            ) from error
        except (redis.exceptions.RedisError, OSError) as error:
            raise self._failed(error, writes=writes) from error
        if writes or not self._trouble.startswith("takes no writes"):
            self._note("")
        return answer

    def _failed(self, error: Exception, *, writes: bool) -> StoreUnavailableError:
        words = self._redacted(in_words(error))
        self._note(words)
        outcome = "nothing was changed"
        if writes and not _came_before_any_write(error):
            outcome = "whether it was done is not known: repeat it with the same id"
        return StoreUnavailableError(f"redis {self._where}: {words}; {outcome}")

    def _note_key(self, wrong: str) -> None:
        if wrong and not self._wrong_key:
            self._since = time.monotonic()
            _log.error("store_takes_no_writes", store=self._where, error=wrong)
        elif self._wrong_key and not wrong:
            self._since = time.monotonic()
            _log.info("store_takes_writes_again", store=self._where)
        self._wrong_key = wrong

    def _note(self, trouble: str) -> None:
        if trouble == self._trouble:
            return
        if bool(trouble) != bool(self._trouble):
            self._since = time.monotonic()
            if trouble:
                _log.warning("store_away", store=self._where, error=trouble)
            else:
                _log.info("store_back", store=self._where)
        self._trouble = trouble

    async def _listen(self) -> None:
        """Turns published messages into news; reconnects without an end, with pauses."""
        pause = _BACKOFF_SECONDS[0]
        while True:
            try:
                async with self._client.pubsub() as channel:
                    await channel.subscribe(self._common[1])
                    pause = _BACKOFF_SECONDS[0]
                    self._changed()
                    async for message in channel.listen():
                        if message["type"] == "message":
                            self._changed()
            except (redis.exceptions.RedisError, OSError, TimeoutError):
                # `_reconcile` reports silence; here it only means to try again.
                pass
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _BACKOFF_SECONDS[1])

    async def _reconcile(self) -> None:
        """Polls the counter, so that a message that was missed does not matter."""
        while True:
            jitter = random.uniform(0.8, 1.2)
            await asyncio.sleep(self._reconcile_seconds * jitter)
            with contextlib.suppress(StoreUnavailableError):
                revision = await self._ask(lambda: self._client.get(self._keys[0]))
                if str(revision or 0) != self._revision or self._trouble or self._wrong_key:
                    self._changed()


def _nobody() -> None:
    """Takes news before the store is open."""


def _came_before_any_write(error: Exception) -> bool:
    connecting = isinstance(error, redis.exceptions.ConnectionError) and "connecting" in str(error)
    return connecting or isinstance(error, _BEFORE_ANY_WRITE) or is_out_of_memory(error)


def _audit(sequence: str, fields: Mapping[str, str]) -> AuditRecord:
    names = ("action", "subject", "author", "reason", "origin", "before", "after")
    return AuditRecord(sequence, float(fields["at"]), *(fields[n] for n in names))
