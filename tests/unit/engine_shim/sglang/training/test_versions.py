"""Versions of a drafter on disk: nothing wrong is ever loaded."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_shim.sglang.training.dflash import DFlashStudent
from engine_shim.sglang.training.students import DraftStudent
from engine_shim.sglang.training.versions import (
    FolderTakenError,
    VersionError,
    VersionOrigin,
    Versions,
    digest_parameters,
)
from tests.support.training_rounds import (
    make_block_student,
    make_predictor,
    make_student,
    make_target,
)

ORIGIN = VersionOrigin(0, 0.3, 0.6, 0.4, 50, 12.5)


@pytest.fixture(
    params=[make_student, make_block_student, make_predictor], ids=["eagle3", "dflash", "mtp"]
)
def student(request: pytest.FixtureRequest) -> DraftStudent:
    draft_student: DraftStudent = request.param(make_target())
    return draft_student


@pytest.fixture
def versions(tmp_path: Path, student: DraftStudent) -> Versions:
    base_versions = Versions(tmp_path / "deep" / "drafter")
    base_versions.adopt_base(student.shape, parameters(student), student.borrowed)
    return base_versions


def parameters(student: DraftStudent) -> dict[str, Tensor]:
    return {name: part.detach() for name, part in student.named_parameters()}


def moved(student: DraftStudent) -> dict[str, Tensor]:
    return {name: part + 1 for name, part in parameters(student).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_engine_and_trainer_never_take_one_number(versions: Versions, student: DraftStudent):
    with ThreadPoolExecutor(4) as pool:
        publications = [pool.submit(Versions(versions.folder).publish, moved(student), ORIGIN)]
        publications += [
            pool.submit(Versions(versions.folder).publish, parameters(student), ORIGIN)
            for _ in range(7)
        ]
        numbers = sorted(one.result() for one in publications)
    assert numbers == versions.version_numbers() == list(range(1, 9))
    like = parameters(student)
    assert (
        sum(same(versions.load_parameters(number, like), moved(student)) for number in numbers) == 1
    )
    # A writer that was killed has left its claim.
    (versions.folder / "00000009.claim").touch()
    assert versions.publish(moved(student), ORIGIN) == 10


def test_base_and_versions_come_back_as_students(versions: Versions, student: DraftStudent):
    assert versions.publish(moved(student), ORIGIN) == 1
    assert versions.publish(parameters(student), ORIGIN) == 2
    base, first = versions.load_student(0), versions.load_student(1)
    assert same(parameters(base), parameters(student))
    assert torch.equal(base.embedding, student.embedding)
    assert same(parameters(first), moved(student))
    assert versions.read_origin(1) == ORIGIN
    assert versions.version_numbers() == [1, 2]
    assert same(versions.load_parameters(1, parameters(student)), moved(student))


def test_a_head_that_is_not_the_embedding_comes_back_too(tmp_path: Path):
    target = make_target()
    like = make_block_student(target)
    student = DFlashStudent(like.shape, like.embedding, head=like.embedding + 1)
    versions = Versions(tmp_path)
    versions.adopt_base(student.shape, parameters(student), student.borrowed)
    versions.publish(moved(student), ORIGIN)
    for version in (0, 1):
        published_student = versions.load_student(version)
        assert isinstance(published_student, DFlashStudent)
        assert published_student.shape == student.shape
        assert published_student.head is not None
        assert torch.equal(published_student.head, like.embedding + 1)
        assert torch.equal(published_student.embedding, like.embedding)


def test_an_engine_that_starts_again_finds_its_folder_its_own(
    versions: Versions, student: DraftStudent
):
    again = versions.adopt_base(student.shape, parameters(student), student.borrowed)
    assert again == versions.base_digest() == digest_parameters(parameters(student))


def test_a_folder_of_another_drafter_is_refused(versions: Versions, student: DraftStudent):
    with pytest.raises(VersionError, match="another drafter"):
        versions.adopt_base(student.shape, moved(student), student.borrowed)


def a_matrix(weights: dict[str, Tensor]) -> str:
    return next(name for name in weights if name.endswith(("fc.weight", "input_proj.weight")))


def without_one(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part for name, part in weights.items() if name != a_matrix(weights)}


def with_a_shape(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {a_matrix(weights): weights[a_matrix(weights)][:-1]}


def with_another(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return weights | {"model.extra": torch.zeros(3)}


def with_nan(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    broken = weights[a_matrix(weights)].clone()
    broken[0, 0] = float("nan")
    return weights | {a_matrix(weights): broken}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_one, "weight is missing"),
        (with_a_shape, "weight is \\("),
        (with_another, "model.extra is"),
        (with_nan, "NaN or infinite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    versions: Versions,
    student: DraftStudent,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    reason: str,
):
    versions.publish(change(parameters(student)), ORIGIN)
    with pytest.raises(VersionError, match=reason):
        versions.load_parameters(1, parameters(student))


@pytest.mark.parametrize(
    "kind",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int8, torch.complex64],
    ids=str,
)
def test_values_that_are_no_plain_floats_are_refused_by_name(
    versions: Versions, student: DraftStudent, kind: torch.dtype
):
    weights = parameters(student)
    name = a_matrix(weights)
    versions.publish(weights | {name: weights[name].to(kind)}, ORIGIN)
    for read in (lambda: versions.load_parameters(1, weights), lambda: versions.load_student(1)):
        with pytest.raises(VersionError, match=f"{name} is of {kind}"):
            read()


def test_a_version_of_another_base_is_refused(
    tmp_path: Path, versions: Versions, student: DraftStudent
):
    elsewhere = Versions(tmp_path / "other")
    elsewhere.adopt_base(student.shape, moved(student), student.borrowed)
    elsewhere.publish(parameters(student), ORIGIN)
    (elsewhere.folder / "00000001.safetensors").rename(versions.folder / "00000001.safetensors")
    with pytest.raises(VersionError, match="made for another drafter"):
        versions.load_parameters(1, parameters(student))


@pytest.mark.parametrize("name", ["base", "00000001"])
@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:100], lambda _: b"", lambda content: b"\xff" * 32 + content[32:]],
    ids=["cut", "empty", "garbage"],
)
def test_a_damaged_file_is_named(
    versions: Versions, student: DraftStudent, name: str, damage: Callable[[bytes], bytes]
):
    versions.publish(moved(student), ORIGIN)
    path = versions.folder / f"{name}.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(VersionError, match=name):
        versions.load_student(1)


def test_what_is_not_there_is_said(versions: Versions, student: DraftStudent):
    with pytest.raises(VersionError, match=r"00000003\.safetensors does not exist$"):
        versions.load_parameters(3, parameters(student))
    versions.publish(moved(student), ORIGIN)
    (versions.folder / "base.safetensors").unlink()
    with pytest.raises(VersionError, match="no engine has stored its drafter there"):
        versions.load_parameters(1, parameters(student))


def test_a_disk_that_is_full_leaves_nothing(
    versions: Versions, student: DraftStudent, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine_shim.sglang.training.versions.os.fsync", full)
    with pytest.raises(OSError, match="space"):
        versions.publish(moved(student), ORIGIN)
    assert [path.name for path in versions.folder.iterdir()] == ["base.safetensors"]


def test_old_versions_go_but_never_one_that_is_needed(versions: Versions, student: DraftStudent):
    for _ in range(6):
        versions.publish(moved(student), ORIGIN)
    versions.delete_old({2}, max_versions=2)
    assert versions.version_numbers() == [2, 5, 6]
    assert versions.publish(moved(student), ORIGIN) == 7


def test_what_a_killed_writer_has_left_goes_after_a_day(versions: Versions):
    left, written = (versions.folder / f"0000000{number}.17.part" for number in (1, 2))
    for part in (left, written):
        part.touch()
    long_ago = time.time() - 100_000
    os.utime(left, (long_ago, long_ago))
    versions.delete_old(set())
    assert not left.exists()
    assert written.exists()


def test_two_trainers_do_not_work_in_one_folder(versions: Versions):
    # The lock is the open file's: another one is refused, in whichever process it was opened.  A
    # fork of this process would hang if a thread of gRPC were at work meanwhile.
    with versions.lock(), pytest.raises(FolderTakenError, match="another trainer"):
        Versions(versions.folder).lock()
    Versions(versions.folder).lock().close()
