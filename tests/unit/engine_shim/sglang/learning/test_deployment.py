"""A version of the drafter goes into service between two steps, or does not, and says why."""

import threading
from pathlib import Path

import pytest
import torch

from engine_shim.sglang.learning import deployment
from engine_shim.sglang.learning.deployment import Deployment, DeploymentCounters
from engine_shim.sglang.learning.student import DrafterWeights, LiveDrafter
from engine_shim.sglang.training.versions import FOLDER_NAME, VersionError, VersionOrigin, Versions
from tests.support.eventually import eventually
from tests.support.training_rounds import make_student, make_target

ORIGIN = VersionOrigin(0, 0.3, 0.6, 0.4, 50, 1.0)


class Serving:
    """The parameters of a serving drafter, steps, and a trainer's folder."""

    def __init__(self, folder: Path) -> None:
        student = make_student(make_target())
        parameters = {name: part.detach() for name, part in student.named_parameters()}
        # The parameter's first values, as the engine's copy of it has them.
        self.copied: list[float] = []
        name = next(iter(parameters))

        def refresh() -> None:
            self.copied.append(float(parameters[name].flatten()[0]))

        self.live = LiveDrafter(student.shape, parameters, student.borrowed, 64, refresh=refresh)
        self.first = {name: part.clone() for name, part in parameters.items()}
        self.deployment = Deployment(folder, self.live)
        self.versions = Versions(folder / FOLDER_NAME)

    def moved(self, offset: float) -> dict[str, torch.Tensor]:
        return {name: part + offset for name, part in self.first.items()}

    def serves(self, offset: float) -> bool:
        wanted = self.moved(offset)
        return all(torch.equal(part, wanted[name]) for name, part in self.live.parameters.items())

    def steps(self, wanted: int | None, count: int = 50) -> int:
        """How many of them found other weights than the one before."""
        changes = 0
        for _ in range(count):
            changes += self.deployment.before_step(wanted)
            self.finish()
        return changes

    def finish(self) -> None:
        """Waits, as no engine does, until what is read or stored on a thread is."""
        for work in (self.deployment._read_task, self.deployment._learnt._store_task):
            if work is not None:
                work._thread.join()


class Learner:
    """Stands for online updates whose trainer process has made other weights."""

    def __init__(self, engine: Serving, offset: float) -> None:
        self.weights = DrafterWeights(engine.live.parameters)
        self.weights.serve(engine.moved(offset))
        self.judged = True

    @property
    def can_be_stored(self) -> bool:
        return self.has_learnt and self.judged

    @property
    def has_learnt(self) -> bool:
        return self.weights.is_changed

    def learnt_weights(self) -> dict[str, torch.Tensor]:
        self.copied = self.weights.copy()
        return self.copied

    def mark_stored(self) -> bool:
        serving = self.weights.copy()
        if any(not torch.equal(part, serving[name]) for name, part in self.copied.items()):
            return False
        self.weights.adopt_served()
        return True

    def step(self, engine: Serving, wanted: int, *, collecting: bool) -> bool:
        has_changed = engine.deployment.before_step(wanted)
        engine.deployment.store_learnt(self, collecting=collecting)  # type: ignore[arg-type]
        return has_changed

    def steps(self, engine: Serving, wanted: int, *, collecting: bool, count: int = 50) -> int:
        changes = 0
        for _ in range(count):
            changes += self.step(engine, wanted, collecting=collecting)
            engine.finish()
        return changes


@pytest.fixture
def engine(tmp_path: Path) -> Serving:
    return Serving(tmp_path / "drafter")


