"""Prices an update at the widths of published drafters, without running one.

The arithmetic is counted, and the memory that moves is that of `UpdateCosts`: together they are the
seconds of an H100, as on the paced engine.  So the price does not depend on this machine.
"""

from functools import cache
from typing import Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from controller.core.cost.roofline import device
from controller.core.engine_spec import Arm
from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from engine_shim.sglang.training.online import OnlineSettings
from lab.cpu_engine.pace.step_costs import OWN, load_step_costs
from lab.cpu_engine.pace.update_costs import DEVICE, OPTIMISER_BYTES, UTILISATION, WEIGHT_BYTES

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


# A step of one request with three drafts on that device (table h100-llama3.1-8b).
_STEP_ARM: Final = Arm(OWN, 3)


@cache
def update_flops(drafter: str, window: int) -> float:
    """Counts an update of one request, forward and backward.

    drafter: EAGLE3 or DFlash.  window: positions that the default anchors attend to.
    """
    with torch.device("meta"):
        student, drafts = _student(drafter)
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


@cache
def update_price(drafter: str, window: int, optimiser_steps: int = 1) -> float:
    """Computes the device's seconds of an update of one request, over those of a step."""
    gpu = device(DEVICE)
    with torch.device("meta"):
        student, drafts = _student(drafter)
        parameters = sum(part.numel() for part in student.parameters())
    # A block is drafted in one pass, which reads the weights once.
    passes = drafts if drafter == "EAGLE3" else 1
    memory = parameters * (OPTIMISER_BYTES + 2 * WEIGHT_BYTES * passes) / gpu.bandwidth
    arithmetic = update_flops(drafter, window) / (UTILISATION * gpu.peak_flops)
    step = load_step_costs("h100-llama3.1-8b", (_STEP_ARM.gamma,), 1)
    seconds = step.decode_seconds(_STEP_ARM, 1, int(step.surface.kv_reference))
    return optimiser_steps * (memory + arithmetic) / seconds


def _student(drafter: str) -> tuple[Eagle3Student | DFlashStudent, int]:
    """Makes a student, and says how many drafts an update is for; to be called on `meta`."""
    if drafter == "EAGLE3":
        embedding = torch.empty(_LLAMA.vocabulary, _LLAMA.hidden)
        return (
            Eagle3Student(_EAGLE3, embedding, tokens=torch.arange(_EAGLE3.drafts)),
            _EAGLE3_DRAFTS,
        )
    student = DFlashStudent(_DFLASH, torch.empty(_QWEN.vocabulary, _QWEN.hidden))
    return student, student.most_drafts
