"""Memory and messages between an engine and its trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from engine_shim.sglang.training.exchange import (
    Channel,
    Layout,
    Message,
    MessageKind,
    SharedTensors,
)

LAYOUTS = {
    "flags": Layout((3,), "bool"),
    "numbers": Layout((2, 5), "float32"),
    "ids": Layout((4, 1), "int64"),
}


def test_both_sides_see_the_same_tensors() -> None:
    ours = SharedTensors(LAYOUTS)
    theirs = SharedTensors(LAYOUTS, os.dup(ours.fd))
    ours.tensors["numbers"].copy_(torch.arange(10).view(2, 5))
    ours.tensors["flags"][1] = True
    theirs.tensors["ids"].fill_(-7)
    assert theirs.tensors["numbers"][1].tolist() == [5, 6, 7, 8, 9]
    assert theirs.tensors["flags"].tolist() == [False, True, False]
    assert ours.tensors["ids"].flatten().tolist() == [-7] * 4
    # Nothing of one lies in another.
    assert theirs.tensors["numbers"][0].tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    left, right = map(Channel, Channel.make_pair())
    yield left, right
    left.close()
    right.close()


def test_messages_arrive_whole_and_in_order(channels: tuple[Channel, Channel]) -> None:
    left, right = channels
    sent = [
        Message(MessageKind.LEARN, requests=16, gamma=7),
        Message(MessageKind.REFUSED, text="loss nan"),
        Message(MessageKind.LEARNT, loss=0.25, seconds=1.5),
    ]
    for message in sent:
        assert left.send(message)
    assert [right.receive(wait=True) for _ in sent] == sent
    assert right.receive(wait=False) is None


def test_a_long_text_is_cut(channels: tuple[Channel, Channel]) -> None:
    left, right = channels
    assert left.send(Message(MessageKind.REFUSED, text="x" * 5000))
    message = right.receive(wait=True)
    assert message is not None
    assert message.text == "x" * 400


def test_an_end_is_noticed_on_both_ways(channels: tuple[Channel, Channel]) -> None:
    left, right = channels
    right.close()
    assert not left.send(Message(MessageKind.LEARN))
    with pytest.raises(EOFError):
        left.receive(wait=False)


def test_nobody_waits_for_a_side_that_does_not_read(channels: tuple[Channel, Channel]) -> None:
    sent = 0
    while channels[0].send(Message(MessageKind.LEARN)):
        sent += 1
        assert sent < 100_000
    assert sent > 1


@pytest.mark.parametrize("data", [b"x", b"\x00" * 64])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes|MessageKind"):
        Message.decode(data)
