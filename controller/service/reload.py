"""Reads the settings again on SIGHUP, and applies those that can change while the sidecar serves.

If the settings or the profile files cannot be used, nothing changes and the log has the error.
Settings that need a restart keep their values, and the log names them.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from controller.core.cost.profile import Profile
from controller.core.errors import SpeculationError
from controller.service.rpc.overrides import PolicyServicer
from controller.service.sessions.registry import SessionRegistry
from controller.service.state.profile_registry import ProfileRegistry, mismatch
from controller.service.views.readiness import Readiness
from controller.settings.settings import RELOADED, Settings, setting_keys

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Holds new settings.

    changed: dotted keys of the settings that change now; needs_restart: of those that need a
    restart.
    """

    settings: Settings
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def settings_change(current: Settings, new: Settings) -> SettingsChange:
    """Finds which changed settings can be applied while the sidecar serves, and which cannot."""
    differing = [
        key for key in setting_keys() if _setting_value(current, key) != _setting_value(new, key)
    ]
    changed = tuple(key for key in differing if key.partition(".")[0] in RELOADED)
    unchanged = {
        name: getattr(current, name) for name in Settings.model_fields if name not in RELOADED
    }
    needs_restart = tuple(key for key in differing if key not in changed)
    return SettingsChange(new.model_copy(update=unchanged), changed, needs_restart)


@dataclass(eq=False, repr=False)
class Reloader:
    """Applies new settings to the parts of a sidecar that support it."""

    registry: SessionRegistry
    profiles: ProfileRegistry
    readiness: Readiness
    policy: PolicyServicer

    async def reload(self, current: Settings, read: Callable[[], Settings]) -> Settings:
        """Returns the settings in use from now on; `current` if the new ones cannot be used."""
        try:
            change = settings_change(current, await asyncio.to_thread(read))
            profiles = await asyncio.to_thread(self.profiles.read_files, change.settings.profiles)
        except SpeculationError as error:
            _log.error(
                "settings_not_reloaded", error=str(error), detail="all settings keep their values"
            )
            return current
        new = change.settings
        logging.getLogger().setLevel(new.log_level.upper())
        self.registry.max_engines = new.max_engines
        self.registry.idle_seconds = new.session_idle_seconds
        self.policy.default_lifetime_seconds = new.override_default_seconds
        self.policy.max_lifetime_seconds = new.override_max_seconds
        self.readiness.ready_with = new.ready_with
        for session in self.registry:
            session.use_settings(new.planner, new.training)
        self._apply_profiles(self.profiles.add_newer(profiles))
        _log.info("settings_reloaded", changed=list(change.changed))
        if change.needs_restart:
            _log.warning(
                "settings_need_restart",
                settings=list(change.needs_restart),
                detail="they keep their values until the sidecar is restarted",
            )
        return new

    def _apply_profiles(self, profiles: list[Profile]) -> None:
        for profile in profiles:
            for session in self.registry:
                if mismatch(profile, session.spec) is None:
                    session.use_profile(profile)
                    _log.info("profile_found", engine=session.engine_id, profile=profile.profile_id)


def _setting_value(settings: Settings, key: str) -> object:
    name, _, subkey = key.partition(".")
    value = getattr(settings, name)
    return getattr(value, subkey) if subkey else value
