"""Profiles as the fleet's goods: what one pod has measured, the next one finds when it boots."""

import asyncio

import structlog

from controller import tasks
from controller.core.errors import InvalidProfileError
from controller.core.profile import Profile
from controller.core.types import EngineSpec
from controller.service.profile_library import ProfileLibrary, identity_of, mismatch
from controller.service.sessions import SessionRegistry
from controller.store.port import ProfileShelf, StoreUnavailableError

_log = structlog.get_logger(__name__)


class FleetProfiles:
    """Shares profiles through the store; never in the way of an engine that introduces itself."""

    def __init__(
        self, store: ProfileShelf, library: ProfileLibrary, registry: SessionRegistry
    ) -> None:
        self._store = store
        self._library = library
        self._registry = registry
        self._looking: set[asyncio.Task[None]] = set()

    async def publish(self, profile: Profile) -> None:
        """Gives a measured profile to the fleet; it is used here also when the store is away."""
        try:
            await self._store.put_profile(identity_of(profile), profile.to_json())
        except StoreUnavailableError as error:
            _log.warning("profile_not_shared", profile=profile.profile_id, error=str(error))
            return
        _log.info("profile_shared", profile=profile.profile_id)

    def look_for(self, spec: EngineSpec) -> None:
        """Asks for an engine's profile in the background, and puts it into use when it comes."""
        task = asyncio.get_running_loop().create_task(self._find(spec))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def close(self) -> None:
        """Ends looking."""
        await tasks.end(self._looking)

    async def _find(self, spec: EngineSpec) -> None:
        try:
            text = await self._store.profile(identity_of(spec))
            if text is None:
                return
            profile = Profile.from_json(text)
        except (StoreUnavailableError, InvalidProfileError) as error:
            _log.warning("profile_not_found", engine=spec.engine_id, error=str(error))
            return
        if (differs := mismatch(profile, spec)) is not None:
            # Somebody wrote it under a wrong name: it is not used.
            _log.error("profile_refused", engine=spec.engine_id, error=str(differs))
            return
        self._library.add(profile)
        for session in self._registry:
            if not session.core.profile_id and mismatch(profile, session.spec) is None:
                session.use_profile(profile)
                _log.info("profile_found", engine=session.engine_id, profile=profile.profile_id)
