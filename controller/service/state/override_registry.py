"""Keeps the overrides in force: reads them from the store, applies them, and ends them on time.

    store --entries--> registry --set_overrides--> every session's core --> plans
                       ^  ^ set, clear: the store first, then the registry at once
                       policy file (`policy_watch`)

An override ends by this process's monotonic clock, even if the store is unavailable.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from enum import Enum

import structlog

from controller.core.errors import SpeculationError
from controller.core.planning.overrides import InvalidOverrideError, Override, Scope
from controller.service.net.errors import (
    NoOverrideError,
    OverrideChangedError,
    OverrideExistsError,
    TooManyOverridesError,
)
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.active_overrides import (
    ActiveOverride,
    OverrideChange,
    OverrideWatchers,
)
from controller.settings.policy_file import Policy
from controller.store.interface import (
    LIVE_ENTRIES_MAX,
    Actor,
    AuditRecord,
    ConflictError,
    Entry,
    Health,
    Store,
    StoreFullError,
    StoreUnavailableError,
)
from controller.util.text import printable
from controller.wire.overrides import from_body, to_body

# The store is read again after this time at the latest.
_ASK_AGAIN_SECONDS = 30.0
# Unusable overrides of the store that are named.
_NAMED_MAX = 20
# Characters of an id or a reason that are shown.
_SHOWN_CHARACTERS = 200
_BEYOND = f"{LIVE_ENTRIES_MAX} newer overrides are in force, which is the limit"

# Two requests with the same id and content have the same lifetime if it differs by less than this.
_SAME_LIFETIME_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class OverrideOutcome(Enum):
    """Lists the outcomes of a request to set an override.

    REPEATED: the same request was answered before, and nothing changes.  END_MOVED: the same
    override is in force, and this request has set a new end.
    """

    SET = "set"
    REPEATED = "repeated"
    END_MOVED = "end moved"


class OverrideRegistry:
    """Keeps the overrides in force; there is one registry per sidecar."""

    def __init__(self, store: Store, registry: SessionRegistry) -> None:
        self._store = store
        self._registry = registry
        self._held: dict[str, ActiveOverride] = {}
        self.policy = Policy()
        self._policies: dict[str, ActiveOverride] = {}
        # Entries of the store that cannot be in force here: etag and reason, by id.
        self._unusable: dict[str, tuple[str, str]] = {}
        self._news = asyncio.Event()
        self._watchers = OverrideWatchers()

    async def open(self) -> None:
        """Opens the store and reads the overrides.  Raises StoreError."""
        await self._store.open(self._news.set)
        await self.refresh()

    async def close(self) -> None:
        """Ends all watches, and closes the store."""
        self._watchers.close()
        await self._store.close()

    @property
    def health(self) -> Health:
        """Returns the state of the store, with the entries that cannot be in force here."""
        health, unusable = self._store.health, self._unusable
        # Other processes may have written the ids, and the texts that the reasons quote.
        named = {
            _printable(name): _printable(unusable[name][1])
            for name in sorted(unusable)[:_NAMED_MAX]
        }
        return replace(
            health,
            unusable={**health.unusable, **named},
            unusable_count=health.unusable_count + len(unusable),
        )

    def is_unusable(self, override_id: str) -> bool:
        """Returns whether the store has an entry with that id that cannot be in force here."""
        return override_id in self._unusable or self._is_unreadable(override_id)

    def _is_unreadable(self, override_id: str) -> bool:
        # A name with a backslash only stands for an id that is not printable.
        return override_id in self._store.health.unusable and "\\" not in override_id

    def active(self) -> tuple[Override, ...]:
        """Returns all overrides in force now, for any engine; file-based policy included."""
        return tuple(held.override for held in self._live())

    def _live(self) -> list[ActiveOverride]:
        now = time.monotonic()
        live = [held for held in self._held.values() if held.until > now]
        return [*live, *self._policies.values()]

    def ends_at(self, override_id: str) -> float | None:
        """Returns the end in Unix seconds; None if there is no end, or no such override."""
        held = self._held.get(override_id)
        seconds = None if held is None else held.remaining_seconds
        return None if seconds is None else time.time() + seconds

    def held(self) -> list[ActiveOverride]:
        """Returns all overrides in force now, ordered by id; file-based policy included."""
        return sorted(self._live(), key=lambda held: held.override.override_id)

    async def use_policy(self, policy: Policy) -> None:
        """Replaces the policy in force."""
        self.policy = policy
        new = {
            o.override_id: ActiveOverride(o, "", math.inf, policy.read_at, str(policy.path))
            for o in policy.overrides
        }
        old, self._policies = self._policies, new
        for name, held in old.items():
            if name not in new:
                self._watchers.tell(OverrideChange("ended", held))
        changed = [n for n, held in new.items() if n not in old or old[n].override != held.override]
        for name in changed:
            self._watchers.tell(OverrideChange("set", new[name]))
        if changed or old.keys() != new.keys():
            await self._apply()

    async def set(
        self, override: Override, seconds: float | None, etag: str, who: Actor
    ) -> tuple[ActiveOverride, OverrideOutcome]:
        """Sets an override; returns the override in force and the outcome.

        Raises OverrideExistsError, OverrideChangedError, NoOverrideError, TooManyOverridesError,
        StoreUnavailableError.
        """
        name, body = override.override_id, to_body(override)
        outcome = OverrideOutcome.SET
        try:
            entry = await self._store.write(name, body, seconds, revision_of(etag), who)
        except ConflictError as conflict:
            outcome, found = judge(conflict.found, override, seconds, etag)
            if outcome is OverrideOutcome.REPEATED:
                return await self._take(found, override), outcome
            try:
                entry = await self._store.write(name, body, seconds, found.revision, who)
            except ConflictError as again:
                raise conflict_of(name, found.etag, again.found) from again
        except StoreFullError as full:
            raise TooManyOverridesError(str(full)) from full
        held = await self._take(entry, override)
        _log.info(
            "override_set", override=name, scope=str(override.scope), author=who.author,
            reason=who.reason, origin=who.origin, seconds=seconds,
        )  # fmt: skip
        return held, outcome

    async def try_set(
        self, override: Override, seconds: float | None, etag: str
    ) -> OverrideOutcome:
        """Returns the outcome that `set` would have now; changes nothing.  Raises as `set`."""
        self._require_room(override)
        expected = revision_of(etag)
        entries = await self._store.entries()
        found = next((e for e in entries if e.override_id == override.override_id), None)
        if expected == (0 if found is None else found.revision):
            return OverrideOutcome.SET
        return judge(found, override, seconds, etag)[0]

    def _require_room(self, override: Override) -> None:
        if override.override_id not in self._held and len(self._held) >= LIVE_ENTRIES_MAX:
            raise TooManyOverridesError(
                f"{len(self._held)} overrides are in force already, which is the limit: clear some"
            )

    async def clear(self, override_id: str, etag: str, who: Actor) -> None:
        """Ends an override.

        Raises NoOverrideError, OverrideChangedError, StoreUnavailableError.
        """
        entry = await self._find(override_id)
        if etag and (entry is None or etag != entry.etag):
            raise conflict_of(override_id, etag, entry)
        try:
            await self._store.clear(override_id, 0 if entry is None else entry.revision, who)
        except ConflictError as conflict:
            raise conflict_of(override_id, etag or "the newest", conflict.found) from conflict
        _log.info(
            "override_cleared", override=override_id, author=who.author, reason=who.reason,
            origin=who.origin,
        )  # fmt: skip
        self._end(override_id)
        if self._unusable:
            await self.refresh()  # another one may fit now
        await self._apply()

    async def _find(self, override_id: str) -> Entry | None:
        """Returns the store's entry with an id; None if the entry cannot be read.

        Raises NoOverrideError.
        """
        for entry in await self._store.entries():
            if entry.override_id == override_id and not entry.ended:
                return entry
        if self._is_unreadable(override_id):
            return None
        raise NoOverrideError(
            f"no override {override_id[:128]!r} is in force", resource=override_id
        )

    def sessions_of(self, scope: Scope) -> list[EngineSession]:
        """Returns the sessions of this sidecar's engines in a scope, ordered by engine id."""
        found = (session for session in self._registry if scope.covers(session.spec))
        return sorted(found, key=lambda session: session.engine_id)

    def known_engines(self) -> list[EngineSession]:
        """Returns the sessions of all engines of this sidecar, ordered by engine id."""
        return sorted(self._registry, key=lambda session: session.engine_id)

    def with_(self, override: Override) -> tuple[Override, ...]:
        """Returns the overrides that would be in force with an additional, newest one."""
        newest = max((o.revision for o in self.active()), default=0)
        newer = replace(override, revision=newest + 1)
        return (*self.without(override.override_id), newer)

    def without(self, override_id: str) -> tuple[Override, ...]:
        """Returns the overrides that would be in force without one of them."""
        return tuple(o for o in self.active() if o.override_id != override_id)

    async def audit(self, limit: int, subject: str, before: str) -> list[AuditRecord]:
        """Returns audit records, the newest first.  Raises StoreUnavailableError."""
        return list(await self._store.audit(limit, subject, before))

    def watching(self) -> "contextlib.AbstractAsyncContextManager[AsyncIterator[OverrideChange]]":
        """Yields all overrides in force, then every change, until the sidecar stops.

        Raises SlowClientError if the reader falls behind.
        """
        return self._watchers.watching(self.held())

    async def refresh(self) -> None:
        """Reads the overrides from the store.

        Raises nothing: while the store is unavailable, the present overrides stay in force.
        """
        try:
            entries = await self._store.entries()
        except StoreUnavailableError as error:
            _log.warning("store_unavailable", error=str(error))
            return
        self._choose([entry for entry in entries if not entry.ended])
        await self._apply()

    def _choose(self, live: list[Entry]) -> None:
        """Puts the newest entries of the store into force, up to the limit.

        All sidecars choose the same entries, because the store assigns the revisions.
        """
        chosen, unusable = set[str](), dict[str, tuple[str, str]]()
        for entry in sorted(live, key=lambda entry: (-entry.revision, entry.override_id)):
            name = entry.override_id
            if len(chosen) == LIVE_ENTRIES_MAX:
                reason = _BEYOND
            elif (reason := self._note(entry)) == "":
                chosen.add(name)
                continue
            unusable[name] = entry.etag, reason
        for name in self._held.keys() - chosen:
            self._end(name)
        if news := {n: why for n, why in unusable.items() if self._unusable.get(n) != why}:
            _log.error(
                "overrides_not_in_force", count=len(unusable),
                overrides={n: news[n][1] for n in sorted(news)[:_NAMED_MAX]},
            )  # fmt: skip
        self._unusable = unusable

    async def _take(self, entry: Entry, override: Override) -> ActiveOverride:
        """Puts a written entry into force."""
        held = self._held.get(entry.override_id)
        if held is None or held.etag != entry.etag:
            held = self._hold(entry, override)
        await self._apply()
        return held

    def _note(self, entry: Entry) -> str:
        """Puts an entry into force; returns why that is impossible, or ""."""
        known = self._held.get(entry.override_id)
        if known is not None and known.etag == entry.etag:
            return ""
        etag, reason = self._unusable.get(entry.override_id, ("", ""))
        if etag == entry.etag and reason not in {"", _BEYOND}:
            return reason
        try:
            override = from_body(entry.body)
        except InvalidOverrideError as error:
            # It may come from a newer sidecar; it has no effect here.
            return str(error)
        if override.override_id != entry.override_id:
            return "it contains an override with another id"
        self._hold(entry, override)
        return ""

    def _hold(self, entry: Entry, override: Override) -> ActiveOverride:
        seconds = entry.remaining_seconds
        until = math.inf if seconds is None else time.monotonic() + seconds
        held = ActiveOverride(
            replace(override, revision=entry.revision), entry.etag, until, entry.created_at
        )
        self._held[entry.override_id] = held
        self._watchers.tell(OverrideChange("set", held))
        self._news.set()  # the next end may be earlier now
        return held

    def end_over(self) -> None:
        """Ends the overrides that have expired.

        It also runs before every plan: after a process was suspended, a report can be processed
        before the timer.
        """
        now = time.monotonic()
        over = [name for name, held in self._held.items() if held.until <= now]
        for name in over:
            _log.info("override_expired", override=name)
            self._end(name)
        if over:
            active = self.active()
            for session in self._registry:
                self._hand(session, active)

    def _end(self, override_id: str) -> None:
        held = self._held.pop(override_id, None)
        if held is not None:
            self._watchers.tell(OverrideChange("ended", held))

    async def _apply(self) -> None:
        """Applies the overrides to every engine, and yields to the event loop between engines."""
        for session in self._registry:
            if not session.is_over:
                # The overrides may have changed since the previous engine.
                self._hand(session, self.active())
            await asyncio.sleep(0)

    def _hand(self, session: EngineSession, overrides: tuple[Override, ...]) -> None:
        if session.core.set_overrides(overrides):
            _log.info(
                "overrides_in_force", engine=session.engine_id,
                overrides=[o.override_id for o in session.core.overrides],
            )  # fmt: skip
            # At once, because there may be no open stream that would do it.
            session.advance()
            session.ring()

    async def keep(self) -> None:
        """Ends expired overrides, and reads changes from the store, until cancelled."""
        # The store may have changed while this task did not run.
        self._news.set()
        while True:
            soonest = min((held.until for held in self._held.values()), default=math.inf)
            pause = min(max(0.0, soonest - time.monotonic()), _ASK_AGAIN_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()
            self._news.clear()
            self.end_over()
            try:
                await self.refresh()
            except SpeculationError as error:
                _log.error("overrides_not_refreshed", error=str(error))


def _printable(text: str) -> str:
    return printable(text)[:_SHOWN_CHARACTERS]


def revision_of(etag: str) -> int:
    """Returns the revision that an etag stands for.  Raises OverrideChangedError."""
    number = etag.partition("-")[0]
    if etag and not number.isdecimal():
        raise OverrideChangedError(
            f"{etag[:40]!r} is not an etag: send the etag of the override unchanged"
        )
    return int(number[:18]) if etag else 0


def judge(
    found: Entry | None, override: Override, seconds: float | None, etag: str
) -> tuple[OverrideOutcome, Entry]:
    """Returns the outcome of a request whose etag is not that of the stored entry, and that entry.

    Raises OverrideExistsError, OverrideChangedError, NoOverrideError.
    """
    if etag or found is None or found.ended or found.body != to_body(override):
        raise conflict_of(override.override_id, etag, found)
    lasted = _lifetime(found)
    if lasted is None or seconds is None:
        same = lasted is seconds
    else:
        same = abs(lasted - seconds) < _SAME_LIFETIME_SECONDS
    return OverrideOutcome.REPEATED if same else OverrideOutcome.END_MOVED, found


def _lifetime(entry: Entry) -> float | None:
    """Returns the lifetime in seconds at the time of writing; None without an end."""
    left = entry.remaining_seconds
    return None if left is None else left + time.time() - entry.created_at


def conflict_of(override_id: str, etag: str, found: Entry | None) -> SpeculationError:
    """Returns the error for a request that conflicts with the stored entry."""
    if found is None:
        return NoOverrideError(
            f"override {override_id!r} does not exist (any more)", resource=override_id
        )
    if found.ended:
        return OverrideExistsError(
            f"override {override_id!r} was {found.ended} before: its id cannot be used again, so "
            "that a repeated request cannot restore it; choose another id",
            resource=override_id,
        )
    if not etag:
        return OverrideExistsError(
            f"override {override_id!r} exists with different content (etag {found.etag}): to "
            "replace it, send that etag (`--etag` of the command)",
            resource=override_id,
            facts={"etag": found.etag},
        )
    return OverrideChangedError(
        f"override {override_id!r} has changed: its etag is {found.etag}; read it again",
        resource=override_id,
        facts={"etag": found.etag},
    )
