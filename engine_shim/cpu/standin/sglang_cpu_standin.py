"""What SGLang and torch have to be told on a CPU, each through the entry point it offers for that.

The entry points are declared in the ``dist-info`` folder beside this file. So they act in every
process, spawned ones included, that has this folder on its path, and in no other.
"""

from __future__ import annotations

import os


def _wanted() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def answer_amx() -> None:
    """Say that the CPU has AMX tiles; called by torch (group ``torch.backends``) when imported.

    SGLang's only complete CPU attention backend calls itself ``intel_amx`` and asks torch for AMX
    tiles before it offers itself.  The operators of the stand-in need no tiles.
    """
    if _wanted():
        import torch

        vars(torch.cpu)["_is_amx_tile_supported"] = lambda: True


def accept_any_weight() -> None:
    """Send every matrix to the stand-in; called by SGLang (group ``sglang.srt.plugins``).

    SGLang hands a layer to ``sgl_kernel`` only if AMX tiles can hold its weight: bfloat16, sizes in
    multiples of 16 and 32.  The stand-in takes any matrix, and float32 has to pass through it to
    round alike at every batch size.
    """
    if not _wanted():
        return
    import torch
    from sglang.srt.layers import amx_utils, logits_processor

    dtype_fits = amx_utils.dtype_is_supported
    shape_fits = amx_utils.dim_is_supported
    head_fits = logits_processor.use_intel_amx_backend
    amx_utils.dtype_is_supported = lambda weight: (
        weight.dtype == torch.float32 or dtype_fits(weight)
    )
    amx_utils.dim_is_supported = lambda weight: weight.ndim == 2 or shape_fits(weight)
    logits_processor.use_intel_amx_backend = lambda head: (
        head_fits(head) or head.weight.dtype == torch.float32
    )
