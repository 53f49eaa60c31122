"""Profiles as the fleet's goods: what one pod has measured, the next one finds when it boots.

The blob store keeps an identity's newest measurements; what is given out is all of them merged.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from controller.core.cost.profile import Profile
from controller.core.cost.profile_merge import distinct, merge_profiles
from controller.core.engine_spec import EngineSpec
from controller.core.errors import InvalidProfileError
from controller.service.net.errors import NoProfileError
from controller.service.sessions.profile_registry import (
    ProfileRegistry,
    identity_of,
    mismatch,
    require_past,
)
from controller.service.sessions.registry import SessionRegistry
from controller.store.interface import PROFILES, BlobStore, StoreUnavailableError
from controller.util.background_tasks import BackgroundTasks

# Identities that are listed, the newest.
_LISTED = 200

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SharedProfile:
    """Holds what there is for one identity.  profile: all `measurements` merged."""

    identity: str
    profile: Profile
    measurements: tuple[Profile, ...]


class FleetProfiles:
    """Shares profiles through the blob store, without delaying an engine's introduction."""

    def __init__(
        self, blobs: BlobStore, profile_registry: ProfileRegistry, registry: SessionRegistry
    ) -> None:
        self._blobs = blobs
        self._profile_registry = profile_registry
        self._registry = registry
        self._looking = BackgroundTasks()

    async def push(self, profile: Profile) -> str:
        """Gives a profile to the fleet; its identity.  Raises StoreUnavailableError."""
        identity = identity_of(profile)
        text = await asyncio.to_thread(profile.to_json)
        await self._blobs.put(PROFILES, identity, profile.profile_id, text)
        _log.info("profile_shared", profile=profile.profile_id, identity=identity)
        for session in self._registry:
            if not session.core.profile_id and mismatch(profile, session.spec) is None:
                self.look_for(session.spec)
        return identity

    async def publish(self, profile: Profile) -> None:
        """Pushes a profile; an unavailable store is only logged, as the profile serves here."""
        try:
            await self.push(profile)
        except StoreUnavailableError as error:
            _log.warning("profile_not_shared", profile=profile.profile_id, error=str(error))

    async def all(self) -> list[SharedProfile]:
        """Everything that can be used, the newest identity first.  Raises StoreUnavailableError."""
        names = (await self._blobs.names(PROFILES))[:_LISTED]
        return [found for name in names if (found := await self.of(name)) is not None]

    async def of(self, identity: str) -> SharedProfile | None:
        """Returns what there is for an identity; unusable entries are logged and left out."""
        items = await self._blobs.items(PROFILES, identity)
        return await asyncio.to_thread(_merged, identity, [item.text for item in items])

    async def by_id(self, profile_id: str) -> Profile:
        """A measurement, or what an identity's measurements make together, by its id or identity.

        Raises NoProfileError, StoreUnavailableError.
        """
        for stored in await self.all():
            if profile_id in {stored.identity, stored.profile.profile_id}:
                return stored.profile
            for profile in stored.measurements:
                if profile.profile_id == profile_id:
                    return profile
        raise NoProfileError(
            f"no profile {profile_id[:64]!r} is in the store: see `controller profile list`",
            resource=profile_id,
        )

    async def for_engine(self, spec: EngineSpec) -> Profile:
        """Raises NoProfileError, which names the field that differs, and StoreUnavailableError."""
        stored = await self.of(identity_of(spec))
        if stored is not None:
            return stored.profile
        near = await self._near(spec)
        raise NoProfileError(
            f"no profile in the store belongs to engine {spec.engine_id!r}: "
            + ("; ".join(near[:3]) or f"none is of {spec.fingerprint.target_model!r}"),
            resource=identity_of(spec),
        )

    async def _near(self, spec: EngineSpec) -> list[str]:
        """Explains why profiles of the same target model do not belong to an engine."""
        return [
            f"{found.profile.profile_id}: {mismatch(found.profile, spec)}"
            for found in await self.all()
            if found.profile.fingerprint.target_model == spec.fingerprint.target_model
        ]

    def look_for(self, spec: EngineSpec) -> None:
        """Asks for an engine's profile in the background, and puts it into use when it comes."""
        self._looking.start("find a profile", self._find(spec))

    async def close(self) -> None:
        """Stops looking for profiles."""
        await self._looking.close()

    async def _find(self, spec: EngineSpec) -> None:
        try:
            stored = await self.of(identity_of(spec))
            near = [] if stored is not None else await self._near(spec)
        except StoreUnavailableError as error:
            _log.warning("profile_not_looked_for", engine=spec.engine_id, error=str(error))
            return
        if stored is None:
            if near:
                _log.warning("profile_refused", engine=spec.engine_id, detail="; ".join(near[:3]))
            return
        profile = stored.profile
        self._profile_registry.add(profile)
        for session in self._registry:
            if not session.core.profile_id and mismatch(profile, session.spec) is None:
                session.use_profile(profile)
                _log.info("profile_found", engine=session.engine_id, profile=profile.profile_id)
                await asyncio.sleep(0)


def _merged(identity: str, texts: Sequence[str]) -> SharedProfile | None:
    """Merges profiles, each of which takes milliseconds to read: for a thread."""
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
    if not profiles:
        return None
    kept = distinct(profiles)
    merged = merge_profiles(kept)
    assert merged.profile_id  # kept by the profile
    return SharedProfile(identity, merged, tuple(kept))
