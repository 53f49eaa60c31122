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
_MOST: Final = 2**31 - 1
# A cell may have been measured this share too expensive.
_SLACK = 0.02

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
            mine, theirs = getattr(self.fingerprint, item.name), getattr(fingerprint, item.name)
            if item.name != "shim_version" and mine != theirs:
                yield item.name, mine, theirs
        known = {d.name: d for d in self.drafters}
        for drafter in drafters:
            found = known.get(drafter.name)
            if found is None:
                yield "drafters", sorted(known), drafter.name
            elif found != drafter:
                yield (
                    f"drafter {drafter.name}",
                    f"{found.model}@{found.revision}",
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
            if not 0 <= getattr(self, name) <= _MOST:
                raise InvalidProfileError(
                    f"{name} {getattr(self, name)} must be between 0 and {_MOST}"
                )
        names = {d.name for d in self.drafters}
        seen: set[tuple[str, int, int]] = set()
        for cell in self.cells:
            where = f"cell ({cell.drafter}, gamma {cell.gamma}, batch {cell.batch_size})"
            if not 0 < cell.step_seconds <= _MOST:
                raise InvalidProfileError(
                    f"{where}: step_seconds {cell.step_seconds} must be above 0, at most {_MOST}"
                )
            if not 0 <= cell.spread_seconds <= _MOST:
                raise InvalidProfileError(
                    f"{where}: spread_seconds {cell.spread_seconds} must be between 0 and {_MOST}"
                )
            least = min(cell.gamma + 1, cell.batch_size, cell.steps)
            if least < 1 or max(cell.gamma, cell.batch_size, cell.steps) > _MOST:
                raise InvalidProfileError(f"{where}: gamma, batch_size or steps is out of range")
            if cell.drafter not in names:
                raise InvalidProfileError(f"{where}: the profile lists no such drafter")
            key = (cell.drafter, cell.gamma, cell.batch_size)
            if key in seen:
                raise InvalidProfileError(f"{where}: appears twice")
            seen.add(key)

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
            found = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise InvalidProfileError(f"format is {found!r}, but must be {FORMAT!r}")
        fields = {k: v for k, v in body.items() if k != "format"}
        fingerprint = _build(Fingerprint, fields.get("fingerprint"), "fingerprint")
        drafters = _build_all(DrafterIdentity, fields.get("drafters"), "drafters")
        cells = _build_all(ProfileCell, fields.get("cells"), "cells")
        return _build(
            cls,
            {**fields, "fingerprint": fingerprint, "drafters": drafters, "cells": cells},
            "profile",
        )


def _build_all(kind: type[_T], values: object, where: str) -> tuple[_T, ...]:
    if not isinstance(values, list):
        raise InvalidProfileError(f"{where}: a list is needed, not {type(values).__name__}")
    return tuple(_build(kind, value, f"{where}[{i}]") for i, value in enumerate(values))


def _build(kind: type[_T], values: object, where: str) -> _T:
    """Builds a frozen dataclass from a JSON object; rejects unknown, missing, ill-typed fields."""
    if not isinstance(values, dict):
        raise InvalidProfileError(f"{where}: an object is needed, not {type(values).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise InvalidProfileError(f"{where}: unknown field {unknown[0]!r}")
    built: dict[str, Any] = {}
    for name, item in fields.items():
        if name not in values:
            if item.default is dataclasses.MISSING:
                raise InvalidProfileError(f"{where}: field {name!r} is missing")
            continue
        built[name] = _coerce(item.type, values[name], f"{where}.{name}")
    return kind(**built)


def _coerce(annotation: object, value: object, where: str) -> object:
    """Checks one value against its field's annotation, for the few types that profiles use."""
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise InvalidProfileError(f"{where}: a number of hundreds of digits") from error
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
    raise InvalidProfileError(f"{where}: {value!r} is not of type {annotation}")


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
        wins = [size for size in sizes if _can_win(profile, gamma, size, acceptance)]
        if not wins:
            limits[gamma] = 0
        elif wins[-1] < sizes[-1]:
            limits[gamma] = sizes[sizes.index(wins[-1]) + 1] - 1
    return limits


def _can_win(profile: Profile, gamma: int, size: int, acceptance: float) -> bool:
    cells = [cell for cell in profile.cells if cell.batch_size == size]
    rate = {
        (cell.drafter, cell.gamma): sum(acceptance**k for k in range(cell.gamma + 1))
        / cell.step_seconds
        for cell in cells
    }
    mine = [(drafter, value) for (drafter, g), value in rate.items() if g == gamma]
    for drafter, value in mine:
        shorter = [r for (d, g), r in rate.items() if g < gamma and (g == 0 or d == drafter)]
        if all(value * (1 + _SLACK) >= r for r in shorter):
            return True
    # A draft length that was not measured at this size may win.
    return not mine
