"""Reads and writes the files of a measurement: the profile, or the raw steps if interrupted.

An interrupted measurement keeps steps and not summaries, so that a later run can continue it and
fit all steps together.
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
from controller.util.files import write_atomically

# Most characters of a model's or device's name in a file name.
_NAME_MAX = 48
# An older interrupted measurement is started again.
PARTIAL_AGE_MAX = timedelta(days=1)
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def default_path(spec: EngineSpec, directory: Path = Path("profiles")) -> Path:
    """Returns `<model>-<device>-<digest of the fingerprint and the drafters>.json`."""
    fingerprint = replace(spec.fingerprint, shim_version="")
    identity = repr((asdict(fingerprint), drafter_identities(spec)))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    model = spec.fingerprint.target_model.rstrip("/").rpartition("/")[2]
    return directory / f"{_slug(model)}-{_slug(spec.fingerprint.device)}-{digest}.json"


def _slug(text: str) -> str:
    slug = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    return slug[:_NAME_MAX].rstrip("-.") or "unknown"


def reusable_profile(path: Path, spec: EngineSpec) -> Profile | None:
    """Returns the profile in a file if it is this engine's; None if there is no file.

    Raises ProfileRefusedError for another engine's profile, and for a file that is not a profile.
    """
    fix = "measure again with --force, or name another file with --output"
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
        profile.require_match(spec.fingerprint, spec.drafters)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ProfileRefusedError(f"{path} cannot be read: {error.strerror}") from error
    except (InvalidProfileError, UnicodeDecodeError) as error:
        raise ProfileRefusedError(f"{path} is not a profile: {error}; {fix}") from error
    except ProfileMismatchError as error:
        raise ProfileRefusedError(
            f"{path}: {error} (--force overwrites it, --output names another file)"
        ) from error
    return profile


def uncovered_choices(profile: Profile, spec: EngineSpec) -> list[str]:
    """Names the choices that the engine can run but the profile did not measure."""
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
    """Writes a profile atomically.  Raises OSError."""
    write_atomically(path, profile.to_json().encode())


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class PartialCell:
    """The steps of one cell; see CellKey and Samples."""

    drafter: str
    gamma: int
    batch_size: int
    context: Literal["grid", "short", "long"]
    seconds: tuple[float, ...]
    kv_tokens: tuple[int, ...]
    rounds: tuple[int, ...]


@with_config(_STRICT)
@dataclass(frozen=True, slots=True)
class PartialMeasurement:
    """An interrupted measurement.

    finished: names of the parts that need no more steps.  started_at: ISO 8601.
    """

    format: Literal["speculation-profile-partial/1"]
    started_at: datetime
    fingerprint: Fingerprint
    drafters: tuple[DrafterIdentity, ...]
    finished: tuple[str, ...]
    cells: tuple[PartialCell, ...]

    @classmethod
    def from_cells(
        cls, spec: EngineSpec, started_at: datetime, finished: tuple[str, ...], cells: Cells
    ) -> "PartialMeasurement":
        """Makes one from the steps that are measured so far."""
        return cls(
            "speculation-profile-partial/1",
            started_at,
            spec.fingerprint,
            drafter_identities(spec),
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
        """Returns the cells in the form that a measurement uses."""
        return {
            CellKey(c.drafter, c.gamma, c.batch_size, Context(c.context)): Samples(
                list(c.seconds), list(c.kv_tokens), list(c.rounds)
            )
            for c in self.cells
        }

    def unusable_reason(self, spec: EngineSpec, now: datetime) -> str:
        """Explains why a measurement cannot be continued; "" if it can."""
        age = now - self.started_at
        if not timedelta(0) <= age <= PARTIAL_AGE_MAX:
            return f"it was started {self.started_at:%Y-%m-%d %H:%M}, more than a day ago"
        # A profile with its fingerprint must match the engine.
        any_cell = ProfileCell(self.drafters[0].name, 0, 1, 1.0, 0.0, 1) if self.drafters else None
        if any_cell is None:
            return "it has no drafter"
        try:
            Profile(self.fingerprint, self.drafters, 0.0, 0.0, (any_cell,)).require_match(
                spec.fingerprint, spec.drafters
            )
        except ProfileMismatchError as error:
            return f"it belongs to another engine: {error.field} differs"
        return ""


_ADAPTER = TypeAdapter(PartialMeasurement)


def partial_path(output: Path) -> Path:
    """Returns the path of the interrupted measurement, next to the output."""
    return output.with_name(f"{output.stem}.partial.json")


def load_partial(path: Path) -> PartialMeasurement | None:
    """Reads an interrupted measurement; None if there is no file.  Raises InvalidPartialError."""
    try:
        partial = _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidPartialError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        location = ".".join(map(str, first_error["loc"]))
        raise InvalidPartialError(
            f"{path}: {location + ': ' if location else ''}{first_error['msg']}"
        ) from error
    for cell in partial.cells:
        if not len(cell.seconds) == len(cell.kv_tokens) == len(cell.rounds):
            raise InvalidPartialError(
                f"{path}: a cell has different numbers of seconds, kv_tokens and rounds"
            )
        if not all(s > 0 for s in cell.seconds) or min(cell.kv_tokens, default=0) < 0:
            raise InvalidPartialError(f"{path}: a step has invalid seconds or kv_tokens")
        if cell.batch_size < 1 or cell.gamma < 0:
            raise InvalidPartialError(
                f"{path}: batch size {cell.batch_size} or gamma {cell.gamma} is not valid"
            )
    if partial.started_at.tzinfo is None:
        raise InvalidPartialError(f"{path}: started_at has no time zone")
    return partial


def save_partial(path: Path, partial: PartialMeasurement) -> None:
    """Writes an interrupted measurement atomically.  Raises OSError."""
    write_atomically(path, _ADAPTER.dump_json(partial, indent=1))


def drafter_identities(spec: EngineSpec) -> tuple[DrafterIdentity, ...]:
    """Returns the identities of the drafters' weights, as in a profile."""
    return tuple(DrafterIdentity(d.name, d.model, d.revision) for d in spec.drafters)


def utc_now() -> datetime:
    """Returns the wall time, to the second."""
    return datetime.now(UTC).replace(microsecond=0)
