"""Trains an engine's drafter in a separate process.

A thread of the engine would delay the engine's steps, because both would share one interpreter.
The engine starts this module with shared memory, a socket (see exchange.py) and the arguments as
JSON.  The process ends when the engine's end of the socket is closed.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from engine_shim.sglang.training.blocks import Borrowed
from engine_shim.sglang.training.exchange import (
    Channel,
    Layout,
    Message,
    MessageKind,
    SharedTensors,
    read_round,
)
from engine_shim.sglang.training.online import NotFiniteError, OnlineSettings, OnlineStudent, Round
from engine_shim.sglang.training.students import (
    DraftShape,
    decode_shape,
    encode_shape,
    make_student,
)

# Lower priority than the engine, which shares the processor.
_NICE = 5
WEIGHT_PREFIX = "weight:"
BORROWED_PREFIX = "borrowed:"


def encode_arguments(
    shape: DraftShape,
    settings: OnlineSettings,
    layouts: dict[str, Layout],
    *,
    threads: int,
    device: str,
) -> str:
    """Encodes the arguments of `main` as JSON.  device: torch's name of the device to use."""
    return json.dumps(
        {
            "shape": encode_shape(shape),
            "settings": asdict(settings),
            "layouts": layouts,
            "threads": threads,
            "device": device,
        }
    )


class Trainer:
    """Learns from rounds in shared memory, and writes the weights there."""

    def __init__(self, arguments: dict[str, Any], memory: SharedTensors) -> None:
        self._tensors = memory.tensors
        self._borrowed = _select_by_prefix(BORROWED_PREFIX, self._tensors)
        self._device = torch.device(arguments["device"])
        student = make_student(decode_shape(arguments["shape"]), Borrowed(**self._borrowed))
        self._online = OnlineStudent(
            student.to(self._device), OnlineSettings(**arguments["settings"])
        )
        self._weights = _select_by_prefix(WEIGHT_PREFIX, self._tensors)
        self.take_weights()

    def take_weights(self) -> None:
        """Continues from the weights in shared memory, the target's included."""
        for name, part in self._borrowed.items():
            getattr(self._online.student, name).copy_(part)
        self._online.student.load_state_dict(self._weights)
        self._online.reset_optimizer()

    def handle_message(self, message: Message) -> Message:
        """Carries out a request of the engine; returns the answer."""
        if message.kind is MessageKind.TAKE_WEIGHTS:
            self.take_weights()
            return Message(MessageKind.READY)
        ring_round = read_round(self._tensors, message.requests)
        device_round = Round(*(part.to(self._device) for part in ring_round))
        # A short round may have fewer positions after the first one from which a draft can start.
        depth = min(message.gamma, device_round.tokens.shape[1] - 2)
        try:
            update = self._online.learn(device_round, depth)
        except NotFiniteError as error:
            return Message(MessageKind.REFUSED, text=str(error))
        state = self._online.student.state_dict()
        for name, tensor in self._weights.items():
            tensor.copy_(state[name])
        return Message(MessageKind.LEARNT, loss=update.loss, seconds=update.seconds)


def _select_by_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def main(memory_fd: int, socket_fd: int, encoded_arguments: str) -> None:
    """Serves the engine until it ends."""
    os.nice(_NICE)
    arguments = json.loads(encoded_arguments)
    torch.set_num_threads(arguments["threads"])
    layouts = {
        name: Layout(tuple(shape), dtype) for name, (shape, dtype) in arguments["layouts"].items()
    }
    channel = Channel(socket.socket(fileno=socket_fd))
    try:
        trainer = Trainer(arguments, SharedTensors(layouts, memory_fd))
        channel.send(Message(MessageKind.READY))
        while (message := _receive_next(channel)) is not None and channel.send(
            trainer.handle_message(message)
        ):
            pass
    finally:
        channel.close()


def _receive_next(channel: Channel) -> Message | None:
    """Waits for the engine's next message; returns None after the engine has ended."""
    try:
        return channel.receive(wait=True)
    except EOFError:
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
