"""Draws how many drafts an engine without weights accepts, for each sequence, from a curve.

SGLang can simulate acceptance (SGLANG_SIMULATE_ACC_LEN), with one number for a whole batch and for
every drafter.  As an SGLang plugin of the check's own engines this puts a curve for each drafter
in its place: draft j is accepted with the drafter's probability if those before it were.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

VARIABLE = "GPU_CHECK_ACCEPTANCE"
# Of a chat load: about 3 tokens a step for EAGLE3 with 5 drafts, 5 for DFlash with 15.
ASSUMED: Mapping[str, float] = {"eagle3": 0.75, "dflash": 0.8}


def variables(probabilities: Mapping[str, float] = ASSUMED) -> dict[str, str]:
    """Makes the variables of an engine that accepts drafts with these probabilities."""
    return {VARIABLE: ",".join(f"{name}={value}" for name, value in probabilities.items())}


def register() -> None:
    """Installs the curve in an engine of the check; SGLang calls this as an entry point."""
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    from sglang.srt.speculative import spec_utils

    pairs = (part.partition("=") for part in setting.split(","))
    acceptance = DrawnAcceptance({name: float(value) for name, _, value in pairs})
    # Any length above 0 has SGLang ask; the answer comes from here.
    spec_utils.SIMULATE_ACC_LEN = 1.0
    spec_utils.generate_simulated_accept_index = acceptance.accept


class DrawnAcceptance:
    """Replaces SGLang's `spec_utils.generate_simulated_accept_index`."""

    def __init__(self, probabilities: Mapping[str, float]) -> None:
        self._probabilities = probabilities
        self._survival: dict[tuple[str, int], Any] = {}
        self._block_drafted = False
        self._is_watching = False

    def accept(
        self, accept_index: Any, predict: Any, num_correct_drafts: Any, spec_steps: int, **_: Any
    ) -> Any:
        """Fills `predict` and `num_correct_drafts` [B], as SGLang's own does.

        accept_index, and what is returned: [B, width], each row's tokens in `predict` from its
        first one on; -1 where nothing was accepted.
        """
        import torch

        from lab.cpu_engine.pace.acceptance import write_accepted

        drafter = "dflash" if self._take_block_drafted() else "eagle3"
        device, size = accept_index.device, accept_index.shape[0]
        key = (drafter, spec_steps)
        if key not in self._survival:
            steps = torch.arange(1, spec_steps + 1, device=device)
            self._survival[key] = self._probabilities[drafter] ** steps
        correct = (torch.rand(size, 1, device=device) < self._survival[key]).sum(1)
        return write_accepted(accept_index, predict, num_correct_drafts, correct, spec_steps)

    def _take_block_drafted(self) -> bool:
        """Whether DFlash drafted this step; False in the first step, before the hook is set."""
        second = sys.modules.get("engine_shim.sglang.drafters.dual")
        if second is not None and not self._is_watching:
            self._is_watching = True
            self._watch(second.DualDrafter)
        block_drafted, self._block_drafted = self._block_drafted, False
        return block_drafted

    def _watch(self, drafter: Any) -> None:
        original = drafter.draft

        def draft(second: Any, *arguments: Any) -> Any:
            chain = original(second, *arguments)
            self._block_drafted = chain is not None
            return chain

        drafter.draft = draft
