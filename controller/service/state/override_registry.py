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
from controller.util.text import to_printable
from controller.wire.overrides import override_from_json, override_to_json

# The store is read again after this time at the latest.
_REFRESH_SECONDS = 30.0
# Unusable overrides of the store that are named.
_NAMED_MAX = 20
# Characters of an id or a reason that are shown.
_SHOWN_CHARACTERS = 200
_OVER_LIMIT_REASON = f"{LIVE_ENTRIES_MAX} newer overrides are in force, which is the limit"

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

    def __init__(self, store: Store, session_registry: SessionRegistry) -> None:
        self._store = store
        self._session_registry = session_registry
        self._active_by_id: dict[str, ActiveOverride] = {}
        self.policy = Policy()
        self._policy_overrides: dict[str, ActiveOverride] = {}
        # Entries of the store that cannot be in force here: etag and reason, by id.
        self._unusable_entries: dict[str, tuple[str, str]] = {}
        self._refresh_needed = asyncio.Event()
        self._watchers = OverrideWatchers()

    async def open(self) -> None:
        """Opens the store and reads the overrides.  Raises StoreError."""
        await self._store.open(self._refresh_needed.set)
        await self.refresh()

    async def close(self) -> None:
        """Ends all watches, and closes the store."""
        self._watchers.close()
        await self._store.close()

    @property
    def health(self) -> Health:
        """Returns the state of the store, with the entries that cannot be in force here."""
        health, unusable = self._store.health, self._unusable_entries
        # Other processes may have written the ids, and the texts that the reasons quote.
        reasons = {
            _printable(name): _printable(unusable[name][1])
            for name in sorted(unusable)[:_NAMED_MAX]
        }
        return replace(
            health,
            unusable={**health.unusable, **reasons},
            unusable_count=health.unusable_count + len(unusable),
        )

    def is_unusable(self, override_id: str) -> bool:
        """Returns whether the store has an entry with that id that cannot be in force here."""
        return override_id in self._unusable_entries or self._is_unreadable(override_id)

    def _is_unreadable(self, override_id: str) -> bool:
        # A name with a backslash is the escaped form of an unprintable id, not an id.
        return override_id in self._store.health.unusable and "\\" not in override_id

    def active(self) -> tuple[Override, ...]:
        """Returns all overrides in force now, for any engine; file-based policy included."""
        return tuple(active.override for active in self._unexpired())

    def _unexpired(self) -> list[ActiveOverride]:
        now = time.monotonic()
        unexpired = [active for active in self._active_by_id.values() if active.deadline > now]
        return [*unexpired, *self._policy_overrides.values()]

    def ends_at(self, override_id: str) -> float | None:
        """Returns the end in Unix seconds; None if there is no end, or no such override."""
        active = self._active_by_id.get(override_id)
        seconds = None if active is None else active.remaining_seconds
        return None if seconds is None else time.time() + seconds

    def list_active(self) -> list[ActiveOverride]:
        """Returns all overrides in force now, ordered by id; file-based policy included."""
        return sorted(self._unexpired(), key=lambda active: active.override.override_id)

    async def use_policy(self, policy: Policy) -> None:
        """Replaces the policy in force."""
        self.policy = policy
        new_overrides = {
            o.override_id: ActiveOverride(o, "", math.inf, policy.read_at, str(policy.path))
            for o in policy.overrides
        }
        previous_overrides, self._policy_overrides = self._policy_overrides, new_overrides
        for name, active in previous_overrides.items():
            if name not in new_overrides:
                self._watchers.notify(OverrideChange("ended", active))
        changed = [
            override_id
            for override_id, active in new_overrides.items()
            if override_id not in previous_overrides
            or previous_overrides[override_id].override != active.override
        ]
        for name in changed:
            self._watchers.notify(OverrideChange("set", new_overrides[name]))
        if changed or previous_overrides.keys() != new_overrides.keys():
            await self._push_to_sessions()

    async def set_override(
        self, override: Override, seconds: float | None, etag: str, actor: Actor
    ) -> tuple[ActiveOverride, OverrideOutcome]:
        """Sets an override; returns the override in force and the outcome.

        Raises OverrideExistsError, OverrideChangedError, NoOverrideError, TooManyOverridesError,
        StoreUnavailableError.
        """
        name, body = override.override_id, override_to_json(override)
        outcome = OverrideOutcome.SET
        try:
            entry = await self._store.write(name, body, seconds, revision_of(etag), actor)
        except ConflictError as conflict:
            outcome, stored = classify_conflict(conflict.stored_entry, override, seconds, etag)
            if outcome is OverrideOutcome.REPEATED:
                return await self._apply_entry(stored, override), outcome
            try:
                entry = await self._store.write(name, body, seconds, stored.revision, actor)
            except ConflictError as second_conflict:
                raise conflict_error(
                    name, stored.etag, second_conflict.stored_entry
                ) from second_conflict
        except StoreFullError as store_full:
            raise TooManyOverridesError(str(store_full)) from store_full
        active = await self._apply_entry(entry, override)
        _log.info(
            "override_set", override=name, scope=str(override.scope), author=actor.author,
            reason=actor.reason, origin=actor.origin, seconds=seconds,
        )  # fmt: skip
        return active, outcome

    async def check_set(
        self, override: Override, seconds: float | None, etag: str
    ) -> OverrideOutcome:
        """Returns the outcome that `set_override` would have, and raises what it would raise."""
        self._require_capacity(override)
        expected = revision_of(etag)
        entries = await self._store.entries()
        stored = next((e for e in entries if e.override_id == override.override_id), None)
        if expected == (0 if stored is None else stored.revision):
            return OverrideOutcome.SET
        return classify_conflict(stored, override, seconds, etag)[0]

    def _require_capacity(self, override: Override) -> None:
        if (
            override.override_id not in self._active_by_id
            and len(self._active_by_id) >= LIVE_ENTRIES_MAX
        ):
            raise TooManyOverridesError(
                f"{len(self._active_by_id)} overrides are in force already, which is the limit: "
                "clear some"
            )

    async def clear_override(self, override_id: str, etag: str, actor: Actor) -> None:
        """Ends an override.

        Raises NoOverrideError, OverrideChangedError, StoreUnavailableError.
        """
        entry = await self._find_entry(override_id)
        if etag and (entry is None or etag != entry.etag):
            raise conflict_error(override_id, etag, entry)
        try:
            await self._store.clear(override_id, 0 if entry is None else entry.revision, actor)
        except ConflictError as conflict:
            raise conflict_error(
                override_id, etag or "the newest", conflict.stored_entry
            ) from conflict
        _log.info(
            "override_cleared", override=override_id, author=actor.author, reason=actor.reason,
            origin=actor.origin,
        )  # fmt: skip
        self._deactivate(override_id)
        if self._unusable_entries:
            await self.refresh()  # another one may fit now
        await self._push_to_sessions()

    async def _find_entry(self, override_id: str) -> Entry | None:
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

    def sessions_in_scope(self, scope: Scope) -> list[EngineSession]:
        """Returns the sessions of this sidecar's engines in a scope, ordered by engine id."""
        sessions = (session for session in self._session_registry if scope.covers(session.spec))
        return sorted(sessions, key=lambda session: session.engine_id)

    def known_engines(self) -> list[EngineSession]:
        """Returns the sessions of all engines of this sidecar, ordered by engine id."""
        return sorted(self._session_registry, key=lambda session: session.engine_id)

    def active_with(self, override: Override) -> tuple[Override, ...]:
        """Returns the overrides that would be in force with an additional, newest one."""
        newest = max((o.revision for o in self.active()), default=0)
        newer = replace(override, revision=newest + 1)
        return (*self.active_without(override.override_id), newer)

    def active_without(self, override_id: str) -> tuple[Override, ...]:
        """Returns the overrides that would be in force without one of them."""
        return tuple(o for o in self.active() if o.override_id != override_id)

    async def audit(self, limit: int, subject: str, before: str) -> list[AuditRecord]:
        """Returns audit records, the newest first.  Raises StoreUnavailableError."""
        return list(await self._store.audit(limit, subject, before))

    def watch(self) -> "contextlib.AbstractAsyncContextManager[AsyncIterator[OverrideChange]]":
        """Yields all overrides in force, then every change, until the sidecar stops.

        Raises SlowClientError if the reader falls behind.
        """
        return self._watchers.watch(self.list_active())

    async def refresh(self) -> None:
        """Reads the overrides from the store.

        Raises nothing: while the store is unavailable, the present overrides stay in force.
        """
        try:
            entries = await self._store.entries()
        except StoreUnavailableError as error:
            _log.warning("store_unavailable", error=str(error))
            return
        self._select_entries([entry for entry in entries if not entry.ended])
        await self._push_to_sessions()

    def _select_entries(self, entries: list[Entry]) -> None:
        """Puts the newest entries of the store into force, up to the limit.

        All sidecars choose the same entries, because the store assigns the revisions.
        """
        chosen_ids, unusable_entries = set[str](), dict[str, tuple[str, str]]()
        for entry in sorted(entries, key=lambda entry: (-entry.revision, entry.override_id)):
            name = entry.override_id
            if len(chosen_ids) == LIVE_ENTRIES_MAX:
                reason = _OVER_LIMIT_REASON
            elif (reason := self._activate_entry(entry)) == "":
                chosen_ids.add(name)
                continue
            unusable_entries[name] = entry.etag, reason
        for name in self._active_by_id.keys() - chosen_ids:
            self._deactivate(name)
        if new_reasons := {
            override_id: etag_and_reason
            for override_id, etag_and_reason in unusable_entries.items()
            if self._unusable_entries.get(override_id) != etag_and_reason
        }:
            _log.error(
                "overrides_not_in_force", count=len(unusable_entries),
                overrides={
                    override_id: new_reasons[override_id][1]
                    for override_id in sorted(new_reasons)[:_NAMED_MAX]
                },
            )  # fmt: skip
        self._unusable_entries = unusable_entries

    async def _apply_entry(self, entry: Entry, override: Override) -> ActiveOverride:
        """Puts a written entry into force."""
        active = self._active_by_id.get(entry.override_id)
        if active is None or active.etag != entry.etag:
            active = self._activate(entry, override)
        await self._push_to_sessions()
        return active

    def _activate_entry(self, entry: Entry) -> str:
        """Puts an entry into force; returns why that is impossible, or ""."""
        active = self._active_by_id.get(entry.override_id)
        if active is not None and active.etag == entry.etag:
            return ""
        etag, reason = self._unusable_entries.get(entry.override_id, ("", ""))
        if etag == entry.etag and reason not in {"", _OVER_LIMIT_REASON}:
            return reason
        try:
            override = override_from_json(entry.body)
        except InvalidOverrideError as error:
            # It may come from a newer sidecar; it has no effect here.
            return str(error)
        if override.override_id != entry.override_id:
            return "it contains an override with another id"
        self._activate(entry, override)
        return ""

    def _activate(self, entry: Entry, override: Override) -> ActiveOverride:
        seconds = entry.remaining_seconds
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        active = ActiveOverride(
            replace(override, revision=entry.revision), entry.etag, deadline, entry.created_at
        )
        self._active_by_id[entry.override_id] = active
        self._watchers.notify(OverrideChange("set", active))
        self._refresh_needed.set()  # the next end may be earlier now
        return active

    def expire_overrides(self) -> None:
        """Ends the overrides that have expired.

        It also runs before every plan: after a process was suspended, a report can be processed
        before the timer.
        """
        now = time.monotonic()
        expired_ids = [
            name
            for name, active_override in self._active_by_id.items()
            if active_override.deadline <= now
        ]
        for name in expired_ids:
            _log.info("override_expired", override=name)
            self._deactivate(name)
        if expired_ids:
            overrides = self.active()
            for session in self._session_registry:
                self._push_to_session(session, overrides)

    def _deactivate(self, override_id: str) -> None:
        active = self._active_by_id.pop(override_id, None)
        if active is not None:
            self._watchers.notify(OverrideChange("ended", active))

    async def _push_to_sessions(self) -> None:
        """Applies the overrides to every engine, and yields to the event loop between engines."""
        for session in self._session_registry:
            if not session.has_ended:
                # The overrides may have changed since the previous engine.
                self._push_to_session(session, self.active())
            await asyncio.sleep(0)

    def _push_to_session(self, session: EngineSession, overrides: tuple[Override, ...]) -> None:
        if session.core.set_overrides(overrides):
            _log.info(
                "overrides_in_force", engine=session.engine_id,
                overrides=[o.override_id for o in session.core.overrides],
            )  # fmt: skip
            # At once, because there may be no open stream that would do it.
            session.make_due_plan()
            session.wake_streams()

    async def run(self) -> None:
        """Ends expired overrides, and reads changes from the store, until cancelled."""
        # The store may have changed while this task did not run.
        self._refresh_needed.set()
        while True:
            soonest = min(
                (active.deadline for active in self._active_by_id.values()), default=math.inf
            )
            pause = min(max(0.0, soonest - time.monotonic()), _REFRESH_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._refresh_needed.wait()
            self._refresh_needed.clear()
            self.expire_overrides()
            try:
                await self.refresh()
            except SpeculationError as error:
                _log.error("overrides_not_refreshed", error=str(error))


def _printable(text: str) -> str:
    return to_printable(text)[:_SHOWN_CHARACTERS]


def revision_of(etag: str) -> int:
    """Returns the revision that an etag stands for.  Raises OverrideChangedError."""
    revision_text = etag.partition("-")[0]
    if etag and not revision_text.isdecimal():
        raise OverrideChangedError(
            f"{etag[:40]!r} is not an etag: send the etag of the override unchanged"
        )
    return int(revision_text[:18]) if etag else 0


def classify_conflict(
    stored: Entry | None, override: Override, seconds: float | None, etag: str
) -> tuple[OverrideOutcome, Entry]:
    """Returns the outcome of a request whose etag is not that of the stored entry, and that entry.

    Raises OverrideExistsError, OverrideChangedError, NoOverrideError.
    """
    if etag or stored is None or stored.ended or stored.body != override_to_json(override):
        raise conflict_error(override.override_id, etag, stored)
    stored_seconds = _lifetime_seconds(stored)
    if stored_seconds is None or seconds is None:
        is_same_lifetime = stored_seconds is seconds
    else:
        is_same_lifetime = abs(stored_seconds - seconds) < _SAME_LIFETIME_SECONDS
    return OverrideOutcome.REPEATED if is_same_lifetime else OverrideOutcome.END_MOVED, stored


def _lifetime_seconds(entry: Entry) -> float | None:
    """Returns the lifetime in seconds at the time of writing; None without an end."""
    seconds_left = entry.remaining_seconds
    return None if seconds_left is None else seconds_left + time.time() - entry.created_at


def conflict_error(override_id: str, etag: str, stored: Entry | None) -> SpeculationError:
    """Returns the error for a request that conflicts with the stored entry."""
    if stored is None:
        return NoOverrideError(
            f"override {override_id!r} does not exist (or has ended)", resource=override_id
        )
    if stored.ended:
        return OverrideExistsError(
            f"override {override_id!r} was {stored.ended} before: its id cannot be used again, so "
            "that a repeated request cannot restore it; choose another id",
            resource=override_id,
        )
    if not etag:
        return OverrideExistsError(
            f"override {override_id!r} exists with different content (etag {stored.etag}): to "
            "replace it, send that etag (`--etag` of the command)",
            resource=override_id,
            facts={"etag": stored.etag},
        )
    return OverrideChangedError(
        f"override {override_id!r} has changed: its etag is {stored.etag}; read it again",
        resource=override_id,
        facts={"etag": stored.etag},
    )
