"""The engine's side of the trainer of online updates: a process, shared memory, a socket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Final

from torch import Tensor

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.api.settings import PluginSettings
from engine_shim.sglang.api.transfer import pin_pages
from engine_shim.sglang.learning.student import LiveDrafter
from engine_shim.sglang.training import trainer
from engine_shim.sglang.training.exchange import Channel, Layout, Message, RingShape, SharedTensors
from engine_shim.sglang.training.online import OnlineSettings

# The most requests of a batch in a training round.
MAX_REQUESTS: Final = 16


def make_ring_shape(
    drafter: LiveDrafter, settings: PluginSettings, largest_gamma: int
) -> RingShape:
    """Returns the sizes of the rings, before anything is allocated.

    Raises UnsupportedEngineError if they would take more memory than the setting allows.
    """
    shape = RingShape(
        MAX_REQUESTS,
        settings.online.window + largest_gamma + 1,
        drafter.feature_width,
        min(settings.online.top, drafter.shape.decoder.vocabulary),
        str(drafter.borrowed.embedding.dtype).removeprefix("torch."),
    )
    # The engine has one set of rings and shares a second one with the trainer.
    position_bytes = 2 * replace(shape, positions=1).bytes
    allowed_bytes = settings.online_megabytes << 20
    if position_bytes * shape.positions > allowed_bytes:
        max_positions = max(0, allowed_bytes // position_bytes - largest_gamma - 1)
        raise UnsupportedEngineError(
            f"SPECULATION_ONLINE_WINDOW={settings.online.window} takes "
            f"{position_bytes * shape.positions / (1 << 20):.0f} MiB of the host's memory "
            f"({MAX_REQUESTS} requests at {position_bytes // MAX_REQUESTS} bytes a position) and "
            f"SPECULATION_ONLINE_MEGABYTES is {settings.online_megabytes}: raise that, or keep "
            f"{max_positions} positions or fewer"
        )
    return shape


class TrainerProcess:
    """Runs the trainer of one drafter, until `close`.

    tensors: the shared memory by name: rings, spans, weights, what the drafter borrows.  weights:
    those of the whole drafter in it, float32, by the names of its parameters.
    """

    def __init__(
        self, drafter: LiveDrafter, rings: RingShape, settings: OnlineSettings, device: str = ""
    ) -> None:
        """Starts the process with the drafter's current weights.

        device: torch's name of the trainer's device; "" for the drafter's.
        """
        self._borrowed = {
            trainer.BORROWED_PREFIX + name: part.detach()
            for name, part in drafter.borrowed._asdict().items()
            if part is not None
        }
        layouts = {
            **rings.layouts(),
            **{
                name: Layout(tuple(part.shape), "float32" if part.is_floating_point() else "int64")
                for name, part in self._borrowed.items()
            },
            **{
                trainer.WEIGHT_PREFIX + name: Layout(tuple(live.shape), "float32")
                for name, live in drafter.parameters.items()
            },
        }
        memory = SharedTensors(layouts)
        try:
            pin_pages(memory.memory_bytes, drafter.device)
        except RuntimeError as error:
            raise UnsupportedEngineError(
                f"the device cannot reach the trainer's memory: {error}"
            ) from error
        self.tensors: Mapping[str, Tensor] = memory.tensors
        self.weights = {
            name: self.tensors[trainer.WEIGHT_PREFIX + name] for name in drafter.parameters
        }
        self.share_borrowed()
        for name, part in drafter.parameters.items():
            self.weights[name].copy_(part.detach())
        device = device or str(drafter.device)
        encoded_arguments = trainer.encode_arguments(
            drafter.shape, settings, layouts, threads=1, device=device
        )
        self.process, channel = _start_trainer(encoded_arguments, memory)
        self._channel: Channel | None = channel

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return self._channel is not None

    @property
    def status(self) -> int | None:
        """Returns the exit status of the process; None while it runs."""
        return self.process.poll()

    def share_borrowed(self) -> None:
        """Copies what the drafter borrows from the target into shared memory; waits for the device.

        It is called after a weight update of the target, which stops the engine for longer.
        """
        for name, part in self._borrowed.items():
            self.tensors[name].copy_(part)

    def receive(self) -> Message | None:
        """Returns the trainer's answer, if any.  Raises EOFError after the trainer has ended."""
        assert self._channel is not None
        return self._channel.receive(wait=False)

    def send(self, message: Message) -> bool:
        """Sends a message to the trainer; returns False if that fails."""
        assert self._channel is not None
        return self._channel.send(message)

    def close(self) -> None:
        """Ends the process; the shared memory keeps what it has written."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self.process.kill()
            # A process that uses a GPU takes a while to end, so a thread waits for it.  While the
            # interpreter shuts down, no thread can be started, and none is needed.
            with suppress(RuntimeError):
                Thread(target=self.process.wait, name="speculation-trainer", daemon=True).start()


def _start_trainer(
    encoded_arguments: str, memory: SharedTensors
) -> tuple[subprocess.Popen[bytes], Channel]:
    engine_end, trainer_end = Channel.make_pair()
    with trainer_end:
        fds = memory.fd, trainer_end.fileno()
        command = [sys.executable, "-m", trainer.__name__, *map(str, fds), encoded_arguments]
        process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
    return process, Channel(engine_end)
