"""Converts a controller's variables to plain values and back, so that decisions can be resumed.

    capture(core) -> tree of numbers, texts, lists, arrays and `Typed` objects, all of them copies
    restore(core, tree)  into a core that was made from the same engine, settings and profile

Each class of the core declares which variables are captured (`core.recorded_state`).  The new core
must have the same settings and overrides before `restore`.  Only declared classes are built, by
their recorded names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np

from controller.core.engine.engine_controller import EngineController
from controller.core.errors import InvalidStateError
from controller.core.recorded_state import RECORDED, RECORDED_OF, RecordedClass

_CONTROLLER: Final = RECORDED_OF[EngineController]
_DTYPES = ("<f8", "<i8", "|b1")


@dataclass(frozen=True, slots=True)
class Typed:
    """Holds an object's values by their recorded names, with the recorded name of its class."""

    type: str
    fields: "Mapping[str, Tree]"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Holds a member of an enumeration, with the recorded name of its class."""

    type: str
    name: str


Tree: TypeAlias = Any
"""None, bool, int, float, str, numpy number or array, list, tuple, dict, Typed or Chosen."""


def capture(core: EngineController) -> dict[str, Tree]:
    """Copies the variables of a core; the copy does not change when the core continues."""
    return {name: _tree(getattr(core, held)) for name, held in _CONTROLLER.fields.items()}


def restore(core: EngineController, state: Mapping[str, Tree]) -> None:
    """Restores variables into a new core, which must already have the same overrides.

    Raises InvalidStateError for a name that is missing or unknown, and for a value that does not
    fit the engine's core.
    """
    try:
        for label in state["traffic"].fields["classes"]:
            core.traffic.admit(str(label))
        core.traffic.states.make_room(len(state["traffic"].fields["states"].fields["remembered"]))
        _fill(core, _CONTROLLER, state, core)
        core.take_estimates()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidStateError(f"the state is not of this engine's core: {error!r}") from error


def _tree(value: Any) -> Tree:
    """Returns a deep copy as a tree."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    if isinstance(value, list | tuple):
        items = [_tree(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {_tree(key): _tree(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    return _named(value)


def _named(value: Any) -> Chosen | Typed:
    declared = RECORDED_OF[type(value)]
    if isinstance(value, Enum):
        return Chosen(declared.name, value.name)
    fields = {name: _tree(getattr(value, held)) for name, held in declared.fields.items()}
    return Typed(declared.name, fields)


def _value(tree: Tree, current: Any) -> Any:
    """Builds the value of a tree.  current: the present value; unrecorded parts come from it."""
    if isinstance(tree, Typed):
        return _object(tree, current)
    if isinstance(tree, Chosen):
        return _enumeration(tree.type)[tree.name]
    if isinstance(tree, list | tuple):
        now = current if isinstance(current, list | tuple) and len(current) == len(tree) else ()
        items = [_value(item, now[i] if now else None) for i, item in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        known = current if isinstance(current, dict) else {}
        return {
            (key := _value(name, None)): _value(item, known.get(key)) for name, item in tree.items()
        }
    if isinstance(tree, np.ndarray):
        if tree.dtype.str not in _DTYPES:
            raise InvalidStateError(f"an array has the unsupported type {tree.dtype}")
        return tree.copy(order="K")
    return tree


def _enumeration(name: str) -> type[Enum]:
    kind = RECORDED[name].kind
    if not issubclass(kind, Enum):
        raise InvalidStateError(f"{name} is not an enumeration")
    return kind


def _object(tree: Typed, current: Any) -> Any:
    declared = RECORDED[tree.type]
    built: Any = current
    if declared.is_whole:
        built, current = object.__new__(declared.kind), None
    elif type(current) is not declared.kind:
        raise InvalidStateError(f"{tree.type} is recorded, but the engine's core has none there")
    _fill(built, declared, tree.fields, current)
    return built


def _fill(
    built: object, declared: RecordedClass, state: Mapping[str, Tree], current: object
) -> None:
    fields = declared.fields
    if lacking := fields.keys() - state.keys() & declared.added:
        fields = {name: held for name, held in fields.items() if name not in lacking}
    if state.keys() != fields.keys():
        odd = min(state.keys() ^ fields.keys())
        where = "recorded but not known here" if odd in state else "missing in the recording"
        raise InvalidStateError(f"variable {declared.name}.{odd} is {where}")
    for name, held in fields.items():
        value = _value(state[name], getattr(current, held, None))
        object.__setattr__(built, held, value)
    for held in declared.derived:
        object.__setattr__(built, held, None)
