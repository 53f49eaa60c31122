"""The inputs of the hand-off to SpecForge: drafters that come back, and targets."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from engine_shim.sglang.training.versions import VersionError, Versions
from lab.cpu_engine.models.targets import save_target
from tests.support.training_rounds import SHAPE, make_target, with_draft_vocabulary
from tools.fuzz.mutation import Mutator, mutate_json
from tools.fuzz.target import Target, refusing_stored
from tools.fuzz.targets.engine import mutate_safetensors
from trainer.checkpoint import save_dflash, save_eagle3
from trainer.specforge import import_draft
from trainer.specforge_target import TargetError, read_target, write_target

_LAYERS = (0, 1, 2)
_TARGET = "target"
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def _chain() -> Eagle3Student:
    torch.manual_seed(0)
    embedding = torch.randn(SHAPE.vocabulary, SHAPE.hidden)
    student = Eagle3Student(Eagle3Shape(SHAPE.replace_layers(1), _LAYERS), embedding)
    return with_draft_vocabulary(student, torch.arange(3, 33))


def _blocks() -> DFlashStudent:
    torch.manual_seed(0)
    shape = DFlashShape(SHAPE.replace_layers(1), _LAYERS, 4, SHAPE.vocabulary - 1)
    return DFlashStudent(shape, torch.randn(SHAPE.vocabulary, SHAPE.hidden))


def _drafter(kind: str, folder: Path) -> Callable[[], None]:
    """A drafter in the folder, and what imports it as a version of itself."""
    student: Eagle3Student | DFlashStudent
    if kind == "eagle3":
        student = _chain()
        save_eagle3(student, folder)
    else:
        student = _blocks()
        save_dflash(student, folder)
    versions = Versions(folder / "versions")
    parameters = {name: part.detach() for name, part in student.named_parameters()}
    versions.adopt_base(student.shape, parameters, student.borrowed)

    def read() -> None:
        versions.load_student(import_draft(folder, versions))
        versions.delete_old(set())

    return read


def _stored_target(folder: Path) -> Callable[[], None]:
    """A target in the folder, and what reads it."""
    save_target(make_target(), folder / "stored")
    source = folder / _TARGET
    write_target(read_target(folder / "stored"), source, source)

    def read() -> None:
        target_head = read_target(source)
        assert target_head.embedding.dim() == 2
        assert target_head.head_key
        assert target_head.layers

    return read


def _import(kind: str, name: str, mutate: Mutator) -> Target:
    store = partial(_drafter, kind)
    return refusing_stored(f"specforge.{kind}.{name}", name, store, mutate, VersionError)


def _target(name: str, mutate: Mutator) -> Target:
    file = f"{_TARGET}/{name}"
    return refusing_stored(f"specforge.target.{name}", file, _stored_target, mutate, TargetError)


TARGETS = (
    _import("eagle3", _CONFIG, mutate_json),
    _import("eagle3", _WEIGHTS, mutate_safetensors),
    _import("dflash", _CONFIG, mutate_json),
    _target(_CONFIG, mutate_json),
    _target(_INDEX, mutate_json),
)
