"""The fleet's store: Redis, with a local copy of its entries.

    write, clear     one script in Redis; they fail if Redis cannot be written
    entries          the entries in Redis, or the local copy while Redis is not available
    changes          a published message, and a poll of one counter every `reconcile_seconds`

If Redis has lost entries (restarted empty, failed over), the sidecar restores them from its copy.
The higher revision of an id wins, so that sidecars that restore at the same time agree.  Entries
that Redis has not confirmed for half the lifetime of tombstones are not restored: they may have
been cleared.
"""

import asyncio
import contextlib
import functools
import json
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import redis.exceptions
import structlog

from controller.store.interface import (
    LIVE_ENTRIES_MAX,
    TOMBSTONE_SECONDS,
    Actor,
    AuditRecord,
    ConflictError,
    Entry,
    Health,
    Listener,
    SkippedEntries,
    StoreFullError,
    StoreUnavailableError,
)
from controller.store.redis_audit import RedisAudit
from controller.store.redis_blobs import RedisBlobStore
from controller.store.redis_client import close, connect
from controller.store.redis_errors import REDIS_ERRORS, came_before_any_write, in_words
from controller.store.redis_mirror import Fetched, MirroredEntry, RedisMirror
from controller.store.redis_replies import (
    list_of,
    nothing,
    number_of,
)
from controller.store.redis_scripts import (
    FETCH,
    FULL,
    RECORD,
    REFUSED,
    SEED,
    WRITE,
    WRITTEN,
)
from controller.store.redis_summaries import RedisSummaries
from controller.store.redis_url import NOTHING_BESIDE_THE_URL, RedisAccess, redact
from controller.util.tasks import Work

# Version of the key layout; part of every key.
SCHEMA = 1
_BACKOFF_SECONDS = (0.2, 5.0)
# An entry this close to its end is not restored.
_TOO_LATE_SECONDS = 5.0

