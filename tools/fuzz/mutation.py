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


def mutate_bytes(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Bits, bytes, numbers, stretches; cut off, doubled, or joined with another input."""
    for _ in range(rng.randint(1, _TURNS)):
        data = rng.choice(_BYTE_CHANGES)(rng, data, seeds)[:MAX_BYTES]
    return data


def _flip(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    if not data:
        return rng.randbytes(rng.randint(0, 64))
    index = rng.randrange(len(data))
    return data[:index] + bytes([data[index] ^ (1 << rng.randrange(8))]) + data[index + 1 :]


def _overwrite(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    start = rng.randint(0, len(data))
    size = rng.choice((1, 2, 4, 8))
    value = rng.choice(_INTEGERS) % (1 << 8 * size)
    piece = value.to_bytes(size, rng.choice(("little", "big")))
    if size == 8 and rng.random() < 0.4:
        piece = struct.pack("<d", rng.choice(_REALS))
    return data[:start] + piece + data[start + size :]


def _insert(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    index = rng.randint(0, len(data))
    return data[:index] + rng.randbytes(rng.randint(1, 32)) + data[index:]


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
    donor = rng.choice(seeds)
    return data[: rng.randint(0, len(data))] + donor[rng.randint(0, len(donor)) :]


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


def mutate_text(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Lines, numbers, quoted words, nesting; and sometimes bytes."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, data, seeds)
    text = data.decode("utf-8", "surrogateescape")
    for _ in range(rng.randint(1, _TURNS)):
        text = rng.choice(_TEXT_CHANGES)(rng, text)
    return text.encode("utf-8", "surrogatepass" if rng.random() < 0.5 else "replace")[:MAX_BYTES]


def _change_line(rng: Random, text: str) -> str:
    lines = text.split("\n")
    index, other_index = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[index]
        case 1:
            lines.insert(index, lines[other_index])
        case 2:
            lines[index], lines[other_index] = lines[other_index], lines[index]
        case 3:
            lines[index] = rng.choice((" ", "\t", "  ")) + lines[index]
        case _:
            lines[index] += rng.choice((",", " ", ":", "#", rng.choice(_WORDS)))
    return "\n".join(lines)


def _change_number(rng: Random, text: str) -> str:
    return _replace_match(rng, text, _NUMBER, rng.choice(_NUMBERS))


def _insert_word(rng: Random, text: str) -> str:
    return _replace_match(rng, text, _QUOTED, f'"{rng.choice(_WORDS)}"')


def _insert_token(rng: Random, text: str) -> str:
    word = rng.choice(
        (*_WORDS, *_NUMBERS, "&a [*a, *a]", "!!python/object:os.system", "? : -", "<<:")
    )
    return _replace_match(rng, text, re.compile(r"[^\s,:=\"{}\[\]]+"), word)


def _insert_nested(rng: Random, text: str) -> str:
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ("{a: ", "}"), ("- ", "")))
    depth = rng.choice(_DEEP)
    deep = opening * depth + closing * rng.choice((0, depth))
    return _replace_match(rng, text, _NUMBER, deep[: MAX_BYTES // 2])


def _replace_match(rng: Random, text: str, pattern: re.Pattern[str], word: str) -> str:
    matches = list(pattern.finditer(text))
    if not matches:
        return text + word
    chosen_match = rng.choice(matches)
    return text[: chosen_match.start()] + word + text[chosen_match.end() :]


_TEXT_CHANGES = (
    _change_line,
    _change_line,
    _change_number,
    _change_number,
    _insert_word,
    _insert_token,
    _insert_token,
    _insert_nested,
)


def mutate_json(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Values of other kinds and sizes, keys that are missing, strange or there twice."""
    if rng.random() < 0.3:
        return mutate_text(rng, data, seeds)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_text(rng, rng.choice(seeds), seeds)
    for _ in range(rng.randint(1, _TURNS)):
        body = _change_value(rng, body)
    text = json.dumps(body)
    if rng.random() < 0.1:
        text = _replace_match(rng, text, re.compile(r'("\w+": [^,{}\[\]]+), '), r"\1, \1, ")
    return text.encode()[:MAX_BYTES]


def _change_value(rng: Random, value: Any) -> Any:
    """The value with one place in it changed."""
    inside = isinstance(value, dict | list) and value and rng.random() < 0.85
    if not inside:
        return _odd_value(rng, value)
    return _change_object(rng, value) if isinstance(value, dict) else _change_list(rng, value)


def _change_object(rng: Random, value: dict[str, Any]) -> dict[str, Any]:
    key = rng.choice(list(value))
    match rng.randrange(8):
        case 0:
            return {name: item for name, item in value.items() if name != key}
        case 1:
            return value | {rng.choice(_WORDS): value[key]}
        case _:
            return value | {key: _change_value(rng, value[key])}


def _change_list(rng: Random, value: list[Any]) -> list[Any]:
    index = rng.randrange(len(value))
    match rng.randrange(8):
        case 0:
            return value[:index] + value[index + 1 :]
        case 1:
            return value + [value[index]] * rng.choice((1, 1, 70, 3000))
        case _:
            return [*value[:index], _change_value(rng, value[index]), *value[index + 1 :]]


def _odd_value(rng: Random, value: Any) -> Any:
    kinds: tuple[Any, ...] = (
        rng.choice(_INTEGERS), -rng.choice(_INTEGERS), rng.choice(_REALS), rng.choice(_WORDS),
        10 ** rng.choice((30, 400)), None, True, False, [], {}, [value], {"a": value}, str(value),
    )  # fmt: skip
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
        return rng.choice((value + 1, -value, rng.choice(_INTEGERS), rng.choice(_REALS)))
    return rng.choice(kinds)


def mutate_message(kind: type[Message]) -> Mutator:
    """Fields of a protobuf message set, cleared, repeated and mixed, at any depth."""

    def mutate(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
        if rng.random() < 0.2:
            return mutate_bytes(rng, data, seeds)
        message = kind()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return mutate_bytes(rng, data, seeds)
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
    present_fields = [field for field, _ in message.ListFields()]
    field: FieldDescriptor = rng.choice(
        present_fields if present_fields and rng.random() < 0.7 else fields
    )
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
        setattr(message, field.name, _random_scalar(rng, field))


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
        value[rng.randrange(len(value))] = _random_scalar(rng, field)
    elif value and rng.random() < 0.3:
        del value[rng.randrange(len(value)) :]
    else:
        value.extend([_random_scalar(rng, field)] * many)


def _random_scalar(rng: Random, field: FieldDescriptor) -> Any:
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


def join_parts(parts: Sequence[bytes]) -> bytes:
    """Some inputs as one, each behind its length."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """The inputs again; what is torn off at the end counts as one."""
    parts = []
    position = 0
    while position + _LENGTH.size <= len(data):
        (size,) = _LENGTH.unpack_from(data, position)
        parts.append(data[position + _LENGTH.size : position + _LENGTH.size + size])
        position += _LENGTH.size + size
    return parts


def mutate_parts(mutate: Mutator) -> Mutator:
    """Returns a mutator of inputs with several parts: it changes, omits, doubles or moves one."""

    def change(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
        parts = split_parts(data)
        singles = [part for seed in seeds for part in split_parts(seed)] or [b""]
        if not parts:
            return rng.choice(seeds)
        index = rng.randrange(len(parts))
        match rng.randrange(8):
            case 0:
                del parts[index]
            case 1:
                parts.insert(index, rng.choice(parts))
            case 2:
                parts.insert(index, rng.choice(singles))
            case 3:
                rng.shuffle(parts)
            case _:
                parts[index] = mutate(rng, parts[index], singles)
        return join_parts(parts)[:MAX_BYTES]

    return change
