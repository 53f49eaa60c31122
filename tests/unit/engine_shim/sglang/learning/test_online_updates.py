"""A drafter that learns, with a real trainer and no engine around it."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.link.rank_commands import RankCommands
from engine_shim.sglang.api.ranks import SINGLE_RANK
from engine_shim.sglang.api.settings import load_settings
from engine_shim.sglang.learning import online_updates
from engine_shim.sglang.learning.learning_steps import (
    make_online_updates,
    unsupported_device_reason,
)
from engine_shim.sglang.learning.online_updates import OnlineCounters, OnlineUpdates
from engine_shim.sglang.learning.student import LiveDrafter, live_drafter
from engine_shim.sglang.learning.trainer_process import TrainerProcess, make_ring_shape
from engine_shim.sglang.learning.verified_step import NO_UPDATE, UpdateStatus, Verification
from engine_shim.sglang.training.blocks import Borrowed
from engine_shim.sglang.training.students import UnsupportedDrafterError
from tests.support.eventually import eventually
from tests.support.live_drafters import LlamaForCausalLMEagle3, worker_of
from tests.support.training_rounds import (
    LAYERS,
    SHAPE,
    make_block_student,
    make_round,
    make_student,
    make_target,
)

GAMMA = 3
# For what waits for the trainer; only ends a hang.  Its process loads torch before it answers,
# which has taken more than a minute on a busy machine.
TRAINER_SECONDS = 240.0
# What some thousand steps may take, with the caches of torch.
MEMORY_BYTES = 32 * 1024 * 1024


class Driver:
    """Feeds one drafter's updates with steps of one request; what is accepted is made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, block: int = 0, **variables: str) -> None:
        """block: the learner is a DFlash drafter with such a block, not EAGLE3; 0: it is not."""
        monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
        monkeypatch.setenv("SPECULATION_ONLINE_UPDATES", "1")
        for name, value in variables.items():
            monkeypatch.setenv(f"SPECULATION_ONLINE_{name}", value)
        target = make_target()
        self.model: torch.nn.Module
        if block:
            student = make_block_student(target, block)
            parameters: dict[str, Any] = dict(student.named_parameters())
            borrowed = Borrowed(student.embedding, None)
            self.model = student
            drafter = LiveDrafter(student.shape, parameters, borrowed, len(LAYERS) * SHAPE.hidden)
        else:
            self.model = LlamaForCausalLMEagle3(make_student(target))
            drafter = live_drafter(worker_of(self.model))
        self._rounds = [
            make_round(target, GAMMA + 1, seed, top=SHAPE.vocabulary) for seed in range(20)
        ]
        self.online = self.make_updates(drafter)
        self._steps = self._length = 0
        self.update_status: list[UpdateStatus] = []

    def make_updates(self, drafter: LiveDrafter) -> OnlineUpdates:
        return OnlineUpdates(drafter, load_settings(), GAMMA)

    def between_steps(self) -> None:
        """What SGLang does there."""

    @property
    def counters(self) -> OnlineCounters:
        return self.online.counters

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def request(self, rid: str) -> None:
        """A new one."""
        self._rid, self._length = rid, 10
        self.online.before_prefill([rid])

    def step(
        self, accepted: int, stride: int = 1, gamma: int = GAMMA, *, by_learner: bool = True,
        undrafted: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """accepted: tokens gained, 1 for none of the drafts."""
        self.between_steps()
        self.online.before_step()
        self.update_status.append(self.online.update_status())
        self._steps += 1
        step_round = self._rounds[self._steps % len(self._rounds)]
        logits = torch.zeros(GAMMA + 1, SHAPE.vocabulary)
        logits.scatter_(1, step_round.top_tokens[0], step_round.top_logs[0])
        rows = gamma + 1
        batch: Any = SimpleNamespace(
            reqs=[SimpleNamespace(rid=self._rid)],
            seq_lens=torch.tensor([self._length % 40]),
            spec_info=SimpleNamespace(draft_token=step_round.tokens[0][:rows]),
        )
        output = SimpleNamespace(
            hidden_states=step_round.features[0][:rows], next_token_logits=logits[:rows]
        )
        result: Any = SimpleNamespace(logits_output=output, accept_lens=torch.tensor([accepted]))
        self.online.after_verify(
            Verification(batch, result, output.hidden_states, by_learner, undrafted), stride
        )
        self._length += accepted

    def await_condition(
        self, what: Callable[[], bool], accepted: int = 2, stride: int = 1, gamma: int = GAMMA
    ) -> None:
        """Steps until the trainer has answered."""

        def done() -> bool:
            for _ in range(10):
                self.step(accepted, stride, gamma)
                if what():
                    return True
            # The trainer needs a processor, too.
            time.sleep(0.02)
            return False

        eventually(done, timeout_seconds=TRAINER_SECONDS)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fresh_driver = Driver(monkeypatch, LEARNING_RATE="0.01")
    fresh_driver.request("first")
    yield fresh_driver
    fresh_driver.online.close()


def test_it_learns_once_it_knows_what_it_would_be_compared_with(driver: Driver) -> None:
    before = driver.weights()
    driver.await_condition(lambda: driver.counters.state == "ready", stride=0)
    driver.await_condition(lambda: driver.counters.updates > 2)
    assert not torch.equal(driver.weights(), before)
    shared = driver.model.get_parameter("model.embed_tokens.weight")
    assert torch.equal(shared, make_target().model.embed_tokens.weight)


def test_steps_are_told_of_the_updates_beside_and_before_them(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.state == "ready", stride=0)
    # The trainer was starting, and nothing was requested from it.
    assert set(driver.update_status) == {NO_UPDATE}

    def more_than(count: int) -> Callable[[], bool]:
        return lambda: driver.counters.updates > count

    for count in range(3):
        driver.await_condition(more_than(count))
        # No further one is requested.
        driver.await_condition(lambda: not driver.update_status[-1].updating, stride=0)
    landed = [
        number for number, update_status in enumerate(driver.update_status) if update_status.seconds
    ]
    assert len(landed) == driver.counters.updates
    assert all(driver.update_status[number].updating for number in landed)
    assert driver.update_status[landed[-1]].seconds == driver.counters.seconds
    assert not any(update_status.reset for update_status in driver.update_status)


def test_it_learns_from_rounds_without_drafts_as_well(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 0)
    before, rounds, weights = driver.counters.updates, driver.counters.rounds, driver.weights()
    driver.await_condition(lambda: driver.counters.updates > before + 2, accepted=1, gamma=0)
    assert driver.counters.rounds > rounds
    assert driver.counters.refused == 0
    assert not torch.equal(driver.weights(), weights)


def test_a_drafter_that_nobody_uses_learns_without_a_baseline(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.state == "ready", accepted=1, stride=0, gamma=0)
    driver.await_condition(lambda: driver.counters.updates > 2, accepted=1, gamma=0)
    learnt = driver.weights()
    # Once it drafts, nothing more is learnt before what it is now has been measured.
    updates = driver.counters.updates
    for _ in range(150):
        driver.step(2)
    assert driver.counters.updates <= updates + 1
    driver.await_condition(lambda: driver.counters.updates > updates + 3)
    # Had it done harm then, it would have come back to this, not to the first weights.
    driver.await_condition(lambda: driver.counters.restored == 1, accepted=1)
    assert (driver.weights() - learnt).abs().max() < 0.5 * learnt.abs().max()


def test_weights_that_somebody_else_has_set_stay(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 2)
    with torch.no_grad():
        for parameter in driver.model.parameters():
            parameter.mul_(0.5)
    other_weights = driver.weights()
    driver.await_condition(lambda: driver.counters.replaced == 1)
    assert torch.equal(driver.weights(), other_weights)
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates + 2)
    # It has gone on from those: steps of 0.01 are small beside halving.
    assert (driver.weights() - other_weights).abs().max() < 0.2 * other_weights.abs().max()
    assert driver.counters.replaced == 1
    # The target may be replaced as well, of which the drafter borrows the embedding.
    embedding = driver.model.get_parameter("model.embed_tokens.weight")
    with torch.no_grad():
        embedding.mul_(0.9)
    driver.await_condition(lambda: driver.counters.replaced == 2)
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates)
    assert torch.equal(driver.online._trainer.tensors["borrowed:embedding"], embedding)
    assert driver.counters.replaced == 2


