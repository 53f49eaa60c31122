"""Counts the arithmetic of an update at the widths of published drafters, without running one."""

from functools import cache
from typing import Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from engine_shim.training.blocks import DecoderShape
from engine_shim.training.dflash import DFlashShape, DFlashStudent
from engine_shim.training.eagle3 import Eagle3Shape, Eagle3Student
from engine_shim.training.online import OnlineSettings

# Of Llama-3.1-8B and its EAGLE3 drafter (yuhuili/EAGLE3-LLaMA3.1-Instruct-8B).
_LLAMA: Final = DecoderShape(
    hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, layers=1, vocabulary=128256
)
_EAGLE3: Final = Eagle3Shape(_LLAMA, (2, 16, 29), draft_vocabulary=32000)
_EAGLE3_DRAFTS: Final = 3
# Of Qwen3-8B and its DFlash drafter (z-lab/Qwen3-8B-DFlash-b16).
_QWEN: Final = DecoderShape(
    hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=12288, layers=5, vocabulary=151936
)
_DFLASH: Final = DFlashShape(_QWEN, (1, 9, 17, 25, 33), block=16, mask_token=151669)


@cache
def update_flops(drafter: str, window: int) -> float:
    """Counts an update of one request, forward and backward.

    drafter: EAGLE3 or DFlash.  window: positions that the default anchors attend to.
    """
    with torch.device("meta"):
        student: Eagle3Student | DFlashStudent
        if drafter == "EAGLE3":
            drafts = _EAGLE3_DRAFTS
            embedding = torch.empty(_LLAMA.vocabulary, _LLAMA.hidden)
            student = Eagle3Student(_EAGLE3, embedding, tokens=torch.arange(_EAGLE3.drafts))
        else:
            student = DFlashStudent(_DFLASH, torch.empty(_QWEN.vocabulary, _QWEN.hidden))
            drafts = student.most_drafts
        width = len(student.shape.feature_layers) * student.shape.decoder.hidden
        with FlopCounterMode(display=False) as counted:
            unrolled = student.unroll(
                torch.empty(1, window, width),
                torch.zeros(1, window + drafts + 1, dtype=torch.long),
                drafts,
                first_anchor=window - OnlineSettings().anchors,
                positions=torch.arange(window)[None],
                valid=torch.ones(1, window, dtype=torch.bool),
            )
            torch.autograd.backward(unrolled, [torch.ones_like(logits) for logits in unrolled])
    return float(counted.get_total_flops())
