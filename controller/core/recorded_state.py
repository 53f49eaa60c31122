"""Declares which variables of the core's classes a recording contains, and under which names.

    @recorded("acceptance_estimator", "shifts _steps", cusum="_alarm")

A recording identifies a class and its variables by these names (without leading underscores), so
classes and attributes can be renamed without changing the format.  A variable that a class does not
declare is either made by the constructor from the engine, the settings and the profile, or never
read by a decision.  A derived variable is computed from the recorded ones: it is None until it is
needed, and None again in a restored object.  An added variable is missing in recordings of earlier
versions; an object restored from one of these keeps the constructor's value.  A removed variable is
only in recordings of earlier versions, and is ignored.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, slots=True)
class RecordedClass:
    """Describes a class in recordings.

    fields: attribute by recorded name.  derived: attributes computed from these.  added: recorded
    names that earlier recordings lack.  removed: names that only earlier recordings have.
    is_whole: the fields are all the fields of a dataclass, so an object can be built from a
    recording alone.
    """

    name: str
    kind: type
    fields: Mapping[str, str]
    derived: tuple[str, ...]
    added: frozenset[str]
    removed: frozenset[str]
    is_whole: bool


RECORDED_BY_NAME: Final[dict[str, RecordedClass]] = {}
"""Every declared class by its recorded name."""
RECORDED_BY_CLASS: Final[dict[type, RecordedClass]] = {}
"""Every declared class by the class itself."""


def recorded(
    name: str,
    same: str = "",
    *,
    derived: str = "",
    added: str = "",
    removed: str = "",
    **renamed: str,
) -> Callable[[_Class], _Class]:
    """Declares a class under a recorded name.

    same: attributes with the same name in a recording, separated by spaces.  derived: attributes
    computed from these, also separated by spaces.  added: further attributes like `same`, which
    recordings of earlier versions lack (by recorded name, if `renamed` has it, too).  removed:
    recorded names that earlier versions wrote and that are ignored, separated by spaces.  renamed:
    attributes by a recorded name that differs from theirs.  If no attribute is listed, a dataclass
    is recorded with all its fields, and an enumeration by its members' names.  A subclass adds to
    its parent's attributes.
    """

    def declare(kind: _Class) -> _Class:
        dataclass_fields = (
            [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        )
        added_fields = {name.lstrip("_"): name for name in added.split()}
        fields = {name.lstrip("_"): name for name in same.split()} | added_fields | renamed
        if not fields:
            fields = {field.lstrip("_"): field for field in dataclass_fields}
        derived_attributes, added_names = tuple(derived.split()), frozenset(added_fields)
        removed_names = frozenset(removed.split())
        inherited = RECORDED_BY_CLASS.get(kind.__mro__[1])
        if inherited is not None:
            fields = {**inherited.fields, **fields}
            derived_attributes = (*inherited.derived, *derived_attributes)
            added_names |= inherited.added
            removed_names |= inherited.removed
        is_whole = bool(dataclass_fields) and set(dataclass_fields) == set(fields.values())
        RECORDED_BY_NAME[name] = RECORDED_BY_CLASS[kind] = RecordedClass(
            name, kind, fields, derived_attributes, added_names, removed_names, is_whole
        )
        return kind

    return declare