def test_a_fall_puts_the_last_good_weights_back(driver: Driver) -> None:
    before = driver.weights()
    driver.await_condition(lambda: driver.counters.updates > 0)
    driver.await_condition(lambda: driver.counters.restored == 1, accepted=1)
    assert torch.equal(driver.weights(), before)
    driver.step(accepted=1)
    assert [update_status.reset for update_status in driver.update_status].count(True) == 1
    rounds = driver.counters.rounds
    # Of a request that lived through it nothing can be concluded.
    for _ in range(600):
        driver.step(accepted=2)
    assert driver.counters.rounds == rounds
    driver.request("second")
    driver.await_condition(
        lambda: driver.counters.updates > 0 and driver.counters.rounds > rounds + 2
    )


def test_what_another_drafter_drafts_is_not_held_against_it(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 0)
    rounds = driver.counters.rounds
    for _ in range(1200):
        driver.step(accepted=1, by_learner=False)
    assert driver.counters.restored == 0
    # It learns from them as from any other.
    driver.await_condition(lambda: driver.counters.rounds > rounds)


def test_requests_that_must_not_be_drafted_for_are_not_held_against_it(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 0)
    rounds = driver.counters.rounds
    for _ in range(1200):
        driver.step(accepted=1, undrafted=(0,))
    assert driver.counters.restored == 0
    # Behind its own token such a row holds fillers, which teach nothing.
    assert driver.counters.rounds == rounds


