"""A version goes into service on all ranks in one step, or on none of them."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_shim.sglang.learning import deployment
from engine_shim.sglang.learning.deployment import Deployment
from engine_shim.sglang.learning.student import DrafterWeights, LiveDrafter
from engine_shim.sglang.training.versions import FOLDER_NAME, VersionOrigin, Versions
from tests.support.eventually import eventually
from tests.support.rank_pair import RankPair
from tests.support.training_rounds import make_student, make_target

ORIGIN = VersionOrigin(0, 0.3, 0.6, 0.4, 50, 1.0)
Load = Callable[[Versions, int, Any], Any]


class TwoRanks:
    """Two ranks and a trainer's folder."""

    def __init__(self, folder: Path) -> None:
        student = make_student(make_target())
        self.first = {name: part.detach().clone() for name, part in student.named_parameters()}
        self.pair = RankPair()
        whole = LiveDrafter(student.shape, self.first, student.borrowed, 64)
        self.live = self.pair.split_drafter(whole)
        self.deployments = [
            Deployment(folder, live, orders)
            for live, orders in zip(self.live, self.pair.orders, strict=True)
        ]
        self.versions = Versions(folder / FOLDER_NAME)

    @property
    def state(self) -> str:
        return self.deployments[0].counters.state

    def publish(self, offset: float) -> int:
        return self.versions.publish({n: p + offset for n, p in self.first.items()}, ORIGIN)

    def serves(self) -> list[float]:
        """By how much each rank's weights differ from the first ones."""
        offsets = []
        for live in self.live:
            shares = live.shares
            moved = [shares.live[n] - part for n, part in shares.select_share(self.first).items()]
            low, high = min(float(p.min()) for p in moved), max(float(p.max()) for p in moved)
            assert high - low < 1e-5, "a rank serves parts of two versions"
            offsets.append(round(high, 3))
        return offsets

    def step(self, wanted: int) -> bool:
        has_changed = self.deployments[0].before_step(wanted)
        self.pair.step()
        return has_changed

    def await_condition(self, wanted: int, what: Callable[[], bool]) -> None:
        def done() -> bool:
            self.step(wanted)
            time.sleep(0.002)
            return what()

        eventually(done)


@pytest.fixture
def engine(tmp_path: Path) -> TwoRanks:
    return TwoRanks(tmp_path / "signals")


def on_rank_1(
    monkeypatch: pytest.MonkeyPatch, engine: TwoRanks, instead: Callable[[], None]
) -> None:
    """Rank 1 calls this before it reads a version."""
    load, own = Versions.load_parameters, engine.deployments[1]._versions

    def loaded(self: Versions, version: int, like: Any) -> Any:
        if self is own:
            instead()
        return load(self, version, like)

    monkeypatch.setattr(Versions, "load_parameters", loaded)


def test_each_rank_gets_its_share_in_the_same_step(engine: TwoRanks) -> None:
    number = engine.publish(1)
    engine.await_condition(number, lambda: engine.deployments[0].counters.version == number)
    assert engine.serves() == [1, 1]
    assert engine.step(number)
    assert not engine.step(number)
    engine.await_condition(0, lambda: engine.deployments[0].counters.version == 0)
    assert engine.serves() == [0, 0]


def test_none_switches_before_the_last_has_read_it(
    engine: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_ASK_PEERS_SECONDS", 0.0)
    may_read, asked = threading.Event(), 0
    on_rank_1(monkeypatch, engine, lambda: (may_read.wait(120), None)[1])
    number = engine.publish(1)

    def was_asked() -> bool:
        nonlocal asked
        reading = engine.deployments[0]._read_task
        asked += reading is not None and reading.is_done
        return asked > 5

    engine.await_condition(number, was_asked)
    assert engine.serves() == [0, 0]
    may_read.set()
    engine.await_condition(number, lambda: engine.serves() == [1, 1])


def test_none_switches_where_one_cannot_read_it(
    engine: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError("the folder is not mounted")

    on_rank_1(monkeypatch, engine, fails)
    number = engine.publish(1)
    engine.await_condition(number, lambda: engine.state != "ready")
    assert engine.state == f"version {number} cannot be used: rank 1: the folder is not mounted"
    assert engine.serves() == [0, 0]
    engine.await_condition(0, lambda: engine.state == "ready")
    assert engine.serves() == [0, 0]


def test_where_one_cannot_write_it_all_go_back(
    engine: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, own = DrafterWeights.serve, engine.deployments[1]._weights
    fails = [True]

    def serve_or_fail(self: DrafterWeights, weights: dict[str, torch.Tensor]) -> None:
        if self is own and fails.pop():
            raise MemoryError("no room")
        serve(self, weights)

    number = engine.publish(1)
    monkeypatch.setattr(DrafterWeights, "serve", serve_or_fail)
    fails[:] = [False, True]
    with pytest.raises(RuntimeError, match="rank 1: MemoryError: no room"):
        engine.await_condition(number, lambda: False)
    assert engine.serves() == [0, 0]
    assert engine.deployments[0].counters.version == 0


def test_once_stopped_nothing_is_served(engine: TwoRanks) -> None:
    number = engine.publish(1)
    engine.await_condition(number, lambda: engine.deployments[0]._read_task is not None)
    eventually(lambda: (r := engine.deployments[0]._read_task) is not None and r.is_done)
    engine.deployments[0].before_step(number)
    engine.deployments[0].stop("out of memory")
    for _ in range(5):
        engine.step(number)
    assert engine.serves() == [0, 0]
