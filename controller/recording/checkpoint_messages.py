"""Converts a core's variables between plain values and proto without loss: floats are doubles."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from controller.core.engine.checkpoint import RecordedMember, RecordedObject, StateTree
from controller.recording.segments import RecordingError
from speculation.v1 import record_pb2

_Value = record_pb2.StateValue
_Converter: TypeAlias = Callable[[Any], record_pb2.StateValue]
_DTYPES = frozenset({"<f8", "<i8", "|b1"})
_SCALARS = frozenset({"flag", "integer", "number", "text"})


def state_to_proto(state: Mapping[str, StateTree]) -> record_pb2.StateObject:
    """Converts the variables, sorted by name: equal states give equal messages."""
    return _object_to_proto("", dict(sorted(state.items())))


def state_from_proto(message: record_pb2.StateObject) -> dict[str, StateTree]:
    """Converts the variables back.  Raises RecordingError for impossible values."""
    return dict(_fields_from_proto(message))


def _object_to_proto(name: str, fields: Mapping[str, StateTree]) -> record_pb2.StateObject:
    return record_pb2.StateObject(
        type=name, names=fields.keys(), values=map(_to_proto, fields.values())
    )


def _to_proto(tree: StateTree) -> record_pb2.StateValue:
    for kind, make in _TO_PROTO:
        if isinstance(tree, kind):
            return make(tree)
    raise TypeError(f"a core holds a {type(tree).__name__}, which cannot be recorded")


def _mapping_to_proto(tree: Mapping[StateTree, StateTree]) -> record_pb2.StateMapping:
    return record_pb2.StateMapping(
        keys=map(_to_proto, tree.keys()), values=map(_to_proto, tree.values())
    )


def _values_to_proto(items: Iterable[StateTree]) -> record_pb2.StateValues:
    return record_pb2.StateValues(values=map(_to_proto, items))


def _array_to_proto(value: np.generic | np.ndarray) -> record_pb2.StateArray:
    array = np.asarray(value)
    columns_first = bool(array.flags.f_contiguous and not array.flags.c_contiguous)
    return record_pb2.StateArray(
        dtype=array.dtype.str,
        shape=array.shape,
        data=array.tobytes("F" if columns_first else "C"),
        columns_first=columns_first,
        scalar=isinstance(value, np.generic),
    )


# The order matters: a bool is an int, and some numpy scalars are Python numbers.
_TO_PROTO: Final[tuple[tuple[type | tuple[type, ...], _Converter], ...]] = (
    (type(None), lambda _: _Value(none=True)),
    ((np.generic, np.ndarray), lambda tree: _Value(array=_array_to_proto(tree))),
    (bool, lambda tree: _Value(flag=tree)),
    (int, lambda tree: _Value(integer=tree)),
    (float, lambda tree: _Value(number=tree)),
    (str, lambda tree: _Value(text=tree)),
    (list, lambda tree: _Value(list=_values_to_proto(tree))),
    (tuple, lambda tree: _Value(tuple=_values_to_proto(tree))),
    (dict, lambda tree: _Value(mapping=_mapping_to_proto(tree))),
    (RecordedObject, lambda tree: _Value(object=_object_to_proto(tree.type, tree.fields))),
    (
        RecordedMember,
        lambda tree: _Value(choice=record_pb2.StateChoice(type=tree.type, name=tree.name)),
    ),
)


def _from_proto(message: record_pb2.StateValue) -> StateTree:
    kind = message.WhichOneof("kind")
    if kind in _SCALARS:
        return getattr(message, kind)
    read = _FROM_PROTO.get(kind or "")
    if read is None:
        raise RecordingError("a variable of an unknown kind: a newer version may have recorded it")
    return read(message)


def _fields_from_proto(message: record_pb2.StateObject) -> dict[str, StateTree]:
    if len(message.names) != len(message.values):
        raise RecordingError(f"{message.type or 'a core'}: the numbers of names and values differ")
    return dict(zip(message.names, map(_from_proto, message.values), strict=True))


def _mapping_from_proto(message: record_pb2.StateMapping) -> dict[StateTree, StateTree]:
    keys = [_from_proto(key) for key in message.keys]
    if len(keys) != len(message.values):
        raise RecordingError("a mapping with different numbers of keys and values")
    try:
        return dict(zip(keys, map(_from_proto, message.values), strict=True))
    except TypeError as error:
        raise RecordingError(f"a mapping with an invalid key: {error}") from error


def _array_from_proto(message: record_pb2.StateArray) -> np.generic | np.ndarray:
    if message.dtype not in _DTYPES:
        raise RecordingError(f"an array of the invalid type {message.dtype[:16]!r}")
    try:
        flat = np.frombuffer(message.data, dtype=np.dtype(message.dtype))
        array = flat.reshape(message.shape, order="F" if message.columns_first else "C").copy("K")
        value: np.generic | np.ndarray = array[()] if message.scalar else array
    except (ValueError, IndexError) as error:
        raise RecordingError(f"an invalid array: {error}") from error
    return value


_FROM_PROTO: Final[Mapping[str, Callable[[record_pb2.StateValue], StateTree]]] = {
    "none": lambda _: None,
    "list": lambda message: [_from_proto(item) for item in message.list.values],
    "tuple": lambda message: tuple(_from_proto(item) for item in message.tuple.values),
    "mapping": lambda message: _mapping_from_proto(message.mapping),
    "array": lambda message: _array_from_proto(message.array),
    "object": lambda message: RecordedObject(
        message.object.type, _fields_from_proto(message.object)
    ),
    "choice": lambda message: RecordedMember(message.choice.type, message.choice.name),
}
