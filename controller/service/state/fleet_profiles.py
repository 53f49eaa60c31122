"""Shares profiles in the fleet: a new pod uses what another pod has measured.

The blob store keeps an identity's newest measurements, and readers get all of them merged.  An
engine that introduces itself costs one read of the profiles of its own identity.  Profiles of other
identities are read only for people who list them, and again only if they have changed.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import structlog

from controller.core.cost.profile import MeasuredEngine, Profile
from controller.core.cost.profile_merge import distinct, merge_profiles
from controller.core.engine_spec import EngineSpec
from controller.core.errors import InvalidProfileError, ProfileMergeError
from controller.service.net.errors import NoProfileError
from controller.service.net.limits import READS_WAITING, Turns
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.profile_registry import (
    ProfileRegistry,
    identity_of,
    mismatch,
    require_past,
)
from controller.service.state.session_searches import Give, SessionSearches
from controller.store.interface import PROFILES, BlobStore, StoreUnavailableError
from controller.util import tasks

# The most identities that are listed, the newest ones.
_LISTED = 200
# Bytes of the summary of one identity.  An engine's introduction has at most 64 KiB, so no engine
# can match a profile with a longer summary.
_SUMMARY_BYTES_MAX: Final = 64 * 1024
# A list is read again after this time, or later if reading would take more than this share of time.
_SECONDS: Final = 2.0
_SHARE_MAX: Final = 0.1

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ProfileSummary(MeasuredEngine):
    """Describes the profiles of one identity, without their cells.

    measurements: ids of the profiles.  profile_id: of all of them merged.  cells, steps: of the
    merged profile.  measured_at: of the newest measurement.
    """

    identity: str
    profile_id: str
    measurements: tuple[str, ...]
    cells: int
    steps: int
    measured_at: str


# The digest of an identity's texts, and their summary; None if they cannot be used.
_Known = tuple[bytes, ProfileSummary | None]


@dataclass(eq=False, repr=False)
class FleetProfiles:
    """Shares profiles through the blob store, without delaying an engine's introduction."""

    blobs: BlobStore
    profile_registry: ProfileRegistry
    registry: SessionRegistry

    def __post_init__(self) -> None:
        self.searches = SessionSearches("profile", self._search)
        # Lists and downloads: one of them at a time reads profiles.
        self._turns = Turns(READS_WAITING)
        self._summaries: dict[str, _Known] = {}
        self._listed: tuple[ProfileSummary, ...] = ()
        self._fresh_until = -math.inf
        self._pushes = 0

    async def push(self, profile: Profile) -> str:
        """Stores a profile for the fleet; returns its identity.  Raises StoreUnavailableError."""
        identity = identity_of(profile)
        text = await asyncio.to_thread(profile.to_json)
        await self.blobs.put(PROFILES, identity, profile.profile_id, text)
        self._pushes += 1
        self._fresh_until = -math.inf
        _log.info("profile_shared", profile=profile.profile_id, identity=identity)
        for session in self.registry:
            if not session.core.profile_id and mismatch(profile, session.spec) is None:
                self.look_for(session)
        return identity

    async def publish(self, profile: Profile) -> None:
        """Pushes a profile; an unavailable store is only logged, as the profile is in use here."""
        try:
            await self.push(profile)
        except StoreUnavailableError as error:
            _log.warning("profile_not_shared", profile=profile.profile_id, error=str(error))

    async def listed(self) -> Sequence[ProfileSummary]:
        """Returns the usable profiles, the newest identity first; unusable entries are logged.

        Raises StoreUnavailableError, TooManyCallsError.
        """
        if time.monotonic() >= self._fresh_until:
            async with self._turns.turn():
                await self._list()
        return self._listed

    async def _list(self) -> None:
        if time.monotonic() < self._fresh_until:
            return
        began, pushes = time.monotonic(), self._pushes
        names = (await self.blobs.names(PROFILES))[:_LISTED]
        known = self._summaries
        self._summaries = {name: known[name] for name in names if name in known}
        for name in names:
            make = partial(_summary, known=self._summaries.get(name))
            self._summaries[name] = await self._read(name, make)
        found = (self._summaries[name][1] for name in names)
        self._listed = tuple(summary for summary in found if summary is not None)
        if pushes == self._pushes:
            took = time.monotonic() - began
            self._fresh_until = began + took + max(_SECONDS, took / _SHARE_MAX)

    async def by_id(self, profile_id: str) -> str:
        """Returns the JSON text of a measurement, or of all of an identity's measurements merged.

        profile_id: that of either, or the identity.  Raises NoProfileError, StoreUnavailableError,
        TooManyCallsError.
        """
        for summary in await self.listed():
            if profile_id in {summary.identity, summary.profile_id}:
                text = await self._text_of(summary.identity)
            elif profile_id in summary.measurements:
                text = await self._text_of(summary.identity, profile_id)
            else:
                continue
            if text:
                return text
        raise NoProfileError(
            f"no profile {profile_id[:64]!r} is in the store: see `controller profile list`",
            resource=profile_id,
        )

    async def for_engine(self, spec: EngineSpec) -> str:
        """Returns the JSON text of an engine's profile.

        Raises NoProfileError, which names the field that differs, StoreUnavailableError and
        TooManyCallsError.
        """
        if text := await self._text_of(identity_of(spec)):
            return text
        near = [
            f"{found.profile_id}: {mismatch(found, spec)}"
            for found in await self.listed()
            if found.fingerprint.target_model == spec.fingerprint.target_model
        ]
        raise NoProfileError(
            f"no profile in the store matches engine {spec.engine_id!r}: "
            + ("; ".join(near[:3]) or f"it has none for {spec.fingerprint.target_model!r}"),
            resource=identity_of(spec),
        )

    def look_for(self, session: EngineSession) -> None:
        """Searches for an engine's profile in the background, and uses it once it is found."""
        self.searches.ask(session, identity_of(session.spec))

    async def _search(self, session: EngineSession) -> Give | None:
        profile = await self._read(identity_of(session.spec), _merged)
        return None if profile is None else partial(self._use, profile)

    def _use(
        self, profile: Profile, sessions: Sequence[EngineSession]
    ) -> Generator[None, None, None]:
        """Uses a profile for all matching engines without one, not only for those that waited."""
        self.profile_registry.add(profile)
        for session in self.registry:
            if (
                not session.is_over
                and not session.core.profile_id
                and mismatch(profile, session.spec) is None
            ):
                session.use_profile(profile)
                _log.info("profile_found", engine=session.engine_id, profile=profile.profile_id)
            yield

    async def _text_of(self, identity: str, profile_id: str = "") -> str:
        """Returns the text of one measurement, or of all merged; "" if the store has none."""
        async with self._turns.turn():
            return await self._read(identity, partial(_text, profile_id=profile_id))

    async def _read(self, identity: str, make: Callable[[str, Sequence[str]], T]) -> T:
        """Processes the stored texts of an identity in a thread."""
        texts = [item.text for item in await self.blobs.items(PROFILES, identity)]
        return await tasks.finish(asyncio.to_thread(make, identity, texts))


