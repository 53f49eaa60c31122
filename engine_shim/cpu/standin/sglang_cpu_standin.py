"""The two things a CPU without AMX has to be told, each through the entry point its framework offers for it.

Both are declared in the ``dist-info`` folder beside this file, so they act in every process, spawned ones included, that
has this folder on its path, and in no other.
"""

from __future__ import annotations

import os


def answer_amx() -> None:
    """Entry point of torch's ``torch.backends`` group, called at the end of ``import torch``.

    SGLang's only complete CPU attention backend calls itself ``intel_amx`` and asks torch for AMX tiles before it offers
    itself. The stand-in's operators need no tiles, so the question is answered with yes.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    import torch

    setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


def accept_any_weight() -> None:
    """Entry point of SGLang's ``sglang.srt.plugins`` group, called early in every SGLang process.

    SGLang hands a linear layer to ``sgl_kernel`` only if AMX tiles can hold its weight: bfloat16, dimensions in multiples
    of 16 and 32. The stand-in takes any shape, and float32 must pass through it to round alike at every batch size.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    import torch
    from sglang.srt.layers import amx_utils

    dtype_fits, shape_fits = amx_utils.dtype_is_supported, amx_utils.dim_is_supported
    amx_utils.dtype_is_supported = lambda weight: weight.dtype == torch.float32 or dtype_fits(weight)
    amx_utils.dim_is_supported = lambda weight: weight.ndim == 2 or shape_fits(weight)
