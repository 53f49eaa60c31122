"""Weights land at the imposed moment of the model's time, whatever the trainer takes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine_shim.sglang.training import exchange
from engine_shim.sglang.training.exchange import Channel, Message, MessageKind
from lab.cpu_engine.pace.model_clock import ModelClock
from lab.cpu_engine.pace.updates import UpdateCosts, UpdateWatch

COSTS = UpdateCosts()
ROUND = Message(MessageKind.LEARN, requests=4, gamma=3)
# Ring, first position and end of each of them; the longest has 48.
SPANS = torch.tensor([[0, 100, 148], [1, 10, 20], [2, 0, 40], [5, 7, 15]])
SECONDS = COSTS.seconds(4, 48, 3)
WORK = COSTS.work_seconds(4, 48, 3)
STEP = 0.005
DILATION = 4.0


class EnginesEnd:
    """An engine's end of a real channel; its trainer answers at once, or on the test's demand."""

    def __init__(self) -> None:
        ours, theirs = Channel.make_pair()
        self.channel, self.trainer = Channel(ours), Channel(theirs)
        self.clock = ModelClock()
        self.watch = UpdateWatch(COSTS, self.clock)

    def look(self) -> Message | None:
        return self.watch.receive(lambda: self.channel.receive(wait=False))

    def close(self) -> None:
        self.channel.close()
        self.trainer.close()

    def step(self, hand_over: bool = False) -> tuple[Message | None, float]:
        """A pass: what has landed before it, and what it takes longer."""
        self.watch.begin(0.0)
        landed = self.look()
        if hand_over:
            self.watch.note_round({exchange.SPANS: SPANS}, 4)
            self.watch.note_message(ROUND)
            self.channel.send(ROUND)
        return landed, self.watch.end(STEP, DILATION)


@pytest.fixture
def engine() -> Iterator[EnginesEnd]:
    engines_end = EnginesEnd()
    engines_end.trainer.send(Message(MessageKind.READY))
    landed = engines_end.look()
    assert landed is not None
    assert landed.kind is MessageKind.READY
    yield engines_end
    engines_end.close()


def test_an_answer_that_is_there_early_lands_when_its_time_has_come(engine: EnginesEnd):
    assert engine.step(hand_over=True) == (None, 0.0)
    engine.trainer.send(Message(MessageKind.LEARNT, loss=1.5, seconds=99.0))
    taken = 0.0
    lost = []
    while (landing := engine.step())[0] is None:
        lost.append(landing[1])
        taken += STEP + landing[1]
    # The last of these passes has outlasted the update, and the one before has not.
    assert taken >= SECONDS > taken - STEP - lost[-1]
    assert sum(lost) == pytest.approx(WORK)
    assert lost[0] == pytest.approx(COSTS.share * STEP)
    landed, after = landing
    assert landed == Message(MessageKind.LEARNT, loss=1.5, seconds=SECONDS * DILATION)
    assert after == 0.0
    assert engine.watch.landed == 1


def test_a_slow_trainer_is_waited_for_while_the_clock_stands_still(
    engine: EnginesEnd, monkeypatch: pytest.MonkeyPatch
):
    engine.step(hand_over=True)
    while engine.watch._remaining_seconds > 0:
        engine.step()
    answer = Message(MessageKind.LEARNT, seconds=1.0)
    timer = threading.Timer(0.2, lambda: engine.trainer.send(answer))
    standing = engine.clock.paused

    @contextmanager
    def stand() -> Iterator[None]:
        with standing():
            # The trainer's time begins once the clock stands, however long that has taken.
            timer.start()
            yield

    monkeypatch.setattr(engine.clock, "paused", stand)
    # The machine may do something else between two looks, which must not count as time that moved.
    began, before = time.perf_counter(), engine.clock.now()
    landed, _ = engine.step()
    moved = engine.clock.now() - before
    waited = time.perf_counter() - began
    assert landed is not None
    assert waited >= 0.19
    assert waited - moved >= 0.18


def test_idle_time_of_the_model_is_time_of_the_update(engine: EnginesEnd):
    engine.step(hand_over=True)
    engine.trainer.send(Message(MessageKind.LEARNT))
    engine.watch.begin(0.9 * SECONDS)
    assert engine.look() is None
    engine.watch.begin(0.11 * SECONDS)
    assert engine.look() is not None


def test_an_answer_without_a_price_takes_no_time_of_the_model(engine: EnginesEnd):
    engine.watch.note_message(Message(MessageKind.TAKE_WEIGHTS))
    engine.trainer.send(Message(MessageKind.READY))
    landed, lost = engine.step()
    assert landed == Message(MessageKind.READY)
    assert lost == 0.0
    assert engine.watch.landed == 0
    # Nothing is owed now: nothing is waited for.
    assert engine.step() == (None, 0.0)


def test_a_trainer_that_ends_during_an_update_is_noticed_when_that_is_due(engine: EnginesEnd):
    engine.step(hand_over=True)
    engine.trainer.close()
    while engine.watch._remaining_seconds > 0:
        assert engine.step()[0] is None
    with pytest.raises(EOFError):
        engine.step()


def test_a_trainer_that_ends_while_it_owes_nothing_is_noticed_at_once(engine: EnginesEnd):
    engine.trainer.close()
    with pytest.raises(EOFError):
        engine.step()


def test_a_trainer_that_hangs_is_given_up(engine: EnginesEnd, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lab.cpu_engine.pace.updates._ANSWER_SECONDS", 0.05)
    engine.watch.note_message(Message(MessageKind.TAKE_WEIGHTS))
    with pytest.raises(EOFError, match=r"the trainer has not answered for 0\.05 s"):
        engine.look()
