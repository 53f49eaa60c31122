"""Shares profiles in the fleet: a new pod uses what another pod has measured.

An identity is a digest of a fingerprint and of the drafters (`profile_registry.identity_of`).  The
blob store keeps an identity's newest measurements, and readers get all of them merged.  An engine
that introduces itself costs one read of the profiles of its own identity.  Profiles of other
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
from controller.core.cost.profile_merge import merge_profiles, select_distinct
from controller.core.engine_spec import EngineSpec
from controller.core.errors import InvalidProfileError, ProfileMergeError
from controller.service.net.errors import NoProfileError
from controller.service.net.limits import WAITING_READS_MAX, FairQueue
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.profile_registry import (
    ProfileRegistry,
    identity_of,
    mismatch,
    require_not_in_future,
)
from controller.service.state.session_searches import DeliverResult, SessionSearches
from controller.store.interface import PROFILES, BlobStore, StoreUnavailableError
from controller.util import tasks

# The most identities that are listed, the newest ones.
_IDENTITIES_MAX = 200
# Bytes of the summary of one identity.  An engine's introduction has at most 64 KiB, so no engine
# can match a profile with a longer summary.
_SUMMARY_BYTES_MAX: Final = 64 * 1024
# A list is read again after this time, or later if reading would take more than this share of time.
_REFRESH_SECONDS: Final = 2.0
_READ_SHARE_MAX: Final = 0.1

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
_CachedSummary = tuple[bytes, ProfileSummary | None]


@dataclass(eq=False, repr=False)
class FleetProfiles:
    """Shares profiles through the blob store, without delaying an engine's introduction."""

    blobs: BlobStore
    profile_registry: ProfileRegistry
    registry: SessionRegistry

    def __post_init__(self) -> None:
        self.searches = SessionSearches("profile", self._search)
        # Lists and downloads: one of them at a time reads profiles.
        self._read_queue = FairQueue(WAITING_READS_MAX)
        self._cached_summaries: dict[str, _CachedSummary] = {}
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
                self.search_for(session)
        return identity

    async def publish(self, profile: Profile) -> None:
        """Pushes a profile; an unavailable store is only logged, as the profile is in use here."""
        try:
            await self.push(profile)
        except StoreUnavailableError as error:
            _log.warning("profile_not_shared", profile=profile.profile_id, error=str(error))

    async def list_summaries(self) -> Sequence[ProfileSummary]:
        """Returns the usable profiles, the newest identity first; unusable entries are logged.

        Raises StoreUnavailableError, TooManyCallsError.
        """
        if time.monotonic() >= self._fresh_until:
            async with self._read_queue.turn():
                await self._refresh_summaries()
        return self._listed

    async def _refresh_summaries(self) -> None:
        if time.monotonic() < self._fresh_until:
            return
        began, pushes = time.monotonic(), self._pushes
        names = (await self.blobs.names(PROFILES))[:_IDENTITIES_MAX]
        cached = self._cached_summaries
        self._cached_summaries = {name: cached[name] for name in names if name in cached}
        for name in names:
            process = partial(_summarize, cached=self._cached_summaries.get(name))
            self._cached_summaries[name] = await self._read(name, process)
        summaries = (self._cached_summaries[name][1] for name in names)
        self._listed = tuple(summary for summary in summaries if summary is not None)
        if pushes == self._pushes:
            busy_seconds = time.monotonic() - began
            self._fresh_until = (
                began + busy_seconds + max(_REFRESH_SECONDS, busy_seconds / _READ_SHARE_MAX)
            )

    async def text_by_id(self, profile_id: str) -> str:
        """Returns the JSON text of a measurement, or of all of an identity's measurements merged.

        profile_id: that of either, or the identity.  Raises NoProfileError, StoreUnavailableError,
        TooManyCallsError.
        """
        for summary in await self.list_summaries():
            if profile_id in {summary.identity, summary.profile_id}:
                text = await self._read_text(summary.identity)
            elif profile_id in summary.measurements:
                text = await self._read_text(summary.identity, profile_id)
            else:
                continue
            if text:
                return text
        raise NoProfileError(
            f"no profile {profile_id[:64]!r} is in the store: see `controller profile list`",
            resource=profile_id,
        )

    async def text_for_engine(self, spec: EngineSpec) -> str:
        """Returns the JSON text of an engine's profile.

        Raises NoProfileError, which names the field that differs, StoreUnavailableError and
        TooManyCallsError.
        """
        if text := await self._read_text(identity_of(spec)):
            return text
        mismatches = [
            f"{summary.profile_id}: {mismatch(summary, spec)}"
            for summary in await self.list_summaries()
            if summary.fingerprint.target_model == spec.fingerprint.target_model
        ]
        raise NoProfileError(
            f"no profile in the store matches engine {spec.engine_id!r}: "
            + ("; ".join(mismatches[:3]) or f"it has none for {spec.fingerprint.target_model!r}"),
            resource=identity_of(spec),
        )

    def search_for(self, session: EngineSession) -> None:
        """Searches for an engine's profile in the background, and uses it once it is found."""
        self.searches.request(session, identity_of(session.spec))

    async def _search(self, session: EngineSession) -> DeliverResult | None:
        profile = await self._read(identity_of(session.spec), _merged_profile)
        return None if profile is None else partial(self._use_for_sessions, profile)

    def _use_for_sessions(
        self, profile: Profile, sessions: Sequence[EngineSession]
    ) -> Generator[None, None, None]:
        """Uses a profile for all matching engines without one, not only for those that waited."""
        self.profile_registry.add(profile)
        for session in self.registry:
            if (
                not session.has_ended
                and not session.core.profile_id
                and mismatch(profile, session.spec) is None
            ):
                session.use_profile(profile)
                _log.info("profile_found", engine=session.engine_id, profile=profile.profile_id)
            yield

    async def _read_text(self, identity: str, profile_id: str = "") -> str:
        """Returns the text of one measurement, or of all merged; "" if the store has none."""
        async with self._read_queue.turn():
            return await self._read(identity, partial(_merged_text, profile_id=profile_id))

    async def _read(self, identity: str, process: Callable[[str, Sequence[str]], T]) -> T:
        """Processes the stored texts of an identity in a thread."""
        texts = [item.text for item in await self.blobs.items(PROFILES, identity)]
        return await tasks.run_to_completion(asyncio.to_thread(process, identity, texts))


