"""Lets SGLang run in float32 on CUDA, as an SGLang plugin of the check's own engines.

The parts that compare every token run in float32.  sglang-kernel normalises half and bfloat16 only,
and SGLang calls it on CUDA whatever the type is; SGLang's own layer has the torch code as well.  A
pass without a graph is handed embeddings in bfloat16, which a DFlash drafter in float32 cannot
multiply.
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
    from sglang.srt.models.dflash import DFlashDraftModel

    kernel = RMSNorm.forward_cuda

    def forward_cuda(layer: Any, x: Any, *arguments: Any, **named: Any) -> Any:
        forward = layer.forward_native if x.dtype == torch.float32 else kernel.__get__(layer)
        return forward(x, *arguments, **named)

    RMSNorm.forward_cuda = forward_cuda

    draft = DFlashDraftModel.forward

    def forward(model: Any, *arguments: Any, input_embeds: Any = None, **named: Any) -> Any:
        if input_embeds is not None:
            input_embeds = input_embeds.to(next(model.parameters()).dtype)
        return draft(model, *arguments, input_embeds=input_embeds, **named)

    DFlashDraftModel.forward = forward
