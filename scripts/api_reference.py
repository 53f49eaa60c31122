"""Writes docs/api.md from the .proto files and their comments; with --check, only compares."""

import argparse
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "api.md"
_PACKAGE = ".speculation.v1."
_COLUMNS = 120

_HEAD = """# API reference

The calls, messages and values of the contract. This page is written from `proto/speculation/v1`
by `scripts/api_reference.py`, and `make check` compares the two. What holds for all calls is in
[the contract](../proto/README.md): [pages](../proto/README.md#pages), [request
ids](../proto/README.md#request-ids), [errors](../proto/README.md#errors), and how v1 may change.
[Who may call what](security.md#who-may-do-what) depends on the way in. [A
client](client.md) in Python calls it for programs.
"""

# Numbers of fields in the descriptor of a file, of which the paths of comments are made.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _VALUES, _METHODS = 2, 3, 4, 2, 2
_STATUS = "|".join(code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK)
_SCALARS = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}


class _File:
    """A .proto file whose comments can be found by what they describe."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self.file = file
        self._comments = {
            tuple(place.path): place.leading_comments
            for place in file.source_code_info.location
            if place.leading_comments
        }

    def comment(self, *path: int) -> list[str]:
        """Returns the lines of the comment above a part."""
        text = textwrap.dedent(self._comments.get(path, ""))
        return text.strip("\n").splitlines()


def reference(source: Path = ROOT / "proto") -> str:
    """Returns the whole page.  Raises subprocess.CalledProcessError for invalid files."""
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run([buf, "build", source, "-o", "-"], check=True, stdout=subprocess.PIPE)
    files = [_File(file) for file in _service_files(FileDescriptorSet.FromString(done.stdout))]
    lines = [*_HEAD.splitlines(), ""]
    for proto_file in files:
        lines += _services(proto_file)
    for proto_file in files:
        lines += _types(proto_file)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def _service_files(descriptor_set: FileDescriptorSet) -> list[FileDescriptorProto]:
    """Returns the files with services and those that they import, in this order, by name.

    The format of recordings is in a file that no service imports.
    """
    services = [file for file in descriptor_set.file if file.service]
    imported = {name for file in services for name in file.dependency}
    imported_files = [
        file for file in descriptor_set.file if file.name in imported and not file.service
    ]
    return sorted(services, key=_by_name) + sorted(imported_files, key=_by_name)


def _by_name(file: FileDescriptorProto) -> str:
    return file.name


def _services(proto_file: _File) -> Iterator[str]:
    for i, service in enumerate(proto_file.file.service):
        yield from (f"## {service.name}", "", *_prose(proto_file.comment(_SERVICES, i)), "")
        for j, method in enumerate(service.method):
            yield from (f"### {service.name}.{method.name}", "", _signature(method), "")
            yield from (*_prose(proto_file.comment(_SERVICES, i, _METHODS, j)), "")


def _signature(method: MethodDescriptorProto) -> str:
    asks = "stream of " * method.client_streaming + _type_link(method.input_type)
    answers = "stream of " * method.server_streaming + _type_link(method.output_type)
    return f"{asks} → {answers}"


def _types(proto_file: _File) -> Iterator[str]:
    file = proto_file.file
    if file.message_type or file.enum_type:
        name = file.name.rpartition("/")[2]
        yield from (f"## Messages of {name}", "")
    for i, message in enumerate(file.message_type):
        yield from _message(proto_file, message, "", _MESSAGES, i)
    for i, enum in enumerate(file.enum_type):
        yield from _enum(proto_file, enum, "", _ENUMS, i)


def _message(proto_file: _File, message: DescriptorProto, outer: str, *path: int) -> Iterator[str]:
    name = f"{outer}{message.name}"
    yield from (f"### {name}", "", *_prose(proto_file.comment(*path)), "")
    if message.field:
        yield from ("| field | type | meaning |", "|---|---|---|")
    for k, field in enumerate(message.field):
        meaning = _cell(proto_file.comment(*path, _FIELDS, k))
        yield f"| `{field.name}` | {_type(field, message)} | {meaning} |"
    yield "" if message.field else "It has no fields."
    yield ""
    for k, nested in enumerate(message.nested_type):
        yield from _message(proto_file, nested, f"{name}.", *path, _NESTED, k)
    for k, enum in enumerate(message.enum_type):
        yield from _enum(proto_file, enum, f"{name}.", *path, _NESTED_ENUMS, k)


def _enum(proto_file: _File, enum: EnumDescriptorProto, outer: str, *path: int) -> Iterator[str]:
    yield from (f"### {outer}{enum.name}", "", *_prose(proto_file.comment(*path)), "")
    yield from ("| value | number | meaning |", "|---|---|---|")
    for k, value in enumerate(enum.value):
        meaning = _cell(proto_file.comment(*path, _VALUES, k))
        yield f"| `{value.name}` | {value.number} | {meaning} |"
    yield ""


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    name = _type_link(field.type_name) if field.type_name else _SCALARS[field.type]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _type_link(full_name: str) -> str:
    """Returns the name of a type of the contract, linked to its section."""
    name = full_name.removeprefix(_PACKAGE)
    return f"[{name}](#{name.replace('.', '').lower()})"


def _prose(comment: Iterable[str]) -> Iterator[str]:
    """Yields wrapped paragraphs; indented lines stay as they are, and statuses become a list."""
    paragraph: list[str] = []
    for line in [*comment, ""]:
        if line and not line.startswith("    "):
            paragraph.append(line)
            continue
        if paragraph:
            yield from _wrap(" ".join(paragraph))
            yield ""
            paragraph = []
        if line:
            yield from ("```text", line.strip(), "```", "")


def _wrap(text: str) -> Iterator[str]:
    head, *statuses = re.split(rf"(?:^|(?<=\. ))(?=(?:{_STATUS}): )", _plain(text))
    if head.strip():
        yield from _fill(head.strip(), "")
        if statuses:
            yield ""
    for status in statuses:
        yield from _fill(f"- {status.strip()}", "  ")


def _fill(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _cell(comment: Iterable[str]) -> str:
    return _plain(" ".join(line.strip() for line in comment if line)) or "–"


def _plain(text: str) -> str:
    """Escapes Markdown's special characters, except between backticks."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s+", " ", text))
    return "".join(p if p.startswith("`") else re.sub(r"([*\[\]<>|])", r"\\\1", p) for p in parts)


def main() -> int:
    """Writes or compares the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--file", type=Path, default=REFERENCE, help="by default docs/api.md")
    parser.add_argument(
        "--source", type=Path, default=ROOT / "proto", help="root of the .proto files"
    )
    arguments = parser.parse_args()
    path: Path = arguments.file
    text = reference(arguments.source)
    if not arguments.check:
        path.write_text(text, encoding="utf-8")
        return 0
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        print(f"{path.name} is not what the contract says; run python scripts/api_reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
