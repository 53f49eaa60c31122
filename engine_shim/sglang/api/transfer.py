"""Moves data between host and device, and between streams, without waiting for either."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch


def is_asynchronous(device: torch.device) -> bool:
    """Whether calls return before the device has done the work that they launch."""
    return device.type != "cpu"


def to_device(
    values: Sequence[float] | np.ndarray,
    device: torch.device | str,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Returns `values` as a tensor on `device`; work that is launched later can read it.

    `torch.tensor(values, device=...)` would copy from pageable memory and wait until the device has
    finished all earlier work.
    """
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


def protect_from_reuse(tensor: torch.Tensor) -> None:
    """Prevents too early reuse of the memory of a tensor that another stream has made.

    torch returns freed memory to the stream that allocated it, even if another stream has not read
    it yet.  After this call the memory is not reused before the work that the current stream has
    launched so far is done.
    """
    if tensor.device.type != "cpu":
        streams = torch.get_device_module(tensor.device)
        tensor.record_stream(streams.current_stream(tensor.device))


def record_launched_work(device: torch.device) -> torch.Event | None:
    """Returns an event that occurs when the work of the current stream so far is done.

    Returns None on a device whose work is already done.
    """
    if not is_asynchronous(device):
        return None
    return torch.get_device_module(device).current_stream(device).record_event()


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates host memory that a device can write to asynchronously."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def pin_pages(memory: torch.Tensor, device: torch.device) -> None:
    """Pins host memory, so that a device can access it, until the process ends.

    memory: contiguous.  Raises RuntimeError if the driver refuses.
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
        """Copies the second tensor of each pair into the first.

        Exactly one of the two is on the host, in memory that the device can access (`host_buffer`,
        `pin_pages`).  Neither may be written to until the returned event has occurred.  Types are
        converted on the device, because the caller would have to wait for a conversion on the host.
        Raises ValueError for a tensor that is not contiguous: torch would copy it through pageable
        host memory and wait for the device.
        """
        pairs = list(pairs)
        if not all(part.is_contiguous() for pair in pairs for part in pair):
            raise ValueError("only contiguous tensors are copied without a wait")
        self._stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._stream):
            for destination, source in pairs:
                if source.device.type == self.device.type:
                    destination.copy_(source.to(destination.dtype), non_blocking=True)
                    protect_from_reuse(source)
                else:
                    destination.copy_(source.to(self.device, non_blocking=True))
        copy_done: torch.Event = self._stream.record_event()
        return copy_done


def make_side_stream(device: torch.device) -> SideStream | None:
    """Makes the side stream of a device; None for the CPU, which shares the host's memory."""
    return SideStream(device) if is_asynchronous(device) else None
