"""Defines a fuzz target: a reader of bytes, its seeds, and the errors that it may raise."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias
from unittest import mock

from controller.core.errors import SpeculationError
from tools.fuzz.mutation import Mutator, mutate_text

Feed: TypeAlias = Callable[[bytes], object]
Seeds: TypeAlias = Callable[[], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Target:
    """A target of the fuzzer.  opened: from an empty folder, a context that takes the inputs.

    seeds: inputs that are right.  allowed: errors that bad input may raise; anything else is a
    finding, and so is an input that takes too long or too much memory.
    """

    name: str
    seeds: Seeds
    mutate: Mutator
    opened: Callable[[Path], AbstractContextManager[Feed]]
    allowed: tuple[type[Exception], ...] = ()


def reader(feed: Feed) -> Callable[[Path], AbstractContextManager[Feed]]:
    """Returns the `opened` of a target that reads bytes in memory."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Feed]:
        yield feed

    return opened


def folder_reader(
    file: str, store: Callable[[Path], Callable[[], object]]
) -> Callable[[Path], AbstractContextManager[Feed]]:
    """Reads a file in a folder with others.  store: fills the folder and returns the reader."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Feed]:
        read = store(folder)

        def feed(data: bytes) -> None:
            (folder / file).write_bytes(data)
            read()

        yield feed

    return opened


def file_reader(
    read: Callable[[Path], object], name: str
) -> Callable[[Path], AbstractContextManager[Feed]]:
    """Reads a file of that name."""
    return folder_reader(name, lambda folder: partial(read, folder / name))


def refusing_file(
    name: str, seeds: Seeds | str, read: Callable[[Path], object], file: str,
    mutate: Mutator = mutate_text,
) -> Target:  # fmt: skip
    """A target that reads a file of that name, and raises SpeculationErrors.

    seeds: one text, or a function that returns the seeds.
    """
    return Target(name, _seeds(seeds), mutate, file_reader(read, file), (SpeculationError,))


def refusing(
    name: str, seeds: Seeds | str, read: Feed, mutate: Mutator = mutate_text,
    error: type[Exception] = SpeculationError,
) -> Target:  # fmt: skip
    """A target that reads bytes in memory, and raises such errors."""
    return Target(name, _seeds(seeds), mutate, reader(read), (error,))


def refusing_stored(
    name: str, file: str, store: Callable[[Path], Callable[[], object]], mutate: Mutator,
    error: type[Exception],
) -> Target:  # fmt: skip
    """A target that reads one file of a folder, and raises such errors; see `folder_reader`.

    Its seed is the stored file.
    """

    def seeds() -> Sequence[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            store(Path(folder))
            return [(Path(folder) / file).read_bytes()]

    return Target(name, seeds, mutate, folder_reader(file, store), (error,))


def _seeds(seeds: Seeds | str) -> Seeds:
    return (lambda: [seeds.encode()]) if isinstance(seeds, str) else seeds


@contextmanager
def environment(prefix: str, values: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables, and removes all others with the prefix."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
    with mock.patch.dict(os.environ, {**variables, **values}, clear=True):
        yield


def parse_variables(data: bytes, prefix: str) -> dict[str, str]:
    """Parses lines NAME=VALUE, without what an environment cannot hold."""
    variables = {}
    for line in data.decode("utf-8", "surrogateescape").splitlines():
        name, sign, value = line.partition("=")
        plain = "".join(c for c in name if c.isascii() and (c.isalnum() or c == "_"))
        if sign and plain:
            variables[prefix + plain] = value.replace("\0", "")
    return variables
