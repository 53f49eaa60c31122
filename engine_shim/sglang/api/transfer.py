"""Copies small lists to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: Sequence[int], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Returns `values` as a tensor on `device`, which work launched from now on finds there.

    `torch.tensor(values, device=...)` copies from pageable memory and therefore waits until the
    device has done everything that was launched before.
    """
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)
