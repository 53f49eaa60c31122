"""Moves data between host and device, and between streams, without waiting for either."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch


def is_asynchronous(device: torch.device) -> bool:
    """Whether a device does its work after the call that asks for it has returned."""
    return device.type != "cpu"


def to_device(
    values: Sequence[float] | np.ndarray,
    device: torch.device | str,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Returns `values` as a tensor on `device`, which work launched from now on finds there.

    `torch.tensor(values, device=...)` copies from pageable memory and therefore waits until the
    device has done everything that was launched before.
    """
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def keep_for_this_stream(tensor: torch.Tensor) -> None:
    """Keeps the memory of a tensor that another stream has made from being reused too early.

    torch gives freed memory back to the stream that allocated it, even if another one has yet to
    read it; here, until all that the current stream has launched so far has run.
    """
    if tensor.device.type != "cpu":
        streams = torch.get_device_module(tensor.device)
        tensor.record_stream(streams.current_stream(tensor.device))


def launched(device: torch.device) -> torch.Event | None:
    """Returns an event that has occurred once all that the current stream was given has run.

    None where everything has run already.
    """
    if not is_asynchronous(device):
        return None
    return torch.get_device_module(device).current_stream(device).record_event()


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Makes memory of the host that a device can write to while the host does something else."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def lock_pages(memory: torch.Tensor, device: torch.device) -> None:
    """Has a device reach memory of the host by itself, for the rest of the process's life.

    memory: contiguous.  Raises RuntimeError where the driver refuses.
    """
    if device.type == "cuda":
        address, size = memory.data_ptr(), memory.nbytes
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        torch.cuda.check_error(int(error))


class SideStream:
    """Copies between host and device while the device runs steps, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event:
        """Copies into the first tensor of each pair what the second holds by now.

        Exactly one of the two lies on the host, in memory that the device can reach (`host_buffer`,
        `lock_pages`).  Nothing may write to either until the event that is returned has occurred.
        Values change their type on the device: on the host, the caller would have to wait for that.
        Raises ValueError for a part that is not contiguous: torch would copy it by way of pageable
        memory of the host, which takes until the device has done it.
        """
        pairs = list(pairs)
        if not all(part.is_contiguous() for pair in pairs for part in pair):
            raise ValueError("only contiguous tensors are copied without a wait")
        self._stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._stream):
            for to, source in pairs:
                if source.device.type == self.device.type:
                    to.copy_(source.to(to.dtype), non_blocking=True)
                    keep_for_this_stream(source)
                else:
                    to.copy_(source.to(self.device, non_blocking=True))
        found: torch.Event = self._stream.record_event()
        return found


def side_stream(device: torch.device) -> SideStream | None:
    """Makes one for a device; None for the CPU, which shares its memory with the host."""
    return SideStream(device) if is_asynchronous(device) else None
