"""Online updates of a drafter that two ranks share: both change in the same step, or neither."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.link.rank_commands import RankCommandKind
from engine_shim.sglang.api.settings import load_settings
from engine_shim.sglang.learning import trainer_process
from engine_shim.sglang.learning.online_updates import OnlineUpdates
from engine_shim.sglang.learning.online_weights import OnlineWeights
from engine_shim.sglang.learning.student import DrafterWeights, LiveDrafter
from engine_shim.sglang.training import trainer
from engine_shim.sglang.training.exchange import Channel, SharedTensors
from tests.support.rank_pair import HEAD, RankPair
from tests.unit.engine_shim.sglang.learning.test_online_updates import GAMMA, Driver


def trained_by_a_thread(order: str, memory: SharedTensors) -> tuple[Any, Channel]:
    """Runs the trainer in this process, which takes seconds less than a process of its own."""
    ours, theirs = Channel.make_pair()
    hangs_up = theirs.dup()
    arguments = os.dup(memory.fd), theirs.detach(), order
    threading.Thread(target=trainer.main, args=arguments, daemon=True).start()

    def kill() -> None:
        with suppress(OSError), hangs_up:
            hangs_up.shutdown(socket.SHUT_RDWR)

    return SimpleNamespace(kill=kill, wait=lambda: None, poll=lambda: -9), Channel(ours)


@pytest.fixture(autouse=True)
def _quick_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_process, "_start_trainer", trained_by_a_thread)
    monkeypatch.setattr("os.nice", lambda _: 0)


class RankDriver(Driver):
    """The same steps on both ranks; what rank 0 learns goes to both."""

    def make_updates(self, drafter: LiveDrafter) -> OnlineUpdates:
        self.pair = RankPair()
        self.ranks = self.pair.split_drafter(drafter)
        per_request = load_settings().online_scope == "request"
        self.follower = OnlineWeights(self.ranks[1], per_request=per_request)
        self.follower.register_commands(self.pair.orders[1])
        self.loaded = self.weights()
        return OnlineUpdates(self.ranks[0], load_settings(), GAMMA, self.pair.orders[0])

    def between_steps(self) -> None:
        self.pair.step()

    def request(self, rid: str) -> None:
        self._rid, self._length = rid, 10
        begins = [self.online.before_prefill, self.follower.start_prefill]
        self.pair.run_on_both(lambda rank: begins[rank]([rid]))

    def weights(self) -> torch.Tensor:
        """Those of both ranks together; what both hold is alike."""
        first, second = (rank.shares.live for rank in self.ranks)
        for name, part in first.items():
            assert name == HEAD or torch.equal(part, second[name]), name
        parts = [*first.values(), second[HEAD]]
        return torch.cat([part.flatten() for part in parts])

    def halve_weights(self, rank: int) -> None:
        """Another writer gives this rank other weights."""
        for part in self.ranks[rank].shares.live.values():
            part.mul_(0.5)

    def new_target(self, rank: int) -> None:
        """A writer gives this rank's share of the target other weights."""
        self.ranks[rank].shares.borrowed[0].rank_tensor.mul_(0.9)

    def whole(self) -> torch.Tensor:
        """The weights of both ranks, in the order of the whole drafter's."""
        first, second = (rank.shares.live for rank in self.ranks)
        joined = dict(first)
        joined[HEAD] = torch.cat([first[HEAD], second[HEAD]])
        return torch.cat([part.flatten() for part in joined.values()])

    def trainers(self) -> torch.Tensor:
        """What the trainer has made, or was told."""
        trainer_weights: dict[str, torch.Tensor] = self.online._trainer.weights
        half = len(trainer_weights[HEAD]) // 2
        cut = trainer_weights | {HEAD: trainer_weights[HEAD][:half]}
        return torch.cat([part.flatten() for part in [*cut.values(), trainer_weights[HEAD][half:]]])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankDriver]:
    fresh_driver = RankDriver(monkeypatch, LEARNING_RATE="0.01")
    fresh_driver.request("first")
    yield fresh_driver
    fresh_driver.online.close()


def test_both_serve_what_the_trainer_has_made(driver: RankDriver) -> None:
    before = driver.weights()
    driver.await_condition(lambda: driver.counters.updates > 0)
    assert not torch.equal(driver.weights(), before)
    # Without a stride nothing more is learnt, and what was learnt lands a step later.
    driver.await_condition(lambda: not driver.update_status[-1].updating, stride=0)
    driver.step(accepted=2, stride=0)
    assert torch.equal(driver.weights(), driver.trainers())


def test_a_fall_takes_both_back(driver: RankDriver) -> None:
    before = driver.weights()
    driver.await_condition(lambda: driver.counters.updates > 0)
    driver.await_condition(lambda: driver.counters.restored == 1, accepted=1)
    assert torch.equal(driver.weights(), before)
    # The trainer continues from there, and what is good then is good on both.
    driver.request("second")
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates + 2)
    assert (driver.weights() - before).abs().max() > 0


