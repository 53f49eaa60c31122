"""Moves data between host and device, and between streams, without waiting for either."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


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