def _measurements(identity: str, texts: Sequence[str]) -> list[Profile]:
    """Reads the profiles of an identity; each takes milliseconds.

    Unusable ones are logged and skipped.
    """
    profiles = []
    for text in texts:
        try:
            profile = Profile.from_json(text)
            require_past(profile)
        except InvalidProfileError as error:
            _log.error("profile_refused", identity=identity, error=str(error))
            continue
        if identity_of(profile) == identity:
            profiles.append(profile)
        else:
            _log.error("profile_refused", identity=identity, error="it has another identity")
    return distinct(profiles)


def _merge(identity: str, profiles: Sequence[Profile]) -> tuple[Sequence[Profile], Profile]:
    """Merges at least one profile; returns the profiles that could be merged, and the result.

    A profile is skipped if the merged one would be invalid, for example with too large numbers.
    Older profiles have priority, so that a later one cannot displace them.
    """
    try:
        return profiles, merge_profiles(profiles)
    except (InvalidProfileError, ProfileMergeError):
        first, *others = sorted(profiles, key=lambda profile: profile.measured_at)
    kept, merged = [first], first
    for profile in others:
        try:
            merged = merge_profiles([*kept, profile])
            kept.append(profile)
        except (InvalidProfileError, ProfileMergeError) as error:
            _log.error("profile_refused", identity=identity, error=str(error))
    return kept, merged


def _merged(identity: str, texts: Sequence[str]) -> Profile | None:
    profiles = _measurements(identity, texts)
    if not profiles:
        return None
    _, merged = _merge(identity, profiles)
    assert merged.profile_id  # kept by the profile
    return merged


def _text(identity: str, texts: Sequence[str], profile_id: str) -> str:
    profiles = _measurements(identity, texts)
    if profile_id:
        profiles = [profile for profile in profiles if profile.profile_id == profile_id]
    return _merge(identity, profiles)[1].to_json() if profiles else ""


def _summary(identity: str, texts: Sequence[str], known: _Known | None) -> _Known:
    """Summarizes the stored texts of an identity; returns `known` if they have not changed."""
    digest = hashlib.sha256("\0".join(texts).encode()).digest()
    if known is not None and known[0] == digest:
        return known
    profiles = _measurements(identity, texts)
    if not profiles:
        return digest, None
    kept, merged = _merge(identity, profiles)
    summary = ProfileSummary(
        merged.fingerprint,
        merged.drafters,
        identity,
        merged.profile_id,
        tuple(profile.profile_id for profile in kept),
        len(merged.cells),
        sum(cell.steps for cell in merged.cells),
        merged.measured_at,
    )
    if (size := len(repr(summary).encode())) > _SUMMARY_BYTES_MAX:
        error = f"its summary has {size} bytes: at most {_SUMMARY_BYTES_MAX}"
        _log.error("profile_refused", identity=identity, error=error)
        return digest, None
    return digest, summary
