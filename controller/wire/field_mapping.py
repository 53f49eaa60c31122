"""Copies fields and enumeration members that have the same name in the core and the contract."""

from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Member = TypeVar("_Member", bound=Enum)
_Value = TypeVar("_Value", bound="DataclassInstance")
_Message = TypeVar("_Message", bound=Message)


def message_of(kind: type[_Message], value: "DataclassInstance", /, **differing: Any) -> _Message:
    """Makes a message from a dataclass.

    differing: fields that differ from the dataclass's; None leaves a field out.
    """
    shared = {name: getattr(value, name) for name in _shared_fields(kind.DESCRIPTOR, type(value))}
    return kind(**shared | differing)


@cache
def _shared_fields(message: Descriptor, value: "type[DataclassInstance]") -> tuple[str, ...]:
    names = message.fields_by_name
    return tuple(field.name for field in fields(value) if field.name in names)


def value_of(kind: type[_Value], message: Message, /, **differing: Any) -> _Value:
    """Makes a dataclass from a message.  differing: fields that differ from the message's.

    An absent optional field takes the dataclass's default.  Lists become tuples.
    """
    names = {field.name for field in fields(kind)} - differing.keys()
    values = {}
    for field in message.DESCRIPTOR.fields:
        if field.name in names and not (field.has_presence and not message.HasField(field.name)):
            item = getattr(message, field.name)
            values[field.name] = tuple(item) if _is_list(item) else item
    return kind(**values, **differing)


def _is_list(item: object) -> bool:
    """Recognizes a repeated field by its value: older protobuf cannot name the kind of a field."""
    return isinstance(item, Sequence) and not isinstance(item, str | bytes)


def numbers_of(kind: type[_Member], enum_type: Any, prefix: str) -> dict[_Member, Any]:
    """Maps each member of an enumeration to the number of the contract's member PREFIX + name."""
    return {member: enum_type.Value(f"{prefix}{member.name}") for member in kind}
