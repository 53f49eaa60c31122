"""Converts a controller's variables to plain values and back, so that decisions can be resumed.

    capture(core) -> tree of numbers, texts, lists, arrays and `RecordedObject` objects, all of them
    copies restore(core, tree)  into a core that was made from the same engine, settings and profile

Each class of the core declares which variables are captured (`core.recorded_state`).  The new core
must have the same settings and overrides before `restore_state`.  Only declared classes are built,
by their recorded names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np

from controller.core.engine.engine_controller import EngineController
from controller.core.errors import InvalidStateError
from controller.core.recorded_state import RECORDED_BY_CLASS, RECORDED_BY_NAME, RecordedClass

_CONTROLLER: Final = RECORDED_BY_CLASS[EngineController]
_DTYPES = ("<f8", "<i8", "|b1")


@dataclass(frozen=True, slots=True)
class RecordedObject:
    """Holds an object's values by their recorded names, with the recorded name of its class."""

    type: str
    fields: "Mapping[str, StateTree]"


@dataclass(frozen=True, slots=True)
class RecordedMember:
    """Holds a member of an enumeration, with the recorded name of its class."""

    type: str
    name: str


StateTree: TypeAlias = Any
"""None, bool, int, float, str, numpy number or array, list, tuple, dict, Typed or Chosen."""


def capture_state(core: EngineController) -> dict[str, StateTree]:
    """Copies the variables of a core; the copy does not change when the core continues."""
    return {
        name: _to_tree(getattr(core, attribute)) for name, attribute in _CONTROLLER.fields.items()
    }


def restore_state(core: EngineController, state: Mapping[str, StateTree]) -> None:
    """Restores variables into a new core, which must already have the same overrides.

    Raises InvalidStateError for a name that is missing or unknown, and for a value that does not
    fit the engine's core.
    """
    try:
        for label in state["traffic"].fields["classes"]:
            core.traffic.add_class(str(label))
        core.traffic.state_tracker.allocate_remembered(
            len(state["traffic"].fields["states"].fields["remembered"])
        )
        _fill_fields(core, _CONTROLLER, state, core)
        core.refresh_decision()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidStateError(f"the state is not of this engine's core: {error!r}") from error


def _to_tree(value: Any) -> StateTree:
    """Returns a deep copy as a tree."""
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    if isinstance(value, list | tuple):
        items = [_to_tree(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {_to_tree(key): _to_tree(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    return _object_to_tree(value)


def _object_to_tree(value: Any) -> RecordedMember | RecordedObject:
    recorded_class = RECORDED_BY_CLASS[type(value)]
    if isinstance(value, Enum):
        return RecordedMember(recorded_class.name, value.name)
    fields = {
        name: _to_tree(getattr(value, attribute))
        for name, attribute in recorded_class.fields.items()
    }
    return RecordedObject(recorded_class.name, fields)


def _from_tree(tree: StateTree, current: Any) -> Any:
    """Builds the value of a tree.  current: the present value; unrecorded parts come from it."""
    if isinstance(tree, RecordedObject):
        return _object_from_tree(tree, current)
    if isinstance(tree, RecordedMember):
        return _enumeration_class(tree.type)[tree.name]
    if isinstance(tree, list | tuple):
        current_items = (
            current if isinstance(current, list | tuple) and len(current) == len(tree) else ()
        )
        items = [
            _from_tree(item, current_items[i] if current_items else None)
            for i, item in enumerate(tree)
        ]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        current_entries = current if isinstance(current, dict) else {}
        return {
            (key := _from_tree(name, None)): _from_tree(item, current_entries.get(key))
            for name, item in tree.items()
        }
    if isinstance(tree, np.ndarray):
        if tree.dtype.str not in _DTYPES:
            raise InvalidStateError(f"an array has the unsupported type {tree.dtype}")
        return tree.copy(order="K")
    return tree


def _enumeration_class(name: str) -> type[Enum]:
    kind = RECORDED_BY_NAME[name].kind
    if not issubclass(kind, Enum):
        raise InvalidStateError(f"{name} is not an enumeration")
    return kind


def _object_from_tree(tree: RecordedObject, current: Any) -> Any:
    recorded_class = RECORDED_BY_NAME[tree.type]
    built: Any = current
    if recorded_class.is_whole:
        built, current = object.__new__(recorded_class.kind), None
    elif type(current) is not recorded_class.kind:
        raise InvalidStateError(f"{tree.type} is recorded, but the engine's core has none there")
    _fill_fields(built, recorded_class, tree.fields, current)
    return built


def _fill_fields(
    built: object, recorded_class: RecordedClass, state: Mapping[str, StateTree], current: object
) -> None:
    fields = recorded_class.fields
    if missing := fields.keys() - state.keys() & recorded_class.added:
        fields = {name: attribute for name, attribute in fields.items() if name not in missing}
    if mismatched_names := (state.keys() ^ fields.keys()) - recorded_class.removed:
        mismatched = min(mismatched_names)
        mismatch_text = (
            "recorded but not known here" if mismatched in state else "missing in the recording"
        )
        raise InvalidStateError(f"variable {recorded_class.name}.{mismatched} is {mismatch_text}")
    for name, attribute in fields.items():
        value = _from_tree(state[name], getattr(current, attribute, None))
        object.__setattr__(built, attribute, value)
    for attribute in recorded_class.derived:
        object.__setattr__(built, attribute, None)
