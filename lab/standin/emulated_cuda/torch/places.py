"""Keeps which memory lies on the emulated device, and how much of it is taken.

All memory is the host's.  A storage that stands for memory of the device carries an `Allocation`;
one that stands for page-locked memory of the host carries a mark.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from torch import Tensor

# Of an H100 with 80 GB, as its driver states it.
_H100_MEMORY_MIB: Final = 81559
# What the driver, the CUDA context, and the libraries take before the first tensor.
CONTEXT_BYTES: Final = 600 << 20
DEVICE: Final = torch.device("cuda", 0)
_PINNED: Final = "pinned"
# torch allocates memory of a device in multiples of this many bytes.
_GRANULE: Final = 512


def total_bytes() -> int:
    """Returns the memory of the device: EMULATED_CUDA_MEMORY_MIB, or that of an H100."""
    return int(os.environ.get("EMULATED_CUDA_MEMORY_MIB") or _H100_MEMORY_MIB) << 20


class Ledger:
    """Counts the memory that this process has taken on the device.  Bytes."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def take(self, size: int) -> None:
        """Raises torch.OutOfMemoryError when the device has no such room."""
        if self.allocated + size > total_bytes() - CONTEXT_BYTES:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB on the emulated "
                f"device, of whose {total_bytes() / 2**20:.0f} MiB this process has taken "
                f"{self.allocated / 2**20:.0f}"
            )
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def give_back(self, size: int) -> None:
        """Takes back what was taken."""
        self.allocated -= size


ledger: Final = Ledger()


class Allocation:
    """Memory of the device, from now until its storage is freed."""

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = 0
        rounded = -(-size // _GRANULE) * _GRANULE
        ledger.take(rounded)
        self._size = rounded

    def __del__(self) -> None:
        ledger.give_back(self._size)


def is_on_device(value: Any) -> bool:
    """Whether a value is a tensor in the device's memory."""
    return isinstance(value, Tensor) and isinstance(_place_mark(value), Allocation)


def is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor lies in page-locked memory of the host."""
    return _place_mark(tensor) == _PINNED


def put_on_device(tensor: Tensor) -> None:
    """Has the memory of a tensor belong to the device."""
    storage = tensor.untyped_storage()
    if not isinstance(getattr(storage, "emulated_place", None), Allocation):
        vars(storage)["emulated_place"] = Allocation(storage.nbytes())


def pin(tensor: Tensor) -> None:
    """Has the memory of a tensor of the host be page-locked."""
    vars(tensor.untyped_storage())["emulated_place"] = _PINNED


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def requested_place(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool | None:
    """Whether a call names the device, True, or the host, False; None when it names neither.

    name: of torch's function.
    """
    if name in ("cpu", "numpy"):
        return False
    if name == "cuda":
        return True
    for value in (keywords.get("device"), *arguments):
        if isinstance(value, str) and (value == "cpu" or value.startswith("cuda")):
            return value != "cpu"
        if isinstance(value, torch.device):
            return value.type == "cuda"
    if name in ("to", "type_as") and len(arguments) > 1 and isinstance(arguments[1], Tensor):
        return is_on_device(arguments[1])
    return None


def _place_mark(tensor: Tensor) -> Any:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), "emulated_place", None)