def test_a_version_is_served_once_it_is_read_and_the_first_again(engine: Serving):
    engine.versions.publish(engine.moved(1), ORIGIN)
    engine.versions.publish(engine.moved(2), ORIGIN)
    places = {name: part.data_ptr() for name, part in engine.live.parameters.items()}
    assert engine.steps(None) == engine.steps(0) == 0
    assert engine.steps(2) == 1
    assert engine.serves(2)
    assert engine.steps(1) == 1
    assert engine.serves(1)
    assert engine.steps(0) == 1
    assert engine.serves(0)
    # A graph still reads the same memory.
    assert places == {name: part.data_ptr() for name, part in engine.live.parameters.items()}
    assert engine.deployment.counters == DeploymentCounters(0, 3, "ready")


def test_what_was_learnt_becomes_a_version_once_signals_are_collected(engine: Serving):
    learner, counters = Learner(engine, 1), engine.deployment.counters
    learner.steps(engine, 0, collecting=False)
    assert (counters.version, counters.learnt_from, engine.versions.version_numbers()) == (0, 0, [])
    assert learner.steps(engine, 0, collecting=True) == 0
    # The plan does not name it yet, and the weights stay.
    assert (counters.version, counters.learnt_from, engine.versions.version_numbers()) == (
        1,
        0,
        [1],
    )
    assert engine.serves(1)
    assert learner.steps(engine, 1, collecting=True) == 0
    assert (counters.version, counters.learnt_from) == (1, None)
    loaded_parameters = engine.versions.load_parameters(1, engine.first)
    assert all(torch.equal(part, loaded_parameters[name]) for name, part in engine.moved(1).items())
    # From now on, a plan that names the first version means it.
    assert learner.steps(engine, 0, collecting=True) == 1
    assert engine.serves(0)


def test_what_was_learnt_does_not_fill_the_disk(engine: Serving):
    """No trainer deletes anything, and the first version, which the plan left, may come back."""
    learner, counters = Learner(engine, 1), engine.deployment.counters
    for offset in (1.0, 2.0):
        engine.versions.publish(engine.moved(offset), ORIGIN)
    engine.steps(1)
    engine.steps(2)
    for count in range(12):
        learner.weights.serve(engine.moved(3 + count))
        # One begins to store them, and the next finds that they are.
        learner.steps(engine, counters.version, collecting=True, count=2)
        assert counters.version == 3 + count
    # Those that are needed, the newest eight before the last one was stored, and that.
    assert engine.versions.version_numbers() == [1, *range(6, 15)]
    assert engine.serves(14)
    engine.steps(1)
    assert engine.serves(1)


def test_weights_that_changed_while_they_were_stored_are_stored_again(engine: Serving):
    learner = Learner(engine, 1)
    learner.step(engine, 0, collecting=True)
    learner.weights.serve(engine.moved(2))
    learner.steps(engine, 0, collecting=True)
    assert engine.deployment.counters.version == 2
    assert engine.serves(2)
    # And those that were learnt later, while the plan still names the first version.
    learner.weights.serve(engine.moved(3))
    learner.steps(engine, 0, collecting=True)
    assert engine.deployment.counters == DeploymentCounters(3, 0, "ready", 0)
    assert engine.serves(3)


def test_what_is_not_judged_yet_is_not_stored(engine: Serving):
    learner = Learner(engine, 1)
    learner.judged = False
    learner.steps(engine, 0, collecting=True)
    assert engine.versions.version_numbers() == []
    assert engine.deployment.counters.learnt_from == 0


def test_what_cannot_be_stored_is_said_and_serves_on(engine: Serving, monkeypatch):
    monkeypatch.setattr(deployment, "_RETRY_SECONDS", 0.0)
    learner, base = Learner(engine, 1), engine.versions.folder / "base.safetensors"
    aside = base.rename(base.with_name("aside"))
    learner.steps(engine, 0, collecting=True)
    counters = engine.deployment.counters
    assert counters.state.startswith("what was learnt cannot be stored: VersionError")
    assert (counters.version, counters.learnt_from) == (0, 0)
    assert engine.serves(1)
    aside.rename(base)
    learner.steps(engine, 0, collecting=True)
    assert counters.version == 1


