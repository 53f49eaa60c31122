"""Computes RMSNorm of float32 in torch, as an SGLang plugin of the check's own engines.

sglang-kernel normalises half and bfloat16 only, and SGLang calls it on CUDA whatever the type is;
the parts that compare every token run in float32.  SGLang's own layer has the torch code as well.
"""

import os
import sys
from typing import Any

VARIABLE = "GPU_CHECK_FLOAT32_RMSNORM"
_SCHEDULER = "sglang.srt.managers.scheduler"


def register() -> None:
    """Routes float32 to torch in a process that runs a model; SGLang calls this in each."""
    if os.environ.get(VARIABLE) != "1" or _SCHEDULER not in sys.modules:
        return
    import torch
    from sglang.srt.layers.layernorm import RMSNorm

    kernel = RMSNorm.forward_cuda

    def forward_cuda(layer: Any, x: Any, *arguments: Any, **named: Any) -> Any:
        forward = layer.forward_native if x.dtype == torch.float32 else kernel.__get__(layer)
        return forward(x, *arguments, **named)

    RMSNorm.forward_cuda = forward_cuda
