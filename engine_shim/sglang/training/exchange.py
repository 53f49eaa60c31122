"""Connects an engine and its trainer: tensors in shared memory, messages over a socket pair.

The memory has no name and no file, so it is freed when the two processes have ended.  One side
writes at a time:

    engine    writes a round, sends LEARN
    trainer   reads it, writes the weights, sends LEARNT or REFUSED
    engine    copies the weights between two steps; only then sends again
    engine    or writes weights, sends TAKE_WEIGHTS
    trainer   reads them, sends READY

The engine never waits for an answer, and no side reads data that is only partly written.

The verified positions of running requests are in rings, from which rounds are read.  The row of
position p is p modulo the length of the ring.  So a step writes its own rows and moves no others,
and engine and trainer find a position without exchanging its row.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine_shim.sglang.training.online import Round

_ALIGNMENT: Final = 64
_MESSAGE: Final = struct.Struct("<BIIdd")
_MAX_TEXT_BYTES: Final = 400

# The tensor that says which rows are a round: ring, first position and end of each request.
SPANS: Final = "spans"


class Layout(NamedTuple):
    """A tensor's shape, and the name of its dtype in torch."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Returns the size of the tensor in bytes."""
        return prod(self.shape) * torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()


class SharedTensors:
    """Tensors in one anonymous memory file; the other process inherits its descriptor `fd`."""

    def __init__(self, layouts: Mapping[str, Layout], fd: int | None = None) -> None:
        offsets: dict[str, int] = {}
        total_bytes = 0
        for name, layout in layouts.items():
            offsets[name] = total_bytes
            total_bytes += -(-layout.bytes // _ALIGNMENT) * _ALIGNMENT
        if fd is None:
            fd = os.memfd_create("speculation-training")
            os.ftruncate(fd, max(total_bytes, 1))
        self.fd = fd
        self._memory = mmap.mmap(fd, max(total_bytes, 1))
        # The whole memory as bytes.
        self.memory_bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.tensors: dict[str, Tensor] = {
            name: torch.frombuffer(
                self._memory,
                dtype=getattr(torch, layout.dtype),
                count=prod(layout.shape),
                offset=offsets[name],
            ).view(layout.shape)
            for name, layout in layouts.items()
        }


class MessageKind(IntEnum):
    """The kinds of messages."""

    # From the engine.
    LEARN = 1
    TAKE_WEIGHTS = 2
    # From the trainer.
    READY = 10
    LEARNT = 11
    REFUSED = 12


class Message(NamedTuple):
    """A message of one packet.

    LEARN carries requests and gamma of the round, LEARNT loss and seconds, REFUSED the text.
    """

    kind: MessageKind
    requests: int = 0
    gamma: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    text: str = ""

    def encode(self) -> bytes:
        """Encodes the message as one packet."""
        return _MESSAGE.pack(*self[:-1]) + self.text.encode()[:_MAX_TEXT_BYTES]

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Decodes one packet.  Raises ValueError."""
        if len(data) < _MESSAGE.size:
            raise ValueError(f"a message has {len(data)} bytes, {_MESSAGE.size} are the minimum")
        kind, *numbers = _MESSAGE.unpack_from(data)
        text = data[_MESSAGE.size :].decode(errors="replace")
        return cls._make((MessageKind(kind), *numbers, text))


class Channel:
    """One end of the socket pair, which keeps packets whole and in order."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @staticmethod
    def make_pair() -> tuple[socket.socket, socket.socket]:
        """Makes both ends."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def close(self) -> None:
        """Closes this end; the other side then reads the end of the stream."""
        self._socket.close()

    def send(self, message: Message) -> bool:
        """Sends a message; returns False if the other side has ended or does not read."""
        try:
            self._socket.send(message.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self, *, wait: bool) -> Message | None:
        """Returns the next message; None if it has not arrived yet.

        Raises EOFError if the other side has ended, or has sent invalid data.
        """
        try:
            data = self._socket.recv(
                _MESSAGE.size + _MAX_TEXT_BYTES, 0 if wait else socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the other side has ended")
        try:
            return Message.decode(data)
        except ValueError as error:
            raise EOFError(f"the other side sent an invalid message: {error}") from error


class RingRows(NamedTuple):
    """Rows of the rings, or the rings themselves.

    tokens: int64 [..., T].  features: [..., T, width], in the type of the target's hidden states.
    top_tokens: int64 [..., T, top].  top_logs: float32 [..., T, top].
    """

    tokens: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logs: Tensor


@dataclass(frozen=True, slots=True)
class RingShape:
    """Sizes of the rings.

    requests: number of rings.  positions: rows of a ring.  width: numbers of the features of a
    position.  top: number of the target's likeliest tokens of a position.  dtype: of the features,
    by its name in torch.
    """

    requests: int
    positions: int
    width: int
    top: int
    dtype: str = "float32"

    def layouts(self) -> dict[str, Layout]:
        """Describes the tensors that an engine shares with its trainer."""
        size = self.requests, self.positions
        return {
            "tokens": Layout(size, "int64"),
            "features": Layout((*size, self.width), self.dtype),
            "top_tokens": Layout((*size, self.top), "int64"),
            "top_logs": Layout((*size, self.top), "float32"),
            SPANS: Layout((self.requests, 3), "int64"),
        }

    def make_rings(self) -> RingRows:
        """Makes empty rings."""
        layouts = self.layouts()
        return RingRows(
            *(
                torch.zeros(layouts[name].shape, dtype=getattr(torch, layouts[name].dtype))
                for name in RingRows._fields
            )
        )

    @property
    def bytes(self) -> int:
        """Returns the size of all rings together, in bytes."""
        return sum(layout.bytes for layout in self.layouts().values())


def read_round(tensors: Mapping[str, Tensor], requests: int) -> Round:
    """Copies the first `requests` entries of the spans into a right-aligned round."""
    rings, starts, ends = tensors[SPANS][:requests].unbind(-1)
    length = int((ends - starts).max())
    positions = ends[:, None] - length + torch.arange(length)
    valid = positions >= starts[:, None]
    index = rings[:, None], positions % tensors["tokens"].shape[1]
    parts = [tensors[name][index] for name in RingRows._fields]
    for part in parts:
        # Values of an earlier request may be NaN.
        part[~valid] = 0
    tokens, features, top_tokens, top_logs = parts
    return Round(
        tokens,
        features.float(),
        top_tokens,
        top_logs,
        has_target=valid,
        valid=valid,
        positions=torch.where(valid, positions, 0),
    )