def test_what_nobody_has_judged_goes_with_the_trainer(driver: Driver) -> None:
    before = driver.weights()
    driver.await_condition(lambda: driver.counters.updates > 0)
    driver.online._trainer.process.kill()
    driver.await_condition(lambda: "has ended" in driver.counters.state, stride=0)
    assert torch.equal(driver.weights(), before)
    driver.step(accepted=2)  # and steps continue


def test_the_exit_status_of_a_trainer_is_waited_for_though_its_socket_ends_first(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.await_condition(lambda: driver.counters.updates > 0)
    with monkeypatch.context() as late:
        late.setattr(TrainerProcess, "status", None)
        driver.online._trainer.process.kill()
        driver.online._trainer.process.wait()
        for _ in range(20):
            driver.step(2)
        assert "has ended" not in driver.counters.state
    driver.step(2)
    assert driver.counters.state == "the trainer has ended with status -9"


def test_a_trainer_that_runs_and_is_not_heard_is_ended(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online_updates, "_EXIT_SECONDS", 0.0)
    driver.await_condition(lambda: driver.counters.updates > 0)
    process, channel = driver.online._trainer.process, driver.online._trainer._channel
    assert channel is not None
    # It would end by itself where it cannot answer.
    process.send_signal(signal.SIGSTOP)
    channel._socket.shutdown(socket.SHUT_RD)
    driver.await_condition(lambda: "no longer answers" in driver.counters.state)
    assert process.wait() == -signal.SIGKILL
    driver.step(2)  # and steps continue


@pytest.fixture
def block_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Its block has fewer drafts than steps of the drafter beside it."""
    fresh_driver = Driver(monkeypatch, block=GAMMA, LEARNING_RATE="0.01")
    fresh_driver.request("first")
    yield fresh_driver
    fresh_driver.online.close()


@pytest.mark.nightly
def test_a_trainer_that_is_stopped_holds_up_nobody_and_goes_on_later(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 2)
    trainer, engine = driver.online._trainer.process, psutil.Process()
    trainer.send_signal(signal.SIGSTOP)
    # The round that was under way may have been answered before.
    for _ in range(20):
        driver.step(2)
    updates, weights = driver.counters.updates, driver.weights()
    memory, descriptors = engine.memory_info().rss, engine.num_fds()
    for _ in range(1000):
        driver.step(2)
    assert driver.counters.updates == updates
    assert torch.equal(driver.weights(), weights)
    assert engine.memory_info().rss - memory < MEMORY_BYTES
    assert engine.num_fds() <= descriptors
    trainer.send_signal(signal.SIGCONT)
    driver.await_condition(lambda: driver.counters.updates > updates + 2)
    assert trainer.poll() is None


def test_a_block_drafter_learns_its_own_drafts_from_longer_ones(block_driver: Driver) -> None:
    driver = block_driver
    for _ in range(250):
        driver.step(accepted=2, gamma=GAMMA - 1, stride=0)
    driver.await_condition(lambda: driver.counters.state == "ready", stride=0, gamma=0)
    before = driver.weights()

    def learnt() -> bool:
        driver.step(accepted=2, by_learner=False)
        time.sleep(0.002)
        return driver.counters.updates > 2

    eventually(learnt, timeout_seconds=TRAINER_SECONDS)
    assert driver.counters.refused == 0
    assert not torch.equal(driver.weights(), before)
    # Its own drafts are judged, and what they say is acted on.
    driver.await_condition(lambda: driver.counters.restored == 1, accepted=1, gamma=GAMMA - 1)
    assert torch.equal(driver.weights(), before)


def test_each_request_begins_with_the_first_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, SCOPE="request")
    try:
        before = driver.weights()
        driver.request("first")
        driver.await_condition(lambda: driver.counters.updates > 1)
        assert not torch.equal(driver.weights(), before)
        driver.request("second")
        assert torch.equal(driver.weights(), before)
        assert driver.counters.resets == 1
        driver.step(accepted=2)
        driver.request("third")
        driver.step(accepted=2)
        # The first request is one, too.
        assert [update_status.reset for update_status in driver.update_status].count(True) == 3
        # Also when the trainer was busy with the first one's last round.
        driver.await_condition(lambda: driver.counters.updates > 3)
    finally:
        driver.online.close()


def test_what_is_learnt_of_a_request_never_lands_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, SCOPE="request")
    try:
        before = driver.weights()
        driver.request("first")
        driver.await_condition(lambda: driver.counters.rounds == 1)
        # Nothing has landed, and the trainer is at work.
        assert driver.counters.updates == 0
        driver.request("second")
        driver.await_condition(lambda: driver.online._is_trainer_idle, stride=0)
        assert driver.counters.updates == 0
        assert torch.equal(driver.weights(), before)
        # The trainer has gone back to what serves, too.
        for name, part in driver.online._trainer.weights.items():
            assert torch.equal(part, driver.model.get_parameter(name)), name
        driver.await_condition(lambda: driver.counters.updates > 0)
    finally:
        driver.online.close()


@pytest.mark.parametrize(
    ("device", "window", "error", "reason"),
    [
        (
            "xpu",
            None,
            UnsupportedEngineError,
            "SPECULATION_ONLINE_UPDATES is set, but the drafter cannot learn: on xpu this is",
        ),
        # With which the engine serves without updates.
        ("cpu", 64, UnsupportedDrafterError, "it sees the last 64 positions only"),
    ],
)
def test_what_cannot_learn_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    window: int | None,
    error: type[Exception],
    reason: str,
) -> None:
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    model = LlamaForCausalLMEagle3(make_student(make_target()))
    model.window = window
    with pytest.raises(error, match=reason):
        make_online_updates(worker_of(model), device, SINGLE_RANK, load_settings(), RankCommands())


def test_several_ranks_learn_on_a_cpu_only() -> None:
    assert not unsupported_device_reason("cpu", has_other_ranks=True)
    assert not unsupported_device_reason("cuda", has_other_ranks=False)
    assert "the engine would wait on cuda" in unsupported_device_reason(
        "cuda", has_other_ranks=True
    )


def test_a_window_that_takes_more_memory_than_is_allowed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setenv("SPECULATION_ONLINE_WINDOW", "1000000000")
    monkeypatch.setenv("SPECULATION_ONLINE_MEGABYTES", "2")
    drafter = live_drafter(worker_of(LlamaForCausalLMEagle3(make_student(make_target()))))
    with pytest.raises(UnsupportedEngineError, match="SPECULATION_ONLINE_MEGABYTES is 2") as error:
        OnlineUpdates(drafter, load_settings(), GAMMA)
    # The largest that fits is named, and one more does not fit.
    most = int(str(error.value).rpartition("keep ")[2].split()[0])
    for window, fits in ((most, True), (most + 1, False)):
        monkeypatch.setenv("SPECULATION_ONLINE_WINDOW", str(window))
        if fits:
            taken = 2 * make_ring_shape(drafter, load_settings(), GAMMA).bytes
            assert taken <= 2 << 20
        else:
            with pytest.raises(UnsupportedEngineError):
                make_ring_shape(drafter, load_settings(), GAMMA)


def test_what_is_stored_is_what_serves_also_when_the_trainer_has_gone(driver: Driver) -> None:
    driver.await_condition(lambda: driver.counters.updates > 1)
    driver.await_condition(lambda: driver.online.can_be_stored, stride=0)
    # One more, which was not judged: it goes with the trainer, whose memory still has it.
    updates = driver.counters.updates
    driver.await_condition(lambda: driver.counters.updates > updates)
    driver.online._trainer.process.kill()
    driver.await_condition(lambda: "has ended" in driver.counters.state, stride=0)
    assert driver.online.can_be_stored
    for name, part in driver.online.learnt_weights().items():
        assert torch.equal(part, driver.model.get_parameter(name)), name
    # Once is enough.
    assert driver.online.mark_stored()
    assert not driver.online.has_learnt
    assert not driver.online.can_be_stored