def test_the_last_good_weights_stay_when_the_trainer_has_gone(driver: RankDriver) -> None:
    before = driver.weights()
    driver.await_condition(lambda: driver.counters.updates > 0)
    driver.online._trainer.process.kill()
    driver.await_condition(lambda: "has ended" in driver.counters.state, stride=0)
    driver.step(accepted=2)
    assert torch.equal(driver.weights(), before)
    driver.request("second")
    driver.step(accepted=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_somebody_else_has_given_one_rank_stay_on_both(
    driver: RankDriver, rank: int
) -> None:
    """As where a weight update changes rows that one rank alone holds."""
    driver.await_condition(lambda: driver.counters.updates > 2)
    driver.halve_weights(rank)
    driver.await_condition(lambda: driver.counters.replaced == 1)
    held = driver.ranks[rank].shares.live[HEAD].clone()
    # The trainer was told, and has gone on from the weights of both: by AdamW's steps, of 0.01.
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates)
    now, steps = driver.ranks[rank].shares.live[HEAD], driver.counters.updates - updates
    assert 0 < (now - held).abs().max() < 0.011 * steps
    driver.weights()
    assert driver.counters.replaced == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_target_that_one_rank_was_given_is_the_trainers(driver: RankDriver, rank: int) -> None:
    """As where a weight update changes rows of its embedding that one rank alone holds."""
    driver.await_condition(lambda: driver.counters.updates > 2)
    learnt = driver.weights()
    driver.new_target(rank)
    driver.await_condition(lambda: driver.counters.replaced == 1)
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates)
    halves = [one.shares.borrowed[0].rank_tensor for one in driver.ranks]
    assert torch.equal(driver.online._trainer.tensors["borrowed:embedding"], torch.cat(halves))
    assert driver.counters.replaced == 1
    # What was learnt with the other target is where this one begins, and what a fall goes back to.
    driver.await_condition(lambda: driver.counters.restored == 1, accepted=1)
    assert driver.online.has_learnt
    assert driver.follower.has_changed
    now = driver.weights()
    assert (now - learnt).abs().max() < 0.05
    assert not torch.equal(now, driver.loaded)


def test_after_a_new_target_each_request_still_begins_with_the_first_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = RankDriver(monkeypatch, SCOPE="request", LEARNING_RATE="0.01")
    try:
        driver.request("first")
        driver.await_condition(lambda: driver.counters.updates > 1)
        driver.new_target(1)
        driver.await_condition(lambda: driver.counters.replaced == 1)
        assert torch.equal(driver.weights(), driver.loaded)
        updates = driver.counters.updates
        driver.await_condition(lambda: driver.counters.updates > updates)
        assert not torch.equal(driver.weights(), driver.loaded)
        driver.request("second")
        assert torch.equal(driver.weights(), driver.loaded)
    finally:
        driver.online.close()


def test_each_request_begins_with_the_first_weights_on_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = RankDriver(monkeypatch, SCOPE="request", LEARNING_RATE="0.01")
    try:
        before = driver.weights()
        driver.request("first")
        driver.await_condition(lambda: driver.counters.updates > 1)
        assert not torch.equal(driver.weights(), before)
        driver.request("second")
        assert torch.equal(driver.weights(), before)
        assert driver.counters.resets == 1
        # What the trainer has still learnt of the first request is not served.
        updates = driver.counters.updates
        for _ in range(3):
            driver.step(accepted=2, stride=0)
        assert (driver.counters.updates > updates) or torch.equal(driver.weights(), before)
        driver.await_condition(lambda: driver.counters.updates > updates + 1)
    finally:
        driver.online.close()


def test_an_update_that_a_reset_has_overtaken_is_served_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = RankDriver(monkeypatch, SCOPE="request", LEARNING_RATE="0.01")
    try:
        before = driver.weights()
        driver.request("first")
        driver.await_condition(lambda: driver.counters.updates > 1)
        # Ordered before the next request begins, and carried out after it.
        driver.pair.orders[0].propose(RankCommandKind.LAND, driver.online._weights.generation)
        driver.request("second")
        driver.pair.step()
        assert torch.equal(driver.weights(), before)
    finally:
        driver.online.close()


def test_a_rank_that_cannot_write_ends_learning_on_both(
    driver: RankDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = driver.weights()
    serve, own = DrafterWeights.serve, driver.follower._weights
    fails = [True]

    def serve_or_fail(self: DrafterWeights, weights: Any) -> None:
        if self is own and fails:
            fails.clear()
            raise MemoryError("no room")
        serve(self, weights)

    monkeypatch.setattr(DrafterWeights, "serve", serve_or_fail)
    driver.await_condition(lambda: driver.online.end_reason != "")
    driver.step(accepted=2)
    assert driver.online.end_reason == "RankFailedError: rank 1: MemoryError: no room"
    assert torch.equal(driver.weights(), before)


def test_weights_that_were_stored_are_those_to_begin_from_on_both(driver: RankDriver) -> None:
    def rest() -> None:
        driver.await_condition(lambda: driver.online.can_be_stored, stride=0)

    driver.await_condition(lambda: driver.counters.updates > 1)
    rest()
    stored = driver.online.learnt_weights()
    assert torch.equal(torch.cat([part.flatten() for part in stored.values()]), driver.whole())
    # Others have landed meanwhile: those were not stored.
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates)
    rest()
    assert not driver.online.mark_stored()
    driver.online.learnt_weights()
    now = driver.weights()
    assert driver.online.mark_stored()
    driver.between_steps()
    assert not driver.online.has_learnt
    assert not driver.follower.has_changed
    # A fall after that takes both back to them, and not to what was loaded.
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates)
    restored = driver.counters.restored
    driver.await_condition(lambda: driver.counters.restored > restored, accepted=1)
    driver.between_steps()
    assert torch.equal(driver.weights(), now)
