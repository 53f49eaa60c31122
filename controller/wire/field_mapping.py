"""Copies the fields that a dataclass of the core and a protobuf message have under one name."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Value = TypeVar("_Value", bound="DataclassInstance")
_Message = TypeVar("_Message", bound=Message)


def message_of(kind: type[_Message], value: "DataclassInstance", /, **others: Any) -> _Message:
    """Makes a message from a value.  others: fields that differ; None leaves a field out."""
    names = kind.DESCRIPTOR.fields_by_name
    same = {field.name: getattr(value, field.name) for field in fields(value)}
    return kind(**{name: item for name, item in same.items() if name in names} | others)


def value_of(kind: type[_Value], message: Message, /, **others: Any) -> _Value:
    """Makes a value from a message.  others: fields that differ.

    An optional field that is absent takes the dataclass's default; lists become tuples.
    """
    names = {field.name for field in fields(kind)} - others.keys()
    found = {}
    for field in message.DESCRIPTOR.fields:
        if field.name in names and not (field.has_presence and not message.HasField(field.name)):
            item = getattr(message, field.name)
            found[field.name] = tuple(item) if _is_list(item) else item
    return kind(**found, **others)


def _is_list(item: object) -> bool:
    """Tells a repeated field by its value: older protobuf has no name for the kind of a field."""
    return isinstance(item, Sequence) and not isinstance(item, str | bytes)
