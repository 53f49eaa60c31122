"""Keeps on disk what a measurement yields: the profile, or its raw steps if it was interrupted.

Of an interrupted measurement the steps are kept, not their summaries: a later run goes on where
this one stopped, and fits everything together.
"""

import hashlib
import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import EngineSpec, Fingerprint
from controller.core.errors import InvalidProfileError, ProfileMismatchError
from controller.profiling.errors import InvalidPartialError, ProfileRefusedError
from controller.profiling.samples import CellKey, Cells, Context, Samples
from controller.util.files import write_whole

# Characters of a model's, and of a device's, name in the name of a file.
_NAME_MAX = 48
# An interrupted measurement that is older is begun again.
OLDEST = timedelta(days=1)
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


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


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class PartialCell:
    """One cell's steps; see CellKey and Samples."""

    drafter: str
    gamma: int
    batch_size: int
    context: Literal["grid", "short", "long"]
    seconds: tuple[float, ...]
    kv_tokens: tuple[int, ...]
    rounds: tuple[int, ...]


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class Partial:
    """Holds an interrupted measurement.

    finished: names of the plan's parts that need no more steps.  started_at: ISO 8601.
    """

    format: Literal["speculation-profile-partial/1"]
    started_at: datetime
    fingerprint: Fingerprint
    drafters: tuple[DrafterIdentity, ...]
    finished: tuple[str, ...]
    cells: tuple[PartialCell, ...]

    @classmethod
    def of(
        cls, spec: EngineSpec, started_at: datetime, finished: tuple[str, ...], cells: Cells
    ) -> "Partial":
        """Makes one of what is measured so far."""
        return cls(
            "speculation-profile-partial/1",
            started_at,
            spec.fingerprint,
            identities(spec),
            finished,
            tuple(
                PartialCell(
                    key.drafter,
                    key.gamma,
                    key.batch_size,
                    key.context.value,
                    tuple(samples.seconds),
                    tuple(samples.kv_tokens),
                    tuple(samples.rounds),
                )
                for key, samples in cells.items()
            ),
        )

    def cells_by_key(self) -> Cells:
        """The cells as the measurement keeps them."""
        return {
            CellKey(c.drafter, c.gamma, c.batch_size, Context(c.context)): Samples(
                list(c.seconds), list(c.kv_tokens), list(c.rounds)
            )
            for c in self.cells
        }

    def why_unusable(self, spec: EngineSpec, now: datetime) -> str:
        """Explains why a measurement cannot be continued; "" when it can."""
        age = now - self.started_at
        if not timedelta(0) <= age <= OLDEST:
            return f"it was begun {self.started_at:%Y-%m-%d %H:%M}, more than a day ago"
        # The profile that it could become is what has to match.
        some = ProfileCell(self.drafters[0].name, 0, 1, 1.0, 0.0, 1) if self.drafters else None
        if some is None:
            return "it names no drafter"
        try:
            Profile(self.fingerprint, self.drafters, 0.0, 0.0, (some,)).require_match(
                spec.fingerprint, spec.drafters
            )
        except ProfileMismatchError as error:
            return f"it belongs to another engine: {error.field} differs"
        return ""


_ADAPTER = TypeAdapter(Partial)


def partial_path(output: Path) -> Path:
    """Returns the path beside the output."""
    return output.with_name(f"{output.stem}.partial.json")


def load_partial(path: Path) -> Partial | None:
    """None when there is no such file.  Raises InvalidPartialError for what is not one."""
    try:
        partial = _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidPartialError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidPartialError(
            f"{path}: {where + ': ' if where else ''}{first['msg']}"
        ) from error
    for cell in partial.cells:
        if not len(cell.seconds) == len(cell.kv_tokens) == len(cell.rounds):
            raise InvalidPartialError(f"{path}: a cell's seconds, kv_tokens, rounds do not pair up")
        if not all(s > 0 for s in cell.seconds) or min(cell.kv_tokens, default=0) < 0:
            raise InvalidPartialError(f"{path}: a step's seconds or kv_tokens cannot be")
        if cell.batch_size < 1 or cell.gamma < 0:
            raise InvalidPartialError(f"{path}: batch size {cell.batch_size}, gamma {cell.gamma}")
    if partial.started_at.tzinfo is None:
        raise InvalidPartialError(f"{path}: started_at names no time zone")
    return partial


def save_partial(path: Path, partial: Partial) -> None:
    """Whole, or as it was.  Raises OSError."""
    write_whole(path, _ADAPTER.dump_json(partial, indent=1))


def identities(spec: EngineSpec) -> tuple[DrafterIdentity, ...]:
    """The drafters' weights, as a profile names them."""
    return tuple(DrafterIdentity(d.name, d.model, d.revision) for d in spec.drafters)


def utc_now() -> datetime:
    """Wall time, to the second."""
    return datetime.now(UTC).replace(microsecond=0)