def test_without_a_thread_nothing_is_stored_and_all_serves_on(engine: Serving, monkeypatch):
    monkeypatch.setattr(deployment, "_RETRY_SECONDS", 0.0)
    learner, counters = Learner(engine, 1), engine.deployment.counters

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_thread)
        for _ in range(4):
            learner.step(engine, 0, collecting=True)
    assert counters.state.startswith("what was learnt cannot be stored: RuntimeError")
    assert engine.serves(1)
    learner.steps(engine, 0, collecting=True)
    assert counters.version == 1


def test_what_the_engine_has_made_of_the_weights_is_made_anew(engine: Serving):
    engine.versions.publish(engine.moved(1), ORIGIN)
    engine.steps(1)
    engine.steps(0)
    first = float(next(iter(engine.first.values())).flatten()[0])
    assert engine.copied == pytest.approx([first + 1, first])


def test_without_a_plan_what_serves_goes_on(engine: Serving):
    engine.versions.publish(engine.moved(1), ORIGIN)
    engine.steps(1)
    assert engine.steps(None) == 0
    assert engine.serves(1)


def test_a_plan_that_changes_its_mind_is_followed(engine: Serving):
    for offset in (1, 2):
        engine.versions.publish(engine.moved(offset), ORIGIN)
    engine.deployment.before_step(1)
    engine.deployment.before_step(2)
    assert engine.steps(2) == 1
    assert engine.serves(2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors | {"lm_head.weight": torch.zeros(3)}, "lm_head.weight"),
        (
            lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"] * torch.nan},
            "contains NaN",
        ),
    ],
)
def test_what_cannot_be_used_is_said_and_what_serves_goes_on(engine: Serving, spoil, message):
    engine.versions.publish(engine.moved(1), ORIGIN)
    engine.versions.publish(spoil(engine.moved(2)), ORIGIN)
    engine.steps(1)
    assert engine.steps(2) == 0
    assert engine.serves(1)
    state = engine.deployment.counters.state
    assert state.startswith("version 2 cannot be used")
    assert message in state
    # And the next plan is followed again.
    assert engine.steps(0) == 1
    assert engine.deployment.counters.state == "ready"


def test_once_stopped_what_serves_goes_on_and_is_named(engine: Serving):
    for offset in (1, 2):
        engine.versions.publish(engine.moved(offset), ORIGIN)
    engine.steps(1)
    engine.deployment.stop("out of memory")
    assert engine.steps(2) == engine.steps(0) == 0
    assert engine.serves(1)
    assert engine.deployment.counters == DeploymentCounters(1, 1, "out of memory")


def test_an_error_that_nobody_thought_of_is_said(engine: Serving, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Versions, "load_parameters", fails)
    assert engine.steps(1) == 0
    assert "MemoryError: no room" in engine.deployment.counters.state
    # And a plan that goes back to what serves ends the matter.
    assert engine.steps(0) == 0
    assert engine.deployment.counters.state == "ready"


def test_a_version_that_comes_late_is_taken_up(engine: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deployment, "_RETRY_SECONDS", 0.05)
    assert engine.steps(1) == 0
    assert "does not exist" in engine.deployment.counters.state
    engine.versions.publish(engine.moved(1), ORIGIN)
    eventually(lambda: engine.steps(1, count=1))
    assert engine.serves(1)


def test_an_engine_that_starts_again_serves_the_plan_s_version(engine: Serving, tmp_path: Path):
    engine.versions.publish(engine.moved(1), ORIGIN)
    again = Serving(tmp_path / "drafter")
    assert again.steps(1) == 1
    assert again.serves(1)


def test_a_folder_of_another_drafter_is_refused(engine: Serving, tmp_path: Path):
    for part in engine.live.parameters.values():
        part.add_(1)
    with pytest.raises(VersionError, match="another drafter"):
        Deployment(tmp_path / "drafter", engine.live)
