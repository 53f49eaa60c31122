"""Splits and joins fused matrices: a live model keeps them whole, a checkpoint their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from engine_shim.sglang.training.blocks import DecoderShape


def split(state: Mapping[str, Tensor], shape: DecoderShape) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) as a checkpoint stores a live model's state."""
    for name, tensor in state.items():
        if "qkv_proj" in name:
            sizes = [shape.query_width, shape.kv_width, shape.kv_width]
            for part, rows in zip(
                ("q_proj", "k_proj", "v_proj"), torch.split(tensor, sizes), strict=True
            ):
                yield name.replace("qkv_proj", part), rows
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield name.replace("gate_up_proj", part), rows
        else:
            yield name, tensor


def join(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state of a live model, in float32, of what a checkpoint stores.

    Raises KeyError where a part of a fused matrix is missing.
    """
    state = {}
    for name, part in parts.items():
        if "q_proj" in name:
            group = [
                parts[name.replace("q_proj", piece)] for piece in ("q_proj", "k_proj", "v_proj")
            ]
            state[name.replace("q_proj", "qkv_proj")] = torch.cat(group)
        elif "gate_proj" in name:
            state[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [part, parts[name.replace("gate_proj", "up_proj")]]
            )
        elif not any(piece in name for piece in ("k_proj", "v_proj", "up_proj")):
            state[name] = part
    return {
        name: part.float() if part.is_floating_point() else part for name, part in state.items()
    }
