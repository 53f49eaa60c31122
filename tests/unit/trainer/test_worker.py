"""A round of the trainer: what it makes of what lies in its folder, whatever that is."""

import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest
import torch

from engine_shim.link.credentials import EngineCredentials
from engine_shim.sglang.training.signals import SignalStore
from engine_shim.sglang.training.students import DraftStudent
from engine_shim.sglang.training.versions import FOLDER_NAME, VersionOrigin, Versions
from speculation.v1.training_pb2 import AttendResponse, TrainingRound
from tests.support.hostile_sidecar import hostile_sidecar
from tests.support.training_rounds import make_signal, make_student, make_target
from trainer.adapt import AdaptSettings
from trainer.worker import NoEngineError, TrainedEngine, TrainingWorker, _find_only_engine

SETTINGS = AdaptSettings(passes=8, batch=4)


class Place:
    """A folder as an engine leaves it, and a trainer that looks into it."""

    def __init__(self, folder: Path) -> None:
        self.target = make_target()
        self.student = make_student(self.target)
        self.folder = folder
        self.versions = Versions(folder / FOLDER_NAME)
        self.versions.adopt_base(
            self.student.shape, self.parameters(self.student), self.student.borrowed
        )
        self.store = SignalStore(folder, 1 << 30)
        self.attendant = TrainingWorker(
            TrainedEngine("unused", "e", folder, EngineCredentials()), SETTINGS
        )

    @staticmethod
    def parameters(student: DraftStudent) -> dict[str, torch.Tensor]:
        return {name: part.detach() for name, part in student.named_parameters()}

    def fill(self, count: int = 20) -> None:
        for seed in range(count):
            self.store.add(make_signal(self.target, seed))

    def round(self, version: int = 0) -> tuple[list[Path], TrainingRound]:
        order = AttendResponse(train_round=4, draft_version=version)
        return self.attendant._run_round(order)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_round_makes_a_version_and_says_how_good_it_is(place: Place):
    place.fill()
    used, ended = place.round()
    assert len(used) == 20
    assert (ended.round, ended.version, ended.error) == (4, 1, "")
    # As the signals say that they were served.
    assert ended.alpha_train == pytest.approx(0.5)
    assert ended.alpha_eval > ended.alpha_before
    new_version = place.versions.read_origin(1)
    assert (new_version.parent, new_version.signals, new_version.alpha_eval) == (
        0,
        16,
        ended.alpha_eval,
    )


def test_it_goes_on_from_the_version_that_serves(place: Place):
    place.fill()
    first = place.round()[1]
    second = place.round(first.version)[1]
    assert second.alpha_before == pytest.approx(first.alpha_eval)
    assert place.versions.read_origin(2).parent == 1


def test_an_imported_version_contends(place: Place):
    place.fill()
    best = place.round()[1].version
    better = place.versions.load_student(best)
    place.versions.publish(place.parameters(better), VersionOrigin(0, 0.0, 0.0, 0.0, 0, 0.0))
    place.attendant._settings = AdaptSettings(passes=1, batch=20, learning_rate=1e-6)
    ended = place.round()[1]
    # What a weak round has made from the base is not as good as what was imported.
    assert ended.version == 2
    assert ended.alpha_eval > ended.alpha_before
    # Once it serves, it no longer contends.
    assert list(place.attendant._imported_versions(2)) == []


def test_an_imported_version_that_is_damaged_is_passed_over(place: Place):
    place.fill(8)
    (place.folder / FOLDER_NAME / "00000005.safetensors").write_bytes(b"\0" * 40)
    ended = place.round()[1]
    assert (ended.version, ended.error) == (6, "")


def test_what_cannot_be_read_is_passed_over(place: Place):
    place.fill(12)
    (place.folder / "0-damaged.safetensors").write_bytes(b"\0" * 50)
    broken = make_signal(place.target, 99)
    broken.features[3] = float("inf")
    place.store.add(broken)
    used, ended = place.round()
    assert (len(used), ended.version) == (14, 1)
    assert place.versions.read_origin(1).signals == 10


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_signals_end_the_round_without_a_version(place: Place, count: int):
    place.fill(count)
    ended = place.round()[1]
    assert ended.version == 0
    assert "cannot be split" in ended.error


def test_a_base_that_is_damaged_ends_the_round_without_a_version(place: Place):
    place.fill(4)
    (place.folder / FOLDER_NAME / "base.safetensors").write_bytes(b"\0" * 20)
    ended = place.round()[1]
    assert ended.version == 0
    assert "base.safetensors" in ended.error
    assert place.versions.version_numbers() == []


def test_training_that_comes_to_no_numbers_makes_no_version(place: Place):
    place.fill(8)
    for path in place.store.paths():
        path.unlink()
    for seed in range(8):
        poisoned = make_signal(place.target, seed)
        # What a signal may hold, but nothing of which comes a number.
        poisoned.top_logs.fill_(torch.finfo(torch.float32).max)
        place.store.add(poisoned)
    ended = place.round()[1]
    assert "NotFiniteError" in ended.error
    assert place.versions.version_numbers() == []


async def test_a_list_of_engines_without_an_end_is_given_up():
    with hostile_sidecar(lambda number: (str(number), 0)) as sidecar:
        async with grpc.aio.insecure_channel(sidecar.address) as channel:
            with pytest.raises(NoEngineError, match="more than 100 pages"):
                await _find_only_engine(channel, ())
        assert sidecar.pages == 100


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_command_line_exports_and_imports(place: Place, tmp_path: Path):
    signals = ("--signals", str(place.folder))
    refused = command("export", str(tmp_path / "out"), "--target", "t", *signals)
    assert refused.returncode == 2
    assert "the drafter reads 2 target layers" in refused.stdout
    refused = command("import", str(tmp_path / "nothing"), *signals)
    assert refused.returncode == 2
    lock = place.versions.lock()
    taken = command("attend", "--sidecar", "unix:nowhere", *signals)
    assert taken.returncode == 3
    lock.close()
    assert command("attend", *signals).returncode == 2
