"""The profile at the output path: where it goes, and whether it may stay."""

import hashlib
import re
from dataclasses import asdict, replace
from pathlib import Path

from controller.core.cost.profile import Profile
from controller.core.engine_spec import EngineSpec
from controller.core.errors import InvalidProfileError, ProfileMismatchError
from controller.profiling.errors import ProfileRefusedError
from controller.profiling.partial import identities
from controller.util.files import write_whole

_NAME_MAX = 48


def default_path(spec: EngineSpec, directory: Path = Path("profiles")) -> Path:
    """`<model>-<device>-<digest of the fingerprint and the drafters>.json`."""
    fingerprint = replace(spec.fingerprint, shim_version="")
    identity = repr((asdict(fingerprint), identities(spec)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    model = spec.fingerprint.target_model.rstrip("/").rpartition("/")[2]
    return directory / f"{_slug(model)}-{_slug(spec.fingerprint.device)}-{digest}.json"


def _slug(text: str) -> str:
    plain = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return plain[:_NAME_MAX].rstrip("-.") or "unknown"


def reusable_profile(path: Path, spec: EngineSpec) -> Profile | None:
    """The profile there, if it is this engine's; None when there is no file.

    Raises ProfileRefusedError for another engine's profile, and for a file that is not a profile.
    """
    again = "measure again with --force, or name another file with --output"
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
        profile.require_match(spec.fingerprint, spec.drafters)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProfileRefusedError(f"{path} cannot be read: {error.strerror}") from error
    except (InvalidProfileError, UnicodeDecodeError) as error:
        raise ProfileRefusedError(f"{path} is not a profile: {error}; {again}") from error
    except ProfileMismatchError as error:
        raise ProfileRefusedError(
            f"{path}: {error} (--force overwrites it, --output names another file)"
        ) from error
    return profile


def uncovered(profile: Profile, spec: EngineSpec) -> list[str]:
    """Names what the engine can run and the profile did not measure."""
    cells = profile.cells
    largest = max(cell.batch_size for cell in cells)
    missing = [
        f"{arm.drafter} gamma {arm.gamma}"
        for arm in spec.arms
        if not any(cell.arm == arm for cell in cells)
    ]
    if spec.max_batch_size > largest:
        missing.append(f"batches above {largest}")
    return missing


def write_profile(path: Path, profile: Profile) -> None:
    """Whole, or not at all.  Raises OSError."""
    write_whole(path, profile.to_json().encode())
