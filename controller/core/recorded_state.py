"""Declares which variables of the core's classes a recording holds, and under which names.

    @recorded("acceptance_estimator", "shifts _steps", cusum="_alarm")

A recording knows a class and its variables by these names (without leading underscores), so classes
and attributes may be renamed without a new format.  What a class does not declare is made by its
constructor from the engine, the settings and the profile, or is never read by a decision.  What it
declares as derived follows from the recorded variables: it is None until it is needed, and None
again in a restored object.  What recordings of earlier versions lack is declared as added: from
these, a restored object has it as its constructor makes it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True, slots=True)
class RecordedClass:
    """Describes a class in recordings.

    fields: by recorded name, the attribute.  derived: attributes that follow from them.  added:
    recorded names that earlier recordings lack.  is_whole: the fields are all that an object holds,
    so that one can be built from a recording alone.
    """

    name: str
    kind: type
    fields: Mapping[str, str]
    derived: tuple[str, ...]
    added: frozenset[str]
    is_whole: bool


RECORDED: Final[dict[str, RecordedClass]] = {}
"""Every declared class by its recorded name."""
RECORDED_OF: Final[dict[type, RecordedClass]] = {}
"""Every declared class by the class itself."""


def recorded(
    name: str, same: str = "", *, derived: str = "", added: str = "", **renamed: str
) -> Callable[[_Class], _Class]:
    """Declares a class under a recorded name.

    same: attributes that a recording calls as the class does, separated by spaces.  derived:
    attributes that follow from these, in the same way.  added: further ones like `same`, which
    recordings of earlier versions lack.  renamed: by recorded name, attributes that the class calls
    otherwise.  Without any, a dataclass is recorded with all its fields, and an
    enumeration by its members' names.  A subclass adds to its parent's.
    """

    def declare(kind: _Class) -> _Class:
        held = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        more = {name.lstrip("_"): name for name in added.split()}
        fields = {name.lstrip("_"): name for name in same.split()} | renamed | more
        if not fields:
            fields = {field.lstrip("_"): field for field in held}
        follow, late = tuple(derived.split()), frozenset(more)
        inherited = RECORDED_OF.get(kind.__mro__[1])
        if inherited is not None:
            fields = {**inherited.fields, **fields}
            follow = (*inherited.derived, *follow)
            late |= inherited.added
        is_whole = bool(held) and set(held) == set(fields.values())
        RECORDED[name] = RECORDED_OF[kind] = RecordedClass(
            name, kind, fields, follow, late, is_whole
        )
        return kind

    return declare
