"""Mutates good input into bad: bytes, text, JSON and protobuf messages.

A mutator takes randomness, an input and all seeds, and gives another input: anything, but mostly
what is nearly right.
"""

import json
import re
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

Mutator: TypeAlias = Callable[[Random, bytes, Sequence[bytes]], bytes]

# No input grows beyond this.
MAX_BYTES = 1 << 18
_TURNS = 4
_INTEGERS = (
    0, 1, 2, 3, 7, 63, 64, 65, 127, 128, 255, 256, 1023, 32767, 32768, 65535, 65536, 1_000_000,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
_REALS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 5e-324, 1e6, 1e18, 1e300, 1.7976931348623157e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
_WORDS = (
    "", " ", "0", "-1", "nan", "inf", "None", "true", "null", "../../../../etc/passwd", "/",
    "a" * 129, "x" * 5000, "%s%n{0}", "\x00", "\n", "\r\n", "\u202e\u0301", "γ", "\U0001f600",
    "\ufeff", "\ud800", "engine-0", "engine-1", "mtp", "eagle3", "unix:", "http://[", "1-2", "²",
    "\u0663", "-", "--", "'", '"', "\\",
)  # fmt: skip
_NUMBERS = (
    "0", "-0", "-1", "1e999", "-1e999", "1e-999", "NaN", "Infinity", "-Infinity", "1" + "0" * 400,
    "9" * 5000, "18446744073709551616", "0x10", "1_000", "1.", "+1", "1e5", "2.5", "true", "null",
    '""', "[]", "{}", "[[[[]]]]",
)  # fmt: skip
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_QUOTED = re.compile(r'"[^"\n]*"')
_DEEP = (500, 5_000, 50_000)


def bytes_of(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Bits, bytes, numbers, stretches; cut off, doubled, or joined with another input."""
    for _ in range(rng.randint(1, _TURNS)):
        data = rng.choice(_BYTE_CHANGES)(rng, data, seeds)[:MAX_BYTES]
    return data


def _flip(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    if not data:
        return rng.randbytes(rng.randint(0, 64))
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _overwrite(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    size = rng.choice((1, 2, 4, 8))
    value = rng.choice(_INTEGERS) % (1 << 8 * size)
    piece = value.to_bytes(size, rng.choice(("little", "big")))
    if size == 8 and rng.random() < 0.4:
        piece = struct.pack("<d", rng.choice(_REALS))
    return data[:at] + piece + data[at + size :]


def _insert(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 32)) + data[at:]


def _delete(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    begin, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return (
        data[:begin] + data[end:] if rng.random() < 0.5 else data[: begin + 1] + data[begin + 2 :]
    )


def _repeat(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    begin, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    return data[:end] + data[begin:end] * rng.choice((1, 2, 10)) + data[end:]


def _truncate(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    return data[: rng.randint(0, len(data))]


def _splice(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = rng.choice(seeds)
    return data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]


_BYTE_CHANGES = (
    _flip,
    _flip,
    _overwrite,
    _overwrite,
    _insert,
    _delete,
    _repeat,
    _truncate,
    _splice,
)


def text_of(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Lines, numbers, quoted words, nesting; and bytes, now and then."""
    if rng.random() < 0.15:
        return bytes_of(rng, data, seeds)
    text = data.decode("utf-8", "surrogateescape")
    for _ in range(rng.randint(1, _TURNS)):
        text = rng.choice(_TEXT_CHANGES)(rng, text)
    return text.encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace")[:MAX_BYTES]


def _line(rng: Random, text: str) -> str:
    lines = text.split("\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[other])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = rng.choice((" ", "\t", "  ")) + lines[at]
        case _:
            lines[at] += rng.choice((",", " ", ":", "#", rng.choice(_WORDS)))
    return "\n".join(lines)


def _number(rng: Random, text: str) -> str:
    return _replaced(rng, text, _NUMBER, rng.choice(_NUMBERS))


def _word(rng: Random, text: str) -> str:
    return _replaced(rng, text, _QUOTED, f'"{rng.choice(_WORDS)}"')


def _token(rng: Random, text: str) -> str:
    word = rng.choice(
        (*_WORDS, *_NUMBERS, "&a [*a, *a]", "!!python/object:os.system", "? : -", "<<:")
    )
    return _replaced(rng, text, re.compile(r"[^\s,:=\"{}\[\]]+"), word)


def _nested(rng: Random, text: str) -> str:
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ("{a: ", "}"), ("- ", "")))
    depth = rng.choice(_DEEP)
    deep = opening * depth + closing * rng.choice((0, depth))
    return _replaced(rng, text, _NUMBER, deep[: MAX_BYTES // 2])


def _replaced(rng: Random, text: str, pattern: re.Pattern[str], word: str) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text + word
    at = rng.choice(found)
    return text[: at.start()] + word + text[at.end() :]


_TEXT_CHANGES = (_line, _line, _number, _number, _word, _token, _token, _nested)


def json_of(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Values of other kinds and sizes, keys that are missing, strange or there twice."""
    if rng.random() < 0.3:
        return text_of(rng, data, seeds)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return text_of(rng, rng.choice(seeds), seeds)
    for _ in range(rng.randint(1, _TURNS)):
        body = _changed(rng, body)
    text = json.dumps(body)
    if rng.random() < 0.1:
        text = _replaced(rng, text, re.compile(r'("\w+": [^,{}\[\]]+), '), r"\1, \1, ")
    return text.encode()[:MAX_BYTES]


def _changed(rng: Random, value: Any) -> Any:
    """The value with one place in it changed."""
    inside = isinstance(value, dict | list) and value and rng.random() < 0.85
    if not inside:
        return _strange(rng, value)
    return _changed_object(rng, value) if isinstance(value, dict) else _changed_list(rng, value)


def _changed_object(rng: Random, value: dict[str, Any]) -> dict[str, Any]:
    key = rng.choice(list(value))
    match rng.randrange(8):
        case 0:
            return {name: item for name, item in value.items() if name != key}
        case 1:
            return value | {rng.choice(_WORDS): value[key]}
        case _:
            return value | {key: _changed(rng, value[key])}


def _changed_list(rng: Random, value: list[Any]) -> list[Any]:
    at = rng.randrange(len(value))
    match rng.randrange(8):
        case 0:
            return value[:at] + value[at + 1 :]
        case 1:
            return value + [value[at]] * rng.choice((1, 1, 70, 3000))
        case _:
            return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]


def _strange(rng: Random, value: Any) -> Any:
    kinds: tuple[Any, ...] = (
        rng.choice(_INTEGERS), -rng.choice(_INTEGERS), rng.choice(_REALS), rng.choice(_WORDS),
        10 ** rng.choice((30, 400)), None, True, False, [], {}, [value], {"a": value}, str(value),
    )  # fmt: skip
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice((value + 1, -value, rng.choice(_INTEGERS), rng.choice(_REALS)))
    return rng.choice(kinds)


def message_of(kind: type[Message]) -> Mutator:
    """Fields of a protobuf message set, cleared, repeated and mixed, at any depth."""

    def mutate(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
        if rng.random() < 0.2:
            return bytes_of(rng, data, seeds)
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return bytes_of(rng, data, seeds)
        for _ in range(rng.randint(1, _TURNS)):
            _change_message(rng, message)
        return message.SerializeToString()[:MAX_BYTES]

    return mutate


def _change_message(rng: Random, message: Message) -> None:
    """One place of it."""
    fields: Sequence[Any] = message.DESCRIPTOR.fields
    if not fields:
        return
    # What is there is changed rather than what is not.
    there = [field for field, _ in message.ListFields()]
    field: FieldDescriptor = rng.choice(there if there and rng.random() < 0.7 else fields)
    value = getattr(message, field.name)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif _is_map(field):
        value[rng.choice(("a", "numpy", "x" * 200))] = "y"
    elif field.is_repeated:
        _change_repeated(rng, field, value)
    elif field.message_type is not None:
        value.SetInParent()
        _change_message(rng, value)
    else:
        setattr(message, field.name, _scalar(rng, field))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _change_repeated(rng: Random, field: FieldDescriptor, value: Any) -> None:
    many = rng.choice((1, 1, 2, 70, 600))
    if field.message_type is not None:
        if value and rng.random() < 0.6:
            _change_message(rng, rng.choice(value))
        elif value and rng.random() < 0.5:
            copied = rng.choice(value)
            value.extend([copied] * many)
        else:
            value.add()
        return
    if value and rng.random() < 0.4:
        value[rng.randrange(len(value))] = _scalar(rng, field)
    elif value and rng.random() < 0.3:
        del value[rng.randrange(len(value)) :]
    else:
        value.extend([_scalar(rng, field)] * many)


def _scalar(rng: Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return rng.randbytes(rng.randint(0, 64))
            return rng.choice(_WORDS).encode("utf-8", "ignore").decode()
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice((*_REALS, rng.random(), rng.uniform(-10, 10)))
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 5, 99, 2**31 - 1))
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_INT32:
            bits = 32 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else 31
        case _:
            bits = 64 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64 else 63
    return rng.choice((*_INTEGERS, rng.randrange(20))) % (1 << bits)


_LENGTH = struct.Struct("<I")


def several(parts: Sequence[bytes]) -> bytes:
    """Some inputs as one, each behind its length."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def parts_of(data: bytes) -> list[bytes]:
    """The inputs again; what is torn off at the end counts as one."""
    parts = []
    at = 0
    while at + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        parts.append(data[at + _LENGTH.size : at + _LENGTH.size + size])
        at += _LENGTH.size + size
    return parts


def several_of(mutate: Mutator) -> Mutator:
    """Of inputs that stand for several: one is changed, or left out, doubled, moved."""

    def change(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
        parts = parts_of(data)
        singles = [part for seed in seeds for part in parts_of(seed)] or [b""]
        if not parts:
            return rng.choice(seeds)
        at = rng.randrange(len(parts))
        match rng.randrange(8):
            case 0:
                del parts[at]
            case 1:
                parts.insert(at, rng.choice(parts))
            case 2:
                parts.insert(at, rng.choice(singles))
            case 3:
                rng.shuffle(parts)
            case _:
                parts[at] = mutate(rng, parts[at], singles)
        return several(parts)[:MAX_BYTES]

    return change
