"""The measured cost profile: a file that outlives a boot and belongs to one fingerprint."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

from controller.core.errors import InvalidProfileError, ProfileMismatchError
from controller.core.types import Arm, DrafterSpec, Fingerprint

FORMAT = "speculation-profile/1"
# Of whole numbers: what any reader of a profile can hold.
_MOST: Final = 2**31 - 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """Seconds of one step at (drafter, gamma, batch_size) and the reference context.

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
        """What ran."""
        return Arm(self.drafter, self.gamma)


@dataclass(frozen=True, slots=True)
class DrafterIdentity:
    """Which drafter weights were measured."""

    name: str
    model: str = ""
    revision: str = ""


@dataclass(frozen=True)  # without slots, for `profile_id`, which takes milliseconds to make
class Profile:
    """C(d, B, gamma, kv) = cell + seconds_per_kv_token * (kv - B * kv_tokens_per_sequence).

    catch_up_seconds_per_token: what a drafter pays for every token that it missed while it slept
    or another one drafted (0: unknown; live steps measure it).  merged_from: ids of the single
    measurements that it was made from (`profile_merge`), empty for one measurement.

    Raises InvalidProfileError for numbers that cannot be.
    """

    fingerprint: Fingerprint
    drafters: tuple[DrafterIdentity, ...]
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
            raise InvalidProfileError("the profile holds no measurement")
        if not (math.isfinite(self.kv_tokens_per_sequence) and self.kv_tokens_per_sequence >= 0):
            raise InvalidProfileError(
                f"kv_tokens_per_sequence {self.kv_tokens_per_sequence} is no context length"
            )
        if not (math.isfinite(self.seconds_per_kv_token) and self.seconds_per_kv_token >= 0):
            raise InvalidProfileError(
                f"seconds_per_kv_token {self.seconds_per_kv_token} is not a time"
            )
        rate = self.catch_up_seconds_per_token
        if not (math.isfinite(rate) and rate >= 0):
            raise InvalidProfileError(f"catch_up_seconds_per_token {rate} is not a time")
        names = {d.name for d in self.drafters}
        seen: set[tuple[str, int, int]] = set()
        for cell in self.cells:
            where = f"cell ({cell.drafter}, gamma {cell.gamma}, batch {cell.batch_size})"
            if not (math.isfinite(cell.step_seconds) and cell.step_seconds > 0):
                raise InvalidProfileError(f"{where}: step_seconds {cell.step_seconds} is no time")
            if not (math.isfinite(cell.spread_seconds) and cell.spread_seconds >= 0):
                raise InvalidProfileError(f"{where}: spread_seconds {cell.spread_seconds}")
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
        """Digest of the content: 16 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def require_match(self, fingerprint: Fingerprint, drafters: tuple[DrafterSpec, ...]) -> None:
        """Raises ProfileMismatchError, naming the first field that differs."""
        identities = tuple(DrafterIdentity(d.name, d.model, d.revision) for d in drafters)
        for difference in self.differences(fingerprint, identities):
            raise ProfileMismatchError(*difference)

    def differences(
        self, fingerprint: Fingerprint, drafters: tuple[DrafterIdentity, ...]
    ) -> Iterator[tuple[str, object, object]]:
        """(field, here, there) of what an engine lacks here; more drafters here are no difference.

        The shim's version is recorded but not compared: it does not change what a step costs.
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

    def to_json(self) -> str:
        """The file's text, stable: equal profiles give equal text."""
        body = {"format": FORMAT, **dataclasses.asdict(self)}
        if not self.merged_from:
            del body["merged_from"]
        return json.dumps(body, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Raises InvalidProfileError for anything but a profile."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidProfileError(f"not JSON: {error}") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, dict) else type(body).__name__
            raise InvalidProfileError(f"format is {found!r}, {FORMAT!r} is needed")
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
    """A frozen dataclass from a JSON object: unknown, missing and ill-typed fields are refused."""
    if not isinstance(values, dict):
        raise InvalidProfileError(f"{where}: an object is needed, not {type(values).__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise InvalidProfileError(f"{where}: unknown field {unknown[0]!r}")
    built: dict[str, Any] = {}
    for name, item in fields.items():
        required = item.default is dataclasses.MISSING
        if name not in values:
            if required:
                raise InvalidProfileError(f"{where}: field {name!r} is missing")
            continue
        built[name] = _coerce(item.type, values[name], f"{where}.{name}")
    return kind(**built)


def _coerce(annotation: object, value: object, where: str) -> object:
    """Checks one value against the annotation of its field (the few kinds that profiles use)."""
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
        return value  # built already
    raise InvalidProfileError(f"{where}: {value!r} is not of type {annotation}")
