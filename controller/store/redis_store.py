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
    ChangeListener,
    ConflictError,
    Entry,
    Health,
    SkippedEntries,
    StoreFullError,
    StoreUnavailableError,
)
from controller.store.redis_audit import RedisAudit
from controller.store.redis_blobs import RedisBlobStore
from controller.store.redis_client import close, connect
from controller.store.redis_errors import REDIS_ERRORS, error_text, is_before_any_write
from controller.store.redis_mirror import FetchedEntries, MirroredEntry, RedisMirror
from controller.store.redis_replies import (
    decode_integer,
    ignore_reply,
    require_list,
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
from controller.store.redis_url import NO_EXTRA_ACCESS, RedisAccess, redact
from controller.util.tasks import Work

# Version of the key layout; part of every key.
SCHEMA = 1
_BACKOFF_SECONDS = (0.2, 5.0)
# An entry this close to its end is not restored.
_TOO_LATE_SECONDS = 5.0

_NOT_CONTACTED = "not contacted yet"

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
        access: RedisAccess = NO_EXTRA_ACCESS,
    ) -> None:
        self._client = connect(url, timeout_seconds, access=access)
        self._redacted = functools.partial(redact, url=url)
        self._location = self._redacted(url)
        tag = f"{{{namespace}:{SCHEMA}}}"
        self._keys = [f"{tag}:{name}" for name in ("revision", "live", "traces", "audit")]
        self._entry_prefix_and_channel = [f"{tag}:entry:", f"{tag}:news"]
        self._timeout_seconds = timeout_seconds
        self._reconcile_seconds = reconcile_seconds
        self._replicas = replicas
        self._mirror = RedisMirror(mirror) if mirror is not None else None
        self._entries: dict[str, MirroredEntry] = {}
        self._change_counter = b"?"
        self._skipped = SkippedEntries(self._location)
        self._unusable: dict[str, str] = {}
        self._unusable_count = 0
        self._confirmed_at = time.monotonic()
        self._on_change: ChangeListener = _ignore_change
        self._fault = _NOT_CONTACTED
        # Why Redis cannot be written although it answers: a wrong key; "" if there is none.
        self._wrong_key = ""
        self._state_since = time.monotonic()
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

    async def open(self, changed: ChangeListener) -> None:
        """Loads the mirror file and contacts Redis, which need not answer."""
        if self._mirror is not None:
            self._entries, unconfirmed_seconds = await asyncio.to_thread(self._mirror.read)
            self._confirmed_at -= unconfirmed_seconds
        with contextlib.suppress(StoreUnavailableError):
            await self._refresh()
        self._on_change = changed

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
        return [
            entry.to_entry(now) for entry in self._entries.values() if not entry.has_expired(now)
        ]

    async def write(
        self, override_id: str, body: str, seconds: float | None, expected: int, actor: Actor
    ) -> Entry:
        """Implements the method of the store interface."""
        lifetime_ms = -1 if seconds is None else max(1, round(seconds * 1000))
        actor_json = json.dumps(asdict(actor))
        outcome, entry = await self._ask(
            lambda: self._run_script(WRITE, override_id, body, lifetime_ms, expected, actor_json),
            functools.partial(_read_write_reply, override_id, body),
            writes=True,
        )
        if outcome == FULL:
            raise StoreFullError(LIVE_ENTRIES_MAX)
        if outcome != WRITTEN:
            stored_entry = entry.to_entry(time.monotonic()) if entry else None
            raise ConflictError(override_id, expected, stored_entry)
        assert entry is not None
        await self._require_replicas()
        await self._replace_entries({**self._entries, override_id: entry})
        return entry.to_entry(time.monotonic())

    async def clear(self, override_id: str, expected: int, actor: Actor) -> Entry:
        """Implements the method of the store interface."""
        return await self.write(override_id, "", TOMBSTONE_SECONDS, expected, actor)

    async def record(self, action: str, subject: str, actor: Actor) -> None:
        """Implements the method of the store interface."""
        actor_json = json.dumps(asdict(actor))
        await self._ask(
            lambda: self._run_script(RECORD, action, subject, actor_json), ignore_reply, writes=True
        )
        await self._require_replicas()

    async def audit(self, limit: int, subject: str = "", before: str = "") -> Sequence[AuditRecord]:
        """Implements the method of the store interface; sequences are stream ids."""
        return await self._audit.query(limit, subject, before)

    @property
    def health(self) -> Health:
        """Returns the state; not ok if Redis does not answer or cannot be written."""
        detail, trouble = f"redis {self._location}", self._fault
        if not trouble and self._wrong_key:
            trouble = f"takes no writes: {self._wrong_key}"
        if trouble:
            detail = f"{detail}: {trouble}; the local copy of the overrides stays in force"
        return Health(
            not trouble, detail, time.monotonic() - self._state_since,
            self._unusable, self._unusable_count, dict(self._skipped.counts),
        )  # fmt: skip

    async def _refresh(self) -> None:
        """Replaces the local copy by the entries in Redis, and restores what Redis has lost."""
        reply = await self._ask(lambda: self._run_script(FETCH), FetchedEntries.from_reply)
        now = time.monotonic()
        self._set_wrong_key(reply.write_fault)
        fetched = reply.entries
        # If FETCH leaves entries out, missing ones are not necessarily lost.
        lost = [] if any(reply.left_out) else self._lost_entries(fetched, now)
        self._confirmed_at = now
        self._set_unusable(reply, {entry.override_id for entry in lost})
        if lost and not reply.write_fault:
            _log.warning(
                "store_had_lost",
                store=self._location,
                overrides=[lost_entry.override_id for lost_entry in lost],
            )
            seeds = json.dumps([lost_entry.to_seed(now) for lost_entry in lost])
            await self._ask(lambda: self._run_script(SEED, seeds), ignore_reply, writes=True)
        # Even if they cannot be restored: acknowledged overrides stay in force.
        fetched.update({lost_entry.override_id: lost_entry for lost_entry in lost})
        self._change_counter = reply.counter
        await self._replace_entries(fetched)

    def _set_unusable(self, reply: FetchedEntries, restored_ids: Collection[str]) -> None:
        """Records unreadable entries, and those beyond the limit.  restored_ids: restored ids."""
        beyond_limit_count = reply.left_out[0]
        names = [name for name in reply.unreadable if name not in restored_ids]
        self._unusable = dict.fromkeys(names, "unreadable: clear it, or delete it in Redis")
        if beyond_limit_count:
            self._unusable[f"{beyond_limit_count} others"] = (
                "they are beyond the limit of live overrides"
            )
        count = reply.unreadable_count - (len(reply.unreadable) - len(names))
        self._unusable_count = count + beyond_limit_count
        self._skipped.add("override", reply.unreadable, "not an entry", reply.unreadable_count)
        self._skipped.add(
            "override_beyond_limit", (), "more than can be in force", beyond_limit_count
        )

    def _lost_entries(
        self, fetched: Mapping[str, MirroredEntry], now: float
    ) -> list[MirroredEntry]:
        if now - self._confirmed_at > TOMBSTONE_SECONDS / 2:
            return []
        return [
            entry
            for name, entry in self._entries.items()
            if entry.remaining_seconds(now) > _TOO_LATE_SECONDS
            and (name not in fetched or fetched[name].revision < entry.revision)
        ]

    async def _replace_entries(self, entries: dict[str, MirroredEntry]) -> None:
        now = time.monotonic()
        entries = {name: entry for name, entry in entries.items() if not entry.has_expired(now)}
        is_unchanged = {
            override_id: mirrored_entry.revision for override_id, mirrored_entry in entries.items()
        } == {
            override_id: mirrored_entry.revision
            for override_id, mirrored_entry in self._entries.items()
        }
        self._entries = entries
        if self._mirror is not None and not is_unchanged:
            await asyncio.to_thread(self._mirror.write, entries)

    async def _run_script(self, script: str, *arguments: object) -> Any:
        return await self._client.eval(
            script,
            len(self._keys),
            *self._keys,
            *self._entry_prefix_and_channel,
            *map(str, arguments),
        )

    async def _require_replicas(self) -> None:
        if self._replicas:
            timeout_ms = round(self._timeout_seconds * 500)
            replica_count = await self._ask(
                lambda: self._client.wait(self._replicas, timeout_ms), decode_integer, writes=True
            )
            if replica_count < self._replicas:
                raise StoreUnavailableError(
                    f"written, but only {replica_count} of {self._replicas} replicas have it, so "
                    "it is not acknowledged; retry with the same id"
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
            self._set_fault(error_text(error, self._redacted))
            raise StoreUnavailableError(
                f"redis {self._location} does not answer in time"
                + ("; it is unknown whether it was done: retry with the same id" * writes)
            ) from error
        except redis.exceptions.ResponseError as error:
            if not (message := str(error)).startswith(REFUSED):
                raise self._unavailable_error(error, writes=writes) from error
            # If it is a key of the overrides, the next FETCH reports it too.
            raise StoreUnavailableError(
                f"redis {self._location} takes no writes: {message.removeprefix(REFUSED)}; nothing "
                "was "
                "changed"
            ) from error
        except (*REDIS_ERRORS, OSError) as error:
            raise self._unavailable_error(error, writes=writes) from error
        except Exception as error:  # redis-py raises various errors for a malformed reply
            malformed = ValueError(f"its reply cannot be read ({type(error).__name__})")
            raise self._unavailable_error(malformed, writes=writes) from error
        if writes or not self._fault.startswith("takes no writes"):
            self._set_fault("")
        return answer

    def _unavailable_error(self, error: Exception, *, writes: bool) -> StoreUnavailableError:
        reason = error_text(error, self._redacted)
        self._set_fault(reason)
        outcome = "nothing was changed"
        if writes and not is_before_any_write(error):
            outcome = "it is unknown whether it was done: retry with the same id"
        return StoreUnavailableError(f"redis {self._location}: {reason}; {outcome}")

    def _set_wrong_key(self, fault: str) -> None:
        if fault and not self._wrong_key:
            self._state_since = time.monotonic()
            _log.error("store_takes_no_writes", store=self._location, error=fault)
        elif self._wrong_key and not fault:
            self._state_since = time.monotonic()
            _log.info("store_takes_writes_again", store=self._location)
        self._wrong_key = fault

    def _set_fault(self, trouble: str) -> None:
        if trouble == self._fault:
            return
        if bool(trouble) != bool(self._fault):
            self._state_since = time.monotonic()
        if trouble:
            # Also at the start, and if the reason changes.
            _log.warning("store_away", store=self._location, error=trouble)
        elif self._fault != _NOT_CONTACTED:
            _log.info("store_back", store=self._location)
        self._fault = trouble

    async def _listen(self) -> None:
        """Reports a change for every published message; reconnects indefinitely, with pauses."""
        pause = _BACKOFF_SECONDS[0]
        while True:
            try:
                async with self._client.pubsub() as channel:
                    await channel.subscribe(self._entry_prefix_and_channel[1])
                    pause = _BACKOFF_SECONDS[0]
                    self._on_change()
                    async for message in channel.listen():
                        if message["type"] == "message":
                            self._on_change()
            except Exception as error:  # noqa: BLE001  # a malformed reply can raise any error
                # `_reconcile` reports failures; this only reconnects.
                _log.debug("store_not_heard", store=self._location, error=type(error).__name__)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _BACKOFF_SECONDS[1])

    async def _reconcile(self) -> None:
        """Polls the counter, in case a published message was missed."""
        while True:
            jitter = random.uniform(0.8, 1.2)
            await asyncio.sleep(self._reconcile_seconds * jitter)
            with contextlib.suppress(StoreUnavailableError):
                counter = await self._ask(lambda: self._client.get(self._keys[0]), _read_counter)
                if counter != self._change_counter or self._fault or self._wrong_key:
                    self._on_change()


def _ignore_change() -> None:
    """Ignores changes before the store is open."""


def _read_write_reply(override_id: str, body: str, reply: Any) -> tuple[int, MirroredEntry | None]:
    """Decodes the reply of WRITE.  Raises one of MALFORMED."""
    outcome, *values = require_list(reply)
    if decode_integer(outcome) == FULL:
        return FULL, None
    text, remaining_ms = require_list(values, 2)
    entry = (
        MirroredEntry.from_redis(override_id, text, remaining_ms, time.monotonic())
        if text
        else None
    )
    if outcome == WRITTEN and (entry is None or entry.body != body):
        raise ValueError("must be the written entry")
    return outcome, entry


def _read_counter(reply: Any) -> bytes:
    """Returns the counter's raw value.  Raises TypeError."""
    if reply is not None and not isinstance(reply, bytes):
        raise TypeError("the counter must be a text")
    return reply or b"0"