_NOT_ASKED = "not contacted yet"

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class RedisStore:
    """Implements Store in Redis; see the module.

    mirror: file that keeps the copy of the entries over a restart of this sidecar.
    timeout_seconds: for one command.  replicas: how many must have a write before it is
    acknowledged.  access: credentials and files that are not in the URL.
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
        access: RedisAccess = NOTHING_BESIDE_THE_URL,
    ) -> None:
        self._client = connect(url, timeout_seconds, access=access)
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
        self._revision = b"?"
        self._skipped = SkippedEntries(self._where)
        self._unusable: dict[str, str] = {}
        self._unusable_count = 0
        self._confirmed_at = time.monotonic()
        self._changed: Listener = _nobody
        self._trouble = _NOT_ASKED
        # Why Redis cannot be written although it answers: a wrong key; "" if there is none.
        self._wrong_key = ""
        self._since = time.monotonic()
        self.commands = 0
        self._blobs = RedisBlobStore(self._client, self._ask, tag, self._skipped)
        self._audit = RedisAudit(self._client, self._ask, self._keys[3], self._skipped)
        self._summaries = RedisSummaries(self._client, tag, self._redacted, timeout_seconds)

    @property
    def blobs(self) -> RedisBlobStore:
        """Returns the blob store in the same Redis and namespace."""
        return self._blobs

    @property
    def summaries(self) -> RedisSummaries:
        """Returns the summaries in the same Redis; their failures do not affect `health`."""
        return self._summaries

    async def open(self, changed: Listener) -> None:
        """Loads the mirror file and contacts Redis, which need not answer."""
        if self._file is not None:
            self._held, idle = await asyncio.to_thread(self._file.read)
            self._confirmed_at -= idle
        with contextlib.suppress(StoreUnavailableError):
            await self._refresh()
        self._changed = changed

    @property
    def tasks(self) -> Mapping[str, Work]:
        """Returns the tasks that detect changes in Redis."""
        return {"store_news": self._listen, "store_counter": self._reconcile}

    async def close(self) -> None:
        """Implements the method of the store interface."""
        with contextlib.suppress(*REDIS_ERRORS, OSError):
            await close(self._client)

    async def entries(self) -> Sequence[Entry]:
        """Returns the entries in Redis, or the local copy while Redis is not available."""
        with contextlib.suppress(StoreUnavailableError):
            await self._refresh()
        now = time.monotonic()
        return [held.entry(now) for held in self._held.values() if not held.over(now)]

    async def write(
        self, override_id: str, body: str, seconds: float | None, expected: int, who: Actor
    ) -> Entry:
        """Implements the method of the store interface."""
        ms = -1 if seconds is None else max(1, round(seconds * 1000))
        asked = json.dumps(asdict(who))
        done, held = await self._ask(
            lambda: self._script(WRITE, override_id, body, ms, expected, asked),
            functools.partial(_written, override_id, body),
            writes=True,
        )
        if done == FULL:
            raise StoreFullError(LIVE_ENTRIES_MAX)
        if done != WRITTEN:
            found = held.entry(time.monotonic()) if held else None
            raise ConflictError(override_id, expected, found)
        assert held is not None
        await self._replicated()
        await self._hold({**self._held, override_id: held})
        return held.entry(time.monotonic())

    async def clear(self, override_id: str, expected: int, who: Actor) -> Entry:
        """Implements the method of the store interface."""
        return await self.write(override_id, "", TOMBSTONE_SECONDS, expected, who)

    async def record(self, action: str, subject: str, who: Actor) -> None:
        """Implements the method of the store interface."""
        asked = json.dumps(asdict(who))
        await self._ask(lambda: self._script(RECORD, action, subject, asked), nothing, writes=True)
        await self._replicated()

    async def audit(self, limit: int, subject: str = "", before: str = "") -> Sequence[AuditRecord]:
        """Implements the method of the store interface; sequences are stream ids."""
        return await self._audit.query(limit, subject, before)

    @property
    def health(self) -> Health:
        """Returns the state; not ok if Redis does not answer or cannot be written."""
        detail, trouble = f"redis {self._where}", self._trouble
        if not trouble and self._wrong_key:
            trouble = f"takes no writes: {self._wrong_key}"
        if trouble:
            detail = f"{detail}: {trouble}; the local copy of the overrides stays in force"
        return Health(
            not trouble, detail, time.monotonic() - self._since,
            self._unusable, self._unusable_count, dict(self._skipped.counts),
        )  # fmt: skip

    async def _refresh(self) -> None:
        """Replaces the local copy by the entries in Redis, and restores what Redis has lost."""
        found = await self._ask(lambda: self._script(FETCH), Fetched.of)
        now = time.monotonic()
        self._note_key(found.wrong)
        fetched = found.entries
        # If FETCH leaves entries out, missing ones are not necessarily lost.
        lost = [] if any(found.left_out) else self._lost(fetched, now)
        self._confirmed_at = now
        self._note_unusable(found, {held.override_id for held in lost})
        if lost and not found.wrong:
            _log.warning(
                "store_had_lost", store=self._where, overrides=[h.override_id for h in lost]
            )
            seeds = json.dumps([h.seed(now) for h in lost])
            await self._ask(lambda: self._script(SEED, seeds), nothing, writes=True)
        # Even if they cannot be restored: acknowledged overrides stay in force.
        fetched.update({h.override_id: h for h in lost})
        self._revision = found.counter
        await self._hold(fetched)

    def _note_unusable(self, found: Fetched, put_right: Collection[str]) -> None:
        """Records unreadable entries, and those beyond the limit.  put_right: restored ids."""
        left_out = found.left_out[0]
        names = [name for name in found.unreadable if name not in put_right]
        self._unusable = dict.fromkeys(names, "unreadable: clear it, or delete it in Redis")
        if left_out:
            self._unusable[f"{left_out} others"] = "they are beyond the limit of live overrides"
        count = found.unreadable_count - (len(found.unreadable) - len(names))
        self._unusable_count = count + left_out
        self._skipped.add("override", found.unreadable, "not an entry", found.unreadable_count)
        self._skipped.add("override_beyond_limit", (), "more than can be in force", left_out)

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
            have = await self._ask(
                lambda: self._client.wait(self._replicas, ms), number_of, writes=True
            )
            if have < self._replicas:
                raise StoreUnavailableError(
                    f"written, but only {have} of {self._replicas} replicas have it, so it is not "
                    "acknowledged; retry with the same id"
                )

    async def _ask(
        self,
        command: Callable[[], Awaitable[Any]],
        read: Callable[[Any], T],
        *,
        writes: bool = False,
    ) -> T:
        """Sends a command and decodes the reply; `read` raises one of MALFORMED if it cannot.

        Raises only StoreUnavailableError.
        """
        self.commands += 1
        try:
            async with asyncio.timeout(2 * self._timeout_seconds):
                answer = read(await command())
        except (TimeoutError, redis.exceptions.TimeoutError) as error:
            self._note(in_words(error, self._redacted))
            raise StoreUnavailableError(
                f"redis {self._where} does not answer in time"
                + ("; it is unknown whether it was done: retry with the same id" * writes)
            ) from error
        except redis.exceptions.ResponseError as error:
            if not (wrong := str(error)).startswith(REFUSED):
                raise self._failed(error, writes=writes) from error
            # If it is a key of the overrides, the next FETCH reports it too.
            raise StoreUnavailableError(
                f"redis {self._where} takes no writes: {wrong.removeprefix(REFUSED)}; nothing was "
                "changed"
            ) from error
        except (*REDIS_ERRORS, OSError) as error:
            raise self._failed(error, writes=writes) from error
        except Exception as error:  # redis-py raises various errors for a malformed reply
            what = ValueError(f"its reply cannot be read ({type(error).__name__})")
            raise self._failed(what, writes=writes) from error
        if writes or not self._trouble.startswith("takes no writes"):
            self._note("")
        return answer

    def _failed(self, error: Exception, *, writes: bool) -> StoreUnavailableError:
        words = in_words(error, self._redacted)
        self._note(words)
        outcome = "nothing was changed"
        if writes and not came_before_any_write(error):
            outcome = "it is unknown whether it was done: retry with the same id"
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
            # Also at the start, and if the reason changes.
            _log.warning("store_away", store=self._where, error=trouble)
        elif self._trouble != _NOT_ASKED:
            _log.info("store_back", store=self._where)
        self._trouble = trouble

    async def _listen(self) -> None:
        """Reports a change for every published message; reconnects indefinitely, with pauses."""
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
            except Exception as error:  # noqa: BLE001  # a malformed reply can raise any error
                # `_reconcile` reports failures; this only reconnects.
                _log.debug("store_not_heard", store=self._where, error=type(error).__name__)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _BACKOFF_SECONDS[1])

    async def _reconcile(self) -> None:
        """Polls the counter, in case a published message was missed."""
        while True:
            jitter = random.uniform(0.8, 1.2)
            await asyncio.sleep(self._reconcile_seconds * jitter)
            with contextlib.suppress(StoreUnavailableError):
                counter = await self._ask(lambda: self._client.get(self._keys[0]), _counter)
                if counter != self._revision or self._trouble or self._wrong_key:
                    self._changed()


def _nobody() -> None:
    """Ignores changes before the store is open."""


def _written(override_id: str, body: str, reply: Any) -> tuple[int, MirroredEntry | None]:
    """Decodes the reply of WRITE.  Raises one of MALFORMED."""
    done, *rest = list_of(reply)
    if number_of(done) == FULL:
        return FULL, None
    text, left = list_of(rest, 2)
    held = MirroredEntry.of(override_id, text, left, time.monotonic()) if text else None
    if done == WRITTEN and (held is None or held.body != body):
        raise ValueError("must be the written entry")
    return done, held


def _counter(reply: Any) -> bytes:
    """Returns the counter's raw value.  Raises TypeError."""
    if reply is not None and not isinstance(reply, bytes):
        raise TypeError("the counter must be a text")
    return reply or b"0"
