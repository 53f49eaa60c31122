"""The trainer as the engine starts it: its own process, shared memory, a socket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine_shim.sglang.training import trainer
from engine_shim.sglang.training.exchange import (
    SPANS,
    Channel,
    Layout,
    Message,
    MessageKind,
    RingRows,
    RingShape,
    SharedTensors,
)
from engine_shim.sglang.training.online import OnlineSettings, Round
from engine_shim.sglang.training.students import DraftStudent
from tests.support.training_rounds import (
    SHAPE,
    make_block_student,
    make_round,
    make_student,
    make_target,
)

GAMMA = 3
LENGTH = 24
TOP = 16
REQUESTS = 4


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    channel: Channel
    memory: SharedTensors

    def weights(self) -> dict[str, Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in self.memory.tensors.items()
            if name.startswith(trainer.WEIGHT_PREFIX)
        }

    def learn(self, training_round: Round, gamma: int = GAMMA) -> Message:
        requests, length = training_round.tokens.shape
        for name in RingRows._fields:
            self.memory.tensors[name][:requests, :length] = getattr(training_round, name)
        spans = [(ring, 0, length) for ring in range(requests)]
        self.memory.tensors[SPANS][:requests] = torch.tensor(spans)
        assert self.channel.send(Message(MessageKind.LEARN, requests=requests, gamma=gamma))
        reply = self.channel.receive(wait=True)
        assert reply is not None
        return reply


@contextmanager
def started(student: DraftStudent) -> Iterator[Running]:
    layouts = {
        **RingShape(REQUESTS, LENGTH, 2 * SHAPE.hidden, TOP).layouts(),
        trainer.BORROWED_PREFIX + "embedding": Layout(tuple(student.embedding.shape), "float32"),
        **{
            trainer.WEIGHT_PREFIX + name: Layout(tuple(part.shape), "float32")
            for name, part in student.state_dict().items()
        },
    }
    memory = SharedTensors(layouts)
    memory.tensors[trainer.BORROWED_PREFIX + "embedding"].copy_(student.embedding)
    for name, part in student.state_dict().items():
        memory.tensors[trainer.WEIGHT_PREFIX + name].copy_(part)
    settings = OnlineSettings(anchors=8, top=TOP, learning_rate=3e-3)
    order = trainer.encode_arguments(student.shape, settings, layouts, threads=1, device="cpu")
    ours, theirs = Channel.make_pair()
    with theirs:
        fds = (memory.fd, theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", trainer.__name__, *map(str, fds), order], pass_fds=fds
        )
    with process, ours:
        yield Running(process, Channel(ours), memory)
        ours.close()


@pytest.fixture(scope="module", params=[make_student, make_block_student], ids=["eagle3", "dflash"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    with started(request.param(make_target())) as running_trainer:
        ready = running_trainer.channel.receive(wait=True)
        assert ready == Message(MessageKind.READY)
        yield running_trainer


def test_it_learns_and_leaves_the_weights_in_memory(running: Running) -> None:
    training_round = make_round(make_target(), LENGTH, seed=1, top=TOP, requests=REQUESTS)
    before = running.weights()
    replies = [running.learn(training_round) for _ in range(20)]
    assert {reply.kind for reply in replies} == {MessageKind.LEARNT}
    assert replies[-1].loss < 0.7 * replies[0].loss
    assert all(0 < reply.seconds < 60 for reply in replies)
    after = running.weights()
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_a_round_that_is_shorter_than_the_last_drafts_is_learnt_as_far_as_it_goes(
    running: Running,
) -> None:
    """A long block was drafted, then nothing, and another request has just begun."""
    training_round = make_round(make_target(), GAMMA + 1, seed=3, top=TOP)
    assert running.learn(training_round, gamma=GAMMA + 1).kind is MessageKind.LEARNT


def test_it_goes_on_from_weights_that_are_put_back(running: Running) -> None:
    training_round = make_round(make_target(), LENGTH, seed=2, top=TOP, requests=REQUESTS)
    before = running.weights()
    first = running.learn(training_round).loss
    for _ in range(5):
        running.learn(training_round)
    for name, part in before.items():
        running.memory.tensors[name].copy_(part)
    assert running.channel.send(Message(MessageKind.TAKE_WEIGHTS))
    assert running.channel.receive(wait=True) == Message(MessageKind.READY)
    assert running.learn(training_round).loss == pytest.approx(first, rel=1e-4)


def test_it_goes_on_with_a_target_that_was_replaced(running: Running) -> None:
    training_round = make_round(make_target(), LENGTH, seed=4, top=TOP, requests=REQUESTS)
    embedding = running.memory.tensors[trainer.BORROWED_PREFIX + "embedding"]
    target = embedding.clone()
    losses = []
    for part in (target, torch.zeros_like(target)):
        embedding.copy_(part)
        assert running.channel.send(Message(MessageKind.TAKE_WEIGHTS))
        assert running.channel.receive(wait=True) == Message(MessageKind.READY)
        losses.append(running.learn(training_round).loss)
    embedding.copy_(target)
    assert abs(losses[1] - losses[0]) > 0.01


def test_a_round_of_no_numbers_is_refused_and_the_weights_stay(running: Running) -> None:
    learnt_round = make_round(make_target(), LENGTH, seed=3, top=TOP)
    before = running.weights()
    reply = running.learn(learnt_round._replace(features=learnt_round.features * float("nan")))
    assert reply.kind is MessageKind.REFUSED
    assert "nan" in reply.text
    assert all(torch.equal(part, before[name]) for name, part in running.weights().items())
    assert running.learn(learnt_round).kind is MessageKind.LEARNT


def test_it_ends_with_the_engine() -> None:
    with started(make_student(make_target())) as ended_trainer:
        assert ended_trainer.channel.receive(wait=True) == Message(MessageKind.READY)
    assert ended_trainer.process.wait(120) == 0
