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
    decode_shape,
    encode_shape,
    make_student,
)

FORMAT: Final = "speculation-draft-1"
# The folder of the versions, inside the folder of the signals they are trained on.
FOLDER_NAME: Final = "drafter"
# Exceptions that malformed stored JSON can cause.
_MALFORMED: Final = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
# The types that parameters of a version may have.
_FLOAT_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BASE_STEM: Final = "base"
_SUFFIX: Final = ".safetensors"
# Prefix of the names of tensors that are not trained.
_BORROWED_PREFIX: Final = "target:"
_LOCK: Final = ".lock"
_CLAIM: Final = ".claim"
# Suffix of files that are being written; a file older than the limit was abandoned.
_PARTIAL_SUFFIX: Final = ".part"
_ABANDONED_SECONDS: Final = 86_400.0


class VersionError(ValueError):
    """A version cannot be used; the message names the file and says why."""


class FolderTakenError(RuntimeError):
    """Another trainer works in this folder."""


@dataclass(frozen=True, slots=True)
class VersionOrigin:
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
    def is_imported(self) -> bool:
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
        digest = digest_parameters(_drafter_tensors(parameters, borrowed))
        metadata = {"digest": digest, "shape": json.dumps(encode_shape(shape))}
        path = self._path(0)
        if path.exists():
            stored_facts = _read_metadata(path)
            if stored_facts.get("digest") != digest:
                raise VersionError(
                    f"{self.folder} holds signals and versions of another drafter "
                    f"({stored_facts.get('digest')}, this one is {digest}): set "
                    "SPECULATION_SIGNALS_FOLDER to another folder"
                )
            if metadata.items() <= stored_facts.items():
                return digest
        borrowed_tensors = {
            _BORROWED_PREFIX + name: part
            for name, part in borrowed._asdict().items()
            if part is not None
        }
        self._write(path, {**parameters, **borrowed_tensors}, metadata)
        return digest

    def base_digest(self) -> str:
        """Returns the digest of the base.  Raises VersionError, also without a base."""
        digest = _read_metadata(self._path(0)).get("digest")
        if not digest:
            raise VersionError(f"{self._path(0)} has no digest")
        return digest

    def load_student(self, version: int) -> DraftStudent:
        """Loads a version of the drafter in float32.  Raises VersionError."""
        path = self._path(0)
        metadata = _read_metadata(path)
        try:
            parameters, borrowed_tensors = _split_borrowed(_read_tensors(path))
            borrowed = Borrowed(**borrowed_tensors)
            _require_values(path, metadata, _drafter_tensors(parameters, borrowed))
            student = make_student(
                decode_shape(json.loads(metadata["shape"])), _in_float32(borrowed)
            )
            student.load_state_dict(parameters)
        except VersionError:
            raise
        except (*_MALFORMED, RuntimeError) as error:
            raise VersionError(f"{path}: {error}") from error
        if version:
            student.load_state_dict(self.load_parameters(version, dict(student.named_parameters())))
        return student

    def load_parameters(self, version: int, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Reads the parameters of a version, checked against those of `expected`.

        Raises VersionError.
        """
        path = self._path(version)
        metadata = _read_metadata(path)
        if metadata.get("base") != self.base_digest():
            raise VersionError(f"{path} was made for another drafter")
        parameters = _read_tensors(path)
        check_parameters(parameters, expected, path)
        _require_values(path, metadata, parameters)
        return parameters

    def publish(self, parameters: Mapping[str, Tensor], origin: VersionOrigin) -> int:
        """Stores new parameters under the next free number, which is returned.  Raises OSError.

        Engine and trainer may call it at the same time: each gets its own number.
        """
        metadata = {
            "base": self.base_digest(),
            "made": json.dumps(asdict(origin)),
            "digest": digest_parameters(parameters),
        }
        version, claim = self._claim_number()
        try:
            self._write(self._path(version), parameters, metadata)
        finally:
            claim.unlink(missing_ok=True)
        return version

    def read_origin(self, version: int) -> VersionOrigin:
        """Reads the origin of a version.  Raises VersionError."""
        path = self._path(version)
        try:
            return VersionOrigin(**json.loads(_read_metadata(path)["made"]))
        except _MALFORMED as error:
            raise VersionError(f"{path}: {error}") from error

    def version_numbers(self) -> list[int]:
        """Returns all versions, ascending, without the base."""
        names = (path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def delete_old(self, kept_versions: set[int], max_versions: int = 8) -> None:
        """Deletes the oldest versions beyond `max_versions`, but none of `kept_versions`.

        Also deletes the files of a killed writer that are older than a day.
        """
        for version in self.version_numbers()[:-max_versions]:
            if version not in kept_versions:
                self._path(version).unlink(missing_ok=True)
        for part in self.folder.glob(f"*{_PARTIAL_SUFFIX}"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
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
        return self.folder / ((f"{version:08d}" if version else _BASE_STEM) + _SUFFIX)

    def _claim_number(self) -> tuple[int, Path]:
        """Claims a free number; returns it and the claim, a file that the caller deletes.

        A number that a killed writer has claimed is never used.
        """
        version = max([0, *self.version_numbers()]) + 1
        while True:
            path = self._path(version)
            claim = path.with_suffix(_CLAIM)
            with suppress(FileExistsError):
                claim.touch(exist_ok=False)
                if not path.exists():
                    return version, claim
                claim.unlink(missing_ok=True)
            version += 1

    def _write(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        partial_path = path.with_suffix(f".{os.getpid()}{_PARTIAL_SUFFIX}")
        try:
            contiguous = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
            save_file(contiguous, partial_path, {"format": FORMAT, **metadata})
            with partial_path.open("rb") as file:
                os.fsync(file.fileno())
            # Engine and trainer often run as different users.
            partial_path.chmod(0o644)
            partial_path.rename(path)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        finally:
            partial_path.unlink(missing_ok=True)


def check_parameters(
    parameters: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path
) -> None:
    """Raises VersionError for names or shapes that differ from `expected`, or bad values.

    Quantised values (fp8, for example) are refused, because their scales are not in the file.
    """
    for name in sorted(parameters.keys() | expected.keys()):
        actual_shape = tuple(parameters[name].shape) if name in parameters else "missing"
        expected_shape = tuple(expected[name].shape) if name in expected else "missing"
        if actual_shape != expected_shape:
            raise VersionError(f"{path}: {name} is {actual_shape}, the drafter's {expected_shape}")
    for name, part in parameters.items():
        if part.dtype not in _FLOAT_DTYPES:
            kinds = ", ".join(map(str, _FLOAT_DTYPES))
            raise VersionError(f"{path}: {name} is of {part.dtype}, and one of {kinds} is needed")
        if not bool(torch.isfinite(part).all()):
            raise VersionError(f"{path}: {name} contains NaN or infinite values")


def digest_parameters(parameters: Mapping[str, Tensor]) -> str:
    """Returns a digest of the names, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        part = parameters[name].detach().cpu().contiguous()
        digest.update(f"{name}{tuple(part.shape)}{part.dtype}".encode())
        digest.update(part.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _drafter_tensors(parameters: Mapping[str, Tensor], borrowed: Borrowed) -> dict[str, Tensor]:
    """Returns the tensors that identify a drafter: parameters, and a draft vocabulary if any."""
    tensors = dict(parameters)
    if borrowed.tokens is not None:
        tensors[_BORROWED_PREFIX + "tokens"] = borrowed.tokens
    return tensors


def _split_borrowed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Splits a base into the parameters and the borrowed tensors, the latter by field name."""
    borrowed_tensors = {
        name.removeprefix(_BORROWED_PREFIX): part
        for name, part in tensors.items()
        if name.startswith(_BORROWED_PREFIX)
    }
    parameters = {
        name: part for name, part in tensors.items() if not name.startswith(_BORROWED_PREFIX)
    }
    return parameters, borrowed_tensors


def _in_float32(borrowed: Borrowed) -> Borrowed:
    embedding, head, tokens = borrowed
    return Borrowed(embedding.float(), None if head is None else head.float(), tokens)


def _require_values(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Raises VersionError unless the values are those that were written.

    Versions of earlier releases have no digest of their own.
    """
    written = metadata.get("digest")
    if written is not None and written != digest_parameters(tensors):
        raise VersionError(f"{path} is damaged: its values are not those that were written")


def _read_metadata(path: Path) -> dict[str, str]:
    if not path.exists():
        hint = (
            ": no engine has stored its drafter there.  Start one with SPECULATION_SIGNALS_FOLDER; "
            "its log gives the reason if the drafter cannot learn"
        )
        raise VersionError(f"{path} does not exist{hint if path.stem == _BASE_STEM else ''}")
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise VersionError(f"{path}: {error}") from error
    if metadata.get("format") != FORMAT:
        raise VersionError(
            f"{path}: its format is {metadata.get('format')!r}, {FORMAT!r} is needed"
        )
    return metadata


def _read_tensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise VersionError(f"{path}: {error}") from error
