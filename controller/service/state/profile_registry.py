"""Keeps the available profiles, and finds the one that matches an engine.

Profiles come from the configured files, and from `InstallProfile` while the sidecar runs.  The
latter are saved as files too if a directory for them is configured.  If several match an engine,
the latest installed or, among files, the latest measured one is used.
"""

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from controller.core.cost.profile import MeasuredEngine, Profile
from controller.core.engine_spec import EngineSpec
from controller.core.errors import InvalidProfileError, ProfileMismatchError, SpeculationError
from controller.service.net.errors import ProfileNotSavedError
from controller.util.files import remove_partial_files, write_atomically

# How far the clocks of a fleet, and their time zones, may differ.
_CLOCK_SKEW = timedelta(days=1)

_log = structlog.get_logger(__name__)


class ProfileFileError(SpeculationError):
    """A profile file or directory cannot be used; the message names it."""


class ProfileRegistry:
    """Holds profiles in the order of preference.  directory: where installed ones are saved."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._profiles: list[Profile] = []  # the preferred one last

    def __len__(self) -> int:
        return len(self._profiles)

    def load(self, paths: Iterable[Path]) -> None:
        """Reads and adds profiles, those of the registry's own directory included."""
        own_directory = self._directory
        if own_directory is not None and own_directory.is_dir():
            with contextlib.suppress(OSError):  # the directory may be read-only
                remove_partial_files(own_directory)
            paths = [*paths, own_directory]
        self.add_newer(self.read_files(paths))

    def read_files(self, paths: Iterable[Path]) -> list[tuple[Path, Profile]]:
        """Reads files, and the `*.json` files of directories, without adding them.

        Raises ProfileFileError for a missing path or a file that is not a profile.
        """
        return [(file, _read_profile(file)) for path in paths for file in _profile_files(path)]

    def add_newer(self, profiles: Iterable[tuple[Path, Profile]]) -> list[Profile]:
        """Adds profiles that are newer than the known ones of their identity; returns them."""
        added = []
        for file, profile in sorted(profiles, key=lambda item: item[1].measured_at):
            if self._has_same_or_newer(profile):
                continue
            self.add(profile)
            added.append(profile)
            _log.info(
                "profile_loaded",
                path=str(file),
                profile=profile.profile_id,
                device=profile.fingerprint.device,
                target_model=profile.fingerprint.target_model,
                measured_at=profile.measured_at,
            )
        return added

    def _has_same_or_newer(self, profile: Profile) -> bool:
        """Returns whether the registry has this profile, or a newer one of its identity."""
        identity = identity_of(profile)
        return any(
            existing.profile_id == profile.profile_id or existing.measured_at > profile.measured_at
            for existing in self._profiles
            if identity_of(existing) == identity
        )

    def find(self, spec: EngineSpec) -> Profile | None:
        """Returns the preferred matching profile; None without one."""
        for profile in reversed(self._profiles):
            if mismatch(profile, spec) is None:
                return profile
        return None

    def missing_profile_reason(self, spec: EngineSpec) -> str:
        """Explains to people why no profile matches this engine."""
        if not self._profiles:
            return "no profile is loaded: measure one with `controller profile`"
        return "; ".join(
            f"{profile.profile_id}: {difference}"
            for profile in reversed(self._profiles[-3:])
            if (difference := mismatch(profile, spec))
        )

    def add(self, profile: Profile) -> None:
        """Makes a profile the preferred one, and removes others of the same identity."""
        identity = identity_of(profile)
        self._profiles = [p for p in self._profiles if identity_of(p) != identity]
        self._profiles.append(profile)

    def save(self, profile: Profile) -> Path | None:
        """Saves a profile in the directory, in place of an older one of the same identity.

        Returns its path, None if no directory is configured.  Raises ProfileNotSavedError; the old
        file is then unchanged.
        """
        if self._directory is None:
            return None
        path = self._directory / f"{identity_of(profile)}.json"
        try:
            write_atomically(path, profile.to_json().encode())
        except OSError as error:
            raise ProfileNotSavedError(
                f"the profile cannot be saved in {self._directory}: {error.strerror}; nothing was "
                "changed",
                resource=profile.profile_id,
            ) from error
        return path


def mismatch(measured: MeasuredEngine, spec: EngineSpec) -> ProfileMismatchError | None:
    """Returns the first field that differs; None if a profile of `measured` matches the engine."""
    try:
        measured.require_match(spec.fingerprint, spec.drafters)
    except ProfileMismatchError as error:
        return error
    return None


def require_not_in_future(profile: Profile) -> None:
    """Raises InvalidProfileError for a profile that is dated in the future.

    The latest of several measurements is used, so such a profile would displace all later ones.
    """
    latest = datetime.now(UTC) + _CLOCK_SKEW
    # As text, which is how measurements are ordered.
    if profile.measured_at > latest.isoformat():
        raise InvalidProfileError(
            f"measured_at {profile.measured_at[:40]!r} is in the future: correct it, and the "
            "clock of the machine that measured",
            field_path="measured_at",
        )


def identity_of(source: MeasuredEngine | EngineSpec) -> str:
    """Returns a digest of the fields that profiles are matched by: 16 hexadecimal digits."""
    compared = (
        asdict(replace(source.fingerprint, shim_version="")),
        sorted((d.name, d.model, d.revision) for d in source.drafters),
    )
    return hashlib.sha256(repr(compared).encode()).hexdigest()[:16]


def _profile_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.json"))
    return [path]


def _read_profile(path: Path) -> Profile:
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileFileError(f"profile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileFileError(f"profile {path}: not UTF-8 text") from error
    except InvalidProfileError as error:
        raise ProfileFileError(f"profile {path}: {error}") from error
