"""Stores versions of a drafter in a folder: the base that an engine loaded, and trained ones.

    base.safetensors        what the engine has stored: parameters, what the drafter uses and does
                            not train (the target's embedding and head, the draft vocabulary), sizes
    00000001.safetensors    version 1: the same parameters, other values

A version belongs to one base, by its digest.  Loading refuses parameters of other names or shapes,
and those of another drafter.  Files are written under a temporary name and then renamed, and a
digest detects damaged values.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine_shim.sglang.training.blocks import Borrowed
from engine_shim.sglang.training.students import (
    DraftShape,
    DraftStudent,
    decoded,
    encoded,
    student_of,
)

FORMAT: Final = "speculation-draft-1"
# The folder of the versions, inside the folder of the signals they are trained on.
FOLDER: Final = "drafter"
# Exceptions that malformed stored JSON can cause.
_MALFORMED: Final = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
# The types that parameters of a version may have.
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BASE: Final = "base"
_SUFFIX: Final = ".safetensors"
# Prefix of the names of tensors that are not trained.
_BORROWED: Final = "target:"
_LOCK: Final = ".lock"
_CLAIM: Final = ".claim"
# Suffix of files that are being written; a file older than the limit was abandoned.
_PART: Final = ".part"
_LEFT_SECONDS: Final = 86_400.0


class VersionError(ValueError):
    """A version cannot be used; the message names the file and says why."""


class FolderTakenError(RuntimeError):
    """Another trainer works in this folder."""


@dataclass(frozen=True, slots=True)
class Made:
    """The origin of a version.

    parent: the version it was trained from, 0 for the base.  signals: number of signals it was
    trained on; 0 for a version that was trained elsewhere or by online updates in the engine.
    """

    parent: int
    alpha_train: float
    alpha_eval: float
    alpha_before: float
    signals: int
    seconds: float

    @property
    def imported(self) -> bool:
        """Whether it was trained elsewhere."""
        return not self.signals


class Versions:
    """The versions in one drafter's folder, which is made if it does not exist.  Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def adopt_base(
        self,
        shape: DraftShape,
        parameters: Mapping[str, Tensor],
        borrowed: Borrowed,
    ) -> str:
        """Stores what an engine has loaded as the base; returns its digest.

        A base with the same values and another shape, which an earlier release may have written, is
        overwritten.  Raises VersionError if the folder belongs to another drafter.
        """
        digest = digest_of(_own(parameters, borrowed))
        facts = {"digest": digest, "shape": json.dumps(encoded(shape))}
        path = self._path(0)
        if path.exists():
            found = _facts(path)
            if found.get("digest") != digest:
                raise VersionError(
                    f"{self.folder} holds signals and versions of another drafter "
                    f"({found.get('digest')}, this one is {digest}): set "
                    "SPECULATION_SIGNALS_FOLDER to another folder"
                )
            if facts.items() <= found.items():
                return digest
        others = {
            _BORROWED + name: part for name, part in borrowed._asdict().items() if part is not None
        }
        self._write(path, {**parameters, **others}, facts)
        return digest

    def base_digest(self) -> str:
        """Returns the digest of the base.  Raises VersionError, also without a base."""
        found = _facts(self._path(0)).get("digest")
        if not found:
            raise VersionError(f"{self._path(0)} has no digest")
        return found

    def student(self, version: int) -> DraftStudent:
        """Loads a version of the drafter in float32.  Raises VersionError."""
        path = self._path(0)
        facts = _facts(path)
        try:
            parameters, others = _parted(_tensors(path))
            borrowed = Borrowed(**others)
            _require_values(path, facts, _own(parameters, borrowed))
            student = student_of(decoded(json.loads(facts["shape"])), _in_float32(borrowed))
            student.load_state_dict(parameters)
        except VersionError:
            raise
        except (*_MALFORMED, RuntimeError) as error:
            raise VersionError(f"{path}: {error}") from error
        if version:
            student.load_state_dict(self.load(version, dict(student.named_parameters())))
        return student

    def load(self, version: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reads the parameters of a version, checked against those of `like`.

        Raises VersionError.
        """
        path = self._path(version)
        facts = _facts(path)
        if facts.get("base") != self.base_digest():
            raise VersionError(f"{path} was made for another drafter")
        found = _tensors(path)
        check_parameters(found, like, path)
        _require_values(path, facts, found)
        return found

    def publish(self, parameters: Mapping[str, Tensor], made: Made) -> int:
        """Stores new parameters under the next free number, which is returned.  Raises OSError.

        Engine and trainer may call it at the same time: each gets its own number.
        """
        facts = {
            "base": self.base_digest(),
            "made": json.dumps(asdict(made)),
            "digest": digest_of(parameters),
        }
        version, claim = self._claimed()
        try:
            self._write(self._path(version), parameters, facts)
        finally:
            claim.unlink(missing_ok=True)
        return version

    def made(self, version: int) -> Made:
        """Reads the origin of a version.  Raises VersionError."""
        path = self._path(version)
        try:
            return Made(**json.loads(_facts(path)["made"]))
        except _MALFORMED as error:
            raise VersionError(f"{path}: {error}") from error

    def numbers(self) -> list[int]:
        """Returns all versions, ascending, without the base."""
        names = (path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def forget(self, keep: set[int], most: int = 8) -> None:
        """Deletes the oldest versions beyond `most`, but none of `keep`.

        Also deletes the files of a killed writer that are older than a day.
        """
        for version in self.numbers()[:-most]:
            if version not in keep:
                self._path(version).unlink(missing_ok=True)
        for part in self.folder.glob(f"*{_PART}"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _LEFT_SECONDS:
                    part.unlink()

    def lock(self) -> IO[bytes]:
        """Locks the folder for one trainer until the file is closed.  Raises FolderTakenError."""
        file = (self.folder / _LOCK).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise FolderTakenError(f"another trainer works in {self.folder}") from error
        return file

    def _path(self, version: int) -> Path:
        return self.folder / ((f"{version:08d}" if version else _BASE) + _SUFFIX)

    def _claimed(self) -> tuple[int, Path]:
        """Claims a free number; returns it and the claim, a file that the caller deletes.

        A number that a killed writer has claimed is never used.
        """
        version = max([0, *self.numbers()]) + 1
        while True:
            path = self._path(version)
            claim = path.with_suffix(_CLAIM)
            with suppress(FileExistsError):
                claim.touch(exist_ok=False)
                if not path.exists():
                    return version, claim
                claim.unlink(missing_ok=True)
            version += 1

    def _write(self, path: Path, tensors: Mapping[str, Tensor], facts: dict[str, str]) -> None:
        aside = path.with_suffix(f".{os.getpid()}{_PART}")
        try:
            whole = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
            save_file(whole, aside, {"format": FORMAT, **facts})
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            # Engine and trainer often run as different users.
            aside.chmod(0o644)
            aside.rename(path)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        finally:
            aside.unlink(missing_ok=True)


def check_parameters(found: Mapping[str, Tensor], like: Mapping[str, Tensor], path: Path) -> None:
    """Raises VersionError if names or shapes differ from `like`, or values are not finite floats.

    Quantised values (fp8, for example) are refused, because their scales are not in the file.
    """
    for name in sorted(found.keys() | like.keys()):
        ours = tuple(found[name].shape) if name in found else "missing"
        theirs = tuple(like[name].shape) if name in like else "missing"
        if ours != theirs:
            raise VersionError(f"{path}: {name} is {ours}, the drafter's {theirs}")
    for name, part in found.items():
        if part.dtype not in _FLOATS:
            kinds = ", ".join(map(str, _FLOATS))
            raise VersionError(f"{path}: {name} is of {part.dtype}, and one of {kinds} is needed")
        if not bool(torch.isfinite(part).all()):
            raise VersionError(f"{path}: {name} contains NaN or infinite values")


def digest_of(parameters: Mapping[str, Tensor]) -> str:
    """Returns a digest of the names, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(parameters):
        part = parameters[name].detach().cpu().contiguous()
        found.update(f"{name}{tuple(part.shape)}{part.dtype}".encode())
        found.update(part.view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _own(parameters: Mapping[str, Tensor], borrowed: Borrowed) -> dict[str, Tensor]:
    """Returns the tensors that identify a drafter: parameters, and a draft vocabulary if any."""
    own = dict(parameters)
    if borrowed.tokens is not None:
        own[_BORROWED + "tokens"] = borrowed.tokens
    return own


def _parted(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Splits a base into the parameters and the borrowed tensors, the latter by field name."""
    others = {
        name.removeprefix(_BORROWED): part
        for name, part in tensors.items()
        if name.startswith(_BORROWED)
    }
    own = {name: part for name, part in tensors.items() if not name.startswith(_BORROWED)}
    return own, others


def _in_float32(borrowed: Borrowed) -> Borrowed:
    embedding, head, tokens = borrowed
    return Borrowed(embedding.float(), None if head is None else head.float(), tokens)


def _require_values(path: Path, facts: Mapping[str, str], found: Mapping[str, Tensor]) -> None:
    """Raises VersionError unless the values are those that were written.

    Versions of earlier releases have no digest of their own.
    """
    written = facts.get("digest")
    if written is not None and written != digest_of(found):
        raise VersionError(f"{path} is damaged: its values are not those that were written")


def _facts(path: Path) -> dict[str, str]:
    if not path.exists():
        hint = (
            ": no engine has stored its drafter there.  Start one with SPECULATION_SIGNALS_FOLDER; "
            "its log gives the reason if the drafter cannot learn"
        )
        raise VersionError(f"{path} does not exist{hint if path.stem == _BASE else ''}")
    try:
        with safe_open(path, "pt") as file:
            facts: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise VersionError(f"{path}: {error}") from error
    if facts.get("format") != FORMAT:
        raise VersionError(f"{path}: its format is {facts.get('format')!r}, {FORMAT!r} is needed")
    return facts


def _tensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise VersionError(f"{path}: {error}") from error
