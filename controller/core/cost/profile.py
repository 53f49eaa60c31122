"""Reads, checks and writes cost profiles: files of measured step times of one fingerprint."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

from controller.core.engine_spec import Arm, DrafterSpec, Fingerprint
from controller.core.errors import InvalidProfileError, ProfileMismatchError

FORMAT = "speculation-profile/1"
# The largest integer that every reader of a profile supports.
_MAX_VALUE: Final = 2**31 - 1
# A cell may have been measured this share too expensive.
_MEASUREMENT_SLACK = 0.02

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """Holds the seconds of one step at (drafter, gamma, batch_size) and the reference context.

    step_seconds: median over `steps` steps; spread_seconds: their interquartile range.
    """

    drafter: str
    gamma: int
    batch_size: int
    step_seconds: float
    spread_seconds: float
    steps: int

    @property
    def arm(self) -> Arm:
        """The drafter and the draft length that ran."""
        return Arm(self.drafter, self.gamma)


@dataclass(frozen=True, slots=True)
class DrafterIdentity:
    """Identifies the drafter weights that were measured."""

    name: str
    model: str = ""
    revision: str = ""


@dataclass(frozen=True)
class MeasuredEngine:
    """Describes the engine that was measured."""

    fingerprint: Fingerprint
    drafters: tuple[DrafterIdentity, ...]

    def require_match(self, fingerprint: Fingerprint, drafters: tuple[DrafterSpec, ...]) -> None:
        """Raises ProfileMismatchError, naming the first field that differs."""
        identities = tuple(DrafterIdentity(d.name, d.model, d.revision) for d in drafters)
        for difference in self.differences(fingerprint, identities):
            raise ProfileMismatchError(*difference)

    def differences(
        self, fingerprint: Fingerprint, drafters: tuple[DrafterIdentity, ...]
    ) -> Iterator[tuple[str, object, object]]:
        """Yields (field, measured, engine's) for each difference; further drafters are allowed.

        The shim's version is recorded but not compared: it does not affect the cost of a step.
        """
        for item in dataclasses.fields(Fingerprint):
            measured_value, engine_value = (
                getattr(self.fingerprint, item.name),
                getattr(fingerprint, item.name),
            )
            if item.name != "shim_version" and measured_value != engine_value:
                yield item.name, measured_value, engine_value
        measured_drafters = {d.name: d for d in self.drafters}
        for drafter in drafters:
            measured_drafter = measured_drafters.get(drafter.name)
            if measured_drafter is None:
                yield "drafters", sorted(measured_drafters), drafter.name
            elif measured_drafter != drafter:
                yield (
                    f"drafter {drafter.name}",
                    f"{measured_drafter.model}@{measured_drafter.revision}",
                    f"{drafter.model}@{drafter.revision}",
                )


@dataclass(frozen=True)  # without slots: `profile_id` is cached, as it takes milliseconds
class Profile(MeasuredEngine):
    """Holds C(d, B, gamma, kv) = cell + seconds_per_kv_token * (kv - B * kv_tokens_per_sequence).

    catch_up_seconds_per_token: time that a drafter needs for each token that it missed while it
    slept or another one drafted (0: unknown; live steps measure it).  merged_from: ids of the
    merged measurements (`profile_merge`), empty for a single measurement.

    Raises InvalidProfileError for numbers out of range.
    """

    kv_tokens_per_sequence: float
    seconds_per_kv_token: float
    cells: tuple[ProfileCell, ...]
    measured_at: str = ""
    command: str = ""
    hardware: str = ""
    catch_up_seconds_per_token: float = 0.0
    merged_from: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.cells:
            raise InvalidProfileError("the profile contains no measurement")
        rates = ("kv_tokens_per_sequence", "seconds_per_kv_token", "catch_up_seconds_per_token")
        for name in rates:
            if not 0 <= getattr(self, name) <= _MAX_VALUE:
                raise InvalidProfileError(
                    f"{name} {getattr(self, name)} must be between 0 and {_MAX_VALUE}"
                )
        names = {d.name for d in self.drafters}
        cell_keys: set[tuple[str, int, int]] = set()
        for cell in self.cells:
            location = f"cell ({cell.drafter}, gamma {cell.gamma}, batch {cell.batch_size})"
            if not 0 < cell.step_seconds <= _MAX_VALUE:
                raise InvalidProfileError(
                    f"{location}: step_seconds {cell.step_seconds} must be above 0, at most "
                    f"{_MAX_VALUE}"
                )
            if not 0 <= cell.spread_seconds <= _MAX_VALUE:
                raise InvalidProfileError(
                    f"{location}: spread_seconds {cell.spread_seconds} must be between 0 and "
                    f"{_MAX_VALUE}"
                )
            smallest_count = min(cell.gamma + 1, cell.batch_size, cell.steps)
            if smallest_count < 1 or max(cell.gamma, cell.batch_size, cell.steps) > _MAX_VALUE:
                raise InvalidProfileError(f"{location}: gamma, batch_size or steps is out of range")
            if cell.drafter not in names:
                raise InvalidProfileError(f"{location}: the profile lists no such drafter")
            key = (cell.drafter, cell.gamma, cell.batch_size)
            if key in cell_keys:
                raise InvalidProfileError(f"{location}: appears twice")
            cell_keys.add(key)

    @cached_property
    def profile_id(self) -> str:
        """The digest of the content: 16 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Returns the file's text, which is equal for equal profiles."""
        body = {"format": FORMAT, **dataclasses.asdict(self)}
        if not self.merged_from:
            del body["merged_from"]
        return json.dumps(body, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Reads a profile.  Raises InvalidProfileError for anything else."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidProfileError(f"not JSON: {error}") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            actual_format = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise InvalidProfileError(f"format is {actual_format!r}, but must be {FORMAT!r}")
        fields = {k: v for k, v in body.items() if k != "format"}
        fingerprint = _build(Fingerprint, fields.get("fingerprint"), "fingerprint")
        drafters = _build_all(DrafterIdentity, fields.get("drafters"), "drafters")
        cells = _build_all(ProfileCell, fields.get("cells"), "cells")
        return _build(
            cls,
            {**fields, "fingerprint": fingerprint, "drafters": drafters, "cells": cells},
            "profile",
        )


def _build_all(kind: type[_T], values: object, location: str) -> tuple[_T, ...]:
    if not isinstance(values, list):
        raise InvalidProfileError(f"{location}: a list is needed, not {type(values).__name__}")
    return tuple(_build(kind, value, f"{location}[{i}]") for i, value in enumerate(values))


def _build(kind: type[_T], values: object, location: str) -> _T:
    """Builds a frozen dataclass from a JSON object; rejects unknown, missing, ill-typed fields."""
    if not isinstance(values, dict):
        raise InvalidProfileError(f"{location}: an object is needed, not {type(values).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise InvalidProfileError(f"{location}: unknown field {unknown[0]!r}")
    built: dict[str, Any] = {}
    for name, item in fields.items():
        if name not in values:
            if item.default is dataclasses.MISSING:
                raise InvalidProfileError(f"{location}: field {name!r} is missing")
            continue
        built[name] = _coerce(item.type, values[name], f"{location}.{name}")
    return kind(**built)


def _coerce(annotation: object, value: object, location: str) -> object:
    """Checks one value against its field's annotation, for the few types that profiles use."""
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise InvalidProfileError(f"{location}: a number of hundreds of digits") from error
    if annotation is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if annotation is str and isinstance(value, str):
        return value
    if annotation == tuple[int, ...]:
        if isinstance(value, list) and all(type(v) is int for v in value):
            return tuple(value)
    elif annotation == tuple[str, ...]:
        if isinstance(value, list) and all(type(v) is str for v in value):
            return tuple(value)
    elif annotation not in (float, int, str):
        return value  # already built by the caller
    raise InvalidProfileError(f"{location}: {value!r} is not of type {annotation}")


def batch_limits(profile: Profile, acceptance: float = 0.9) -> dict[int, int]:
    """Returns the draft lengths that win in small batches only: gamma -> the largest such batch.

    If every position's acceptance is at most a, a longer draft has the most value if all are equal
    to a: for g < gamma the ratio E[tokens | gamma] / E[tokens | g] rises with each of them, to
    e(gamma) / e(g) with e(n) = (1 - a^(n + 1)) / (1 - a).  So if e(gamma) / C(B, gamma) is below
    e(g) / C(B, g) for a shorter g of the same drafter, no plan chooses gamma at B, and capturing
    graphs for it is wasted.

    acceptance: in (0, 1], the highest expected acceptance of any position.  Between two measured
    sizes the longer draft counts as able to win.  A draft length with which any drafter could win
    at the largest measured size is omitted.
    """
    sizes = sorted({cell.batch_size for cell in profile.cells})
    gammas = sorted({cell.gamma for cell in profile.cells if cell.gamma > 0})
    limits = {}
    for gamma in gammas:
        winning_sizes = [size for size in sizes if _can_win(profile, gamma, size, acceptance)]
        if not winning_sizes:
            limits[gamma] = 0
        elif winning_sizes[-1] < sizes[-1]:
            limits[gamma] = sizes[sizes.index(winning_sizes[-1]) + 1] - 1
    return limits


def _can_win(profile: Profile, gamma: int, size: int, acceptance: float) -> bool:
    cells = [cell for cell in profile.cells if cell.batch_size == size]
    rates = {
        (cell.drafter, cell.gamma): sum(acceptance**k for k in range(cell.gamma + 1))
        / cell.step_seconds
        for cell in cells
    }
    rates_at_gamma = [(drafter, value) for (drafter, g), value in rates.items() if g == gamma]
    for drafter, value in rates_at_gamma:
        shorter = [r for (d, g), r in rates.items() if g < gamma and (g == 0 or d == drafter)]
        if all(value * (1 + _MEASUREMENT_SLACK) >= r for r in shorter):
            return True
    # A draft length that was not measured at this size may win.
    return not rates_at_gamma
