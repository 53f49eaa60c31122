"""What the hand-off to SpecForge reads: drafters that come back, and targets."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from engine_shim.sglang.training.versions import VersionError, Versions
from lab.cpu_engine.models.targets import save_target
from tests.support.training_rounds import SHAPE, make_target, with_draft_vocabulary
from tools.fuzz.mutation import Mutator, json_of
from tools.fuzz.target import Feed, Target
from tools.fuzz.targets.engine import safetensors_of
from trainer.checkpoint import save_dflash, save_draft
from trainer.specforge import import_draft
from trainer.specforge_target import TargetError, read_target, write_target

_LAYERS = (0, 1, 2)
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def _chain() -> Eagle3Student:
    torch.manual_seed(0)
    embedding = torch.randn(SHAPE.vocabulary, SHAPE.hidden)
    whole = Eagle3Student(Eagle3Shape(SHAPE.with_layers(1), _LAYERS), embedding)
    return with_draft_vocabulary(whole, torch.arange(3, 33))


def _blocks() -> DFlashStudent:
    torch.manual_seed(0)
    shape = DFlashShape(SHAPE.with_layers(1), _LAYERS, 4, SHAPE.vocabulary - 1)
    return DFlashStudent(shape, torch.randn(SHAPE.vocabulary, SHAPE.hidden))


def _store(kind: str, folder: Path) -> Versions:
    """A drafter in the folder, and the versions that it could become one of."""
    student: Eagle3Student | DFlashStudent
    if kind == "eagle3":
        student = _chain()
        save_draft(student, folder)
    else:
        student = _blocks()
        save_dflash(student, folder)
    versions = Versions(folder / "versions")
    parameters = {name: part.detach() for name, part in student.named_parameters()}
    versions.adopt_base(student.shape, parameters, student.borrowed)
    return versions


def _import(kind: str, name: str, mutate: Mutator) -> Target:
    """One file of a drafter that is imported."""

    def seeds() -> Sequence[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            _store(kind, Path(folder))
            return [(Path(folder) / name).read_bytes()]

    @contextmanager
    def opened(folder: Path) -> Iterator[Feed]:
        versions = _store(kind, folder)

        def feed(data: bytes) -> None:
            (folder / name).write_bytes(data)
            versions.student(import_draft(folder, versions))
            versions.forget(set())

        yield feed

    return Target(f"specforge.{kind}.{name}", seeds, mutate, opened, (VersionError,))


def _target(name: str, mutate: Mutator) -> Target:
    """One file of a target."""

    def store(folder: Path) -> Path:
        save_target(make_target(), folder / "stored")
        source = folder / "target"
        write_target(read_target(folder / "stored"), source, source)
        return source

    def seeds() -> Sequence[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            return [(store(Path(folder)) / name).read_bytes()]

    @contextmanager
    def opened(folder: Path) -> Iterator[Feed]:
        source = store(folder)

        def feed(data: bytes) -> None:
            (source / name).write_bytes(data)
            found = read_target(source)
            assert found.embedding.dim() == 2
            assert found.head_key
            assert found.layers

        yield feed

    return Target(f"specforge.target.{name}", seeds, mutate, opened, (TargetError,))


TARGETS = (
    _import("eagle3", _CONFIG, json_of),
    _import("eagle3", _WEIGHTS, safetensors_of),
    _import("dflash", _CONFIG, json_of),
    _target(_CONFIG, json_of),
    _target(_INDEX, json_of),
)