def _read_profiles(identity: str, texts: Sequence[str]) -> list[Profile]:
    """Reads the profiles of an identity; each takes milliseconds.

    Unusable ones are logged and skipped.
    """
    profiles = []
    for text in texts:
        try:
            profile = Profile.from_json(text)
            require_not_in_future(profile)
        except InvalidProfileError as error:
            _log.error("profile_refused", identity=identity, error=str(error))
            continue
        if identity_of(profile) == identity:
            profiles.append(profile)
        else:
            _log.error("profile_refused", identity=identity, error="it has another identity")
    return select_distinct(profiles)


def _merge_compatible(
    identity: str, profiles: Sequence[Profile]
) -> tuple[Sequence[Profile], Profile]:
    """Merges at least one profile; returns the profiles that could be merged, and the result.

    A profile is skipped if the merged one would be invalid, for example with too large numbers.
    Older profiles have priority, so that a later one cannot displace them.
    """
    try:
        return profiles, merge_profiles(profiles)
    except (InvalidProfileError, ProfileMergeError):
        oldest, *newer = sorted(profiles, key=lambda profile: profile.measured_at)
    compatible, merged = [oldest], oldest
    for profile in newer:
        try:
            merged = merge_profiles([*compatible, profile])
            compatible.append(profile)
        except (InvalidProfileError, ProfileMergeError) as error:
            _log.error("profile_refused", identity=identity, error=str(error))
    return compatible, merged


def _merged_profile(identity: str, texts: Sequence[str]) -> Profile | None:
    profiles = _read_profiles(identity, texts)
    if not profiles:
        return None
    _, merged = _merge_compatible(identity, profiles)
    assert merged.profile_id  # computes the cached digest in this thread
    return merged


def _merged_text(identity: str, texts: Sequence[str], profile_id: str) -> str:
    profiles = _read_profiles(identity, texts)
    if profile_id:
        profiles = [profile for profile in profiles if profile.profile_id == profile_id]
    return _merge_compatible(identity, profiles)[1].to_json() if profiles else ""


def _summarize(
    identity: str, texts: Sequence[str], cached: _CachedSummary | None
) -> _CachedSummary:
    """Summarizes the stored texts of an identity; returns `cached` if they have not changed."""
    digest = hashlib.sha256("\0".join(texts).encode()).digest()
    if cached is not None and cached[0] == digest:
        return cached
    profiles = _read_profiles(identity, texts)
    if not profiles:
        return digest, None
    compatible, merged = _merge_compatible(identity, profiles)
    summary = ProfileSummary(
        merged.fingerprint,
        merged.drafters,
        identity,
        merged.profile_id,
        tuple(profile.profile_id for profile in compatible),
        len(merged.cells),
        sum(cell.steps for cell in merged.cells),
        merged.measured_at,
    )
    if (size := len(repr(summary).encode())) > _SUMMARY_BYTES_MAX:
        error = f"its summary has {size} bytes: at most {_SUMMARY_BYTES_MAX}"
        _log.error("profile_refused", identity=identity, error=error)
        return digest, None
    return digest, summary
