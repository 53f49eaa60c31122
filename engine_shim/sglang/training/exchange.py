"""Connects an engine and its trainer: tensors in shared memory, messages over a socket pair.

The memory has no name and no file: it is gone with the two processes.  One side writes at a time:

    engine    writes a round, sends LEARN
    trainer   reads it, writes the weights, sends LEARNT or REFUSED
    engine    copies the weights between two steps; only then sends again
    engine    or writes weights, sends TAKE_WEIGHTS
    trainer   reads them, sends READY

The engine never waits for an answer, and no half of anything is read.

The verified positions of running requests are in rings, of which rounds are made.  The row of
position p is p modulo the length of the ring.  A step therefore writes its own rows and moves no
others, and engine and trainer agree on where a position is without a word.
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
_MOST_TEXT: Final = 400

# The tensor that says which rows are a round: ring, first position and end of each request.
SPANS: Final = "spans"


class Layout(NamedTuple):
    """A tensor's shape, and the name of its dtype in torch."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return prod(self.shape) * torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()


class SharedTensors:
    """Tensors over one anonymous memory file; `fd` is handed to the other process."""

    def __init__(self, layouts: Mapping[str, Layout], fd: int | None = None) -> None:
        offsets: dict[str, int] = {}
        size = 0
        for name, layout in layouts.items():
            offsets[name] = size
            size += -(-layout.bytes // _ALIGNMENT) * _ALIGNMENT
        if fd is None:
            fd = os.memfd_create("speculation-training")
            os.ftruncate(fd, max(size, 1))
        self.fd = fd
        self._memory = mmap.mmap(fd, max(size, 1))
        # All of it, as bytes.
        self.whole = torch.frombuffer(self._memory, dtype=torch.uint8)
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
        return _MESSAGE.pack(*self[:-1]) + self.text.encode()[:_MOST_TEXT]

    @classmethod
    def decode(cls, data: bytes) -> Message:
        """Decodes one packet.  Raises ValueError."""
        if len(data) < _MESSAGE.size:
            raise ValueError(f"a message of {len(data)} bytes, {_MESSAGE.size} or more are needed")
        kind, *numbers = _MESSAGE.unpack_from(data)
        text = data[_MESSAGE.size :].decode(errors="replace")
        return cls._make((MessageKind(kind), *numbers, text))


class Channel:
    """One end of the socket pair, which keeps packets whole and in order."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Makes both ends."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def close(self) -> None:
        """Closes this end, which the other side notices."""
        self._socket.close()

    def send(self, message: Message) -> bool:
        """Sends a message; returns False when the other side is gone, or does not read."""
        try:
            self._socket.send(message.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def receive(self, *, wait: bool) -> Message | None:
        """Returns the next message; None if it has not arrived yet.

        Raises EOFError when the other side is gone, or sends something else than a message.
        """
        try:
            data = self._socket.recv(_MESSAGE.size + _MOST_TEXT, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the other side has ended")
        try:
            return Message.decode(data)
        except ValueError as error:
            raise EOFError(f"the other side sent something else than a message: {error}") from error


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

    requests: rings.  positions: rows of one.  width: numbers of the features of a position.  top:
    the target's likeliest tokens of a position.  dtype: of the features, by its name in torch.
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

    def made(self) -> RingRows:
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
        """The size of all rings together."""
        return sum(layout.bytes for layout in self.layouts().values())


def read_round(tensors: Mapping[str, Tensor], requests: int) -> Round:
    """Makes a round of copies, right-aligned, of the first `requests` entries of the spans."""
    rings, starts, ends = tensors[SPANS][:requests].unbind(-1)
    longest = int((ends - starts).max())
    positions = ends[:, None] - longest + torch.arange(longest)
    valid = positions >= starts[:, None]
    at = rings[:, None], positions % tensors["tokens"].shape[1]
    found = [tensors[name][at] for name in RingRows._fields]
    for part in found:
        # What an earlier request has left there may be no number.
        part[~valid] = 0
    tokens, features, top_tokens, top_logs = found
    return Round(
        tokens,
        features.float(),
        top_tokens,
        top_logs,
        taught=valid,
        valid=valid,
        positions=torch.where(valid, positions, 0),
    )
