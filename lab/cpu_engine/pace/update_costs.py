"""Prices an online update of a drafter, as step_costs.py prices a pass.

No table has it, so it is derived by a roofline, for the EAGLE3 drafter that was published for
Llama-3.1-8B, learning in bfloat16 with AdamW on the H100 that also serves:

  parameters   `fc`, one layer whose attention reads two hidden states, and a head of 32,000 tokens
  arithmetic   6 operations a parameter and token (forward, and twice that backward) for each
               position of the window and each draft position it is unrolled to, at UTILISATION of
               the device's peak
  memory       OPTIMISER_BYTES a parameter, and its weight read twice for each draft position

An update of one request, 48 positions and 3 drafts takes 6.6 ms of the whole device, 0.7 of a step
that drafts; of four requests 8.7 ms, 0.9 of a step.  Fits to the tables of Test-Time Speculation
(arXiv:2605.09329; lab/papers/stride_simulation.py) give 0.5 to 0.7 of a step (Table 3) and 1.2
(Table 8), with the baseline that the fits imply.

The device is shared: beside an update, a step takes 1 + `share` times as long, and the update then
lasts (1 + share) / share times what it would take alone.  Together they lose nothing and gain
nothing by running side by side: an update takes its own seconds from the steps.
"""

import math
from dataclasses import dataclass

from controller.core.cost.roofline import device

HIDDEN, MLP, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, DRAFT_VOCABULARY = 4096, 14336, 32, 8, 128, 32000
PARAMETERS = (
    3 * HIDDEN * HIDDEN
    + 2 * HIDDEN * (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_SIZE
    + HEADS * HEAD_SIZE * HIDDEN
    + 3 * HIDDEN * MLP
    + DRAFT_VOCABULARY * HIDDEN
)
# Weight and both moments in float32, read and written; the gradient, written and read; the weight
# in bfloat16, written.
OPTIMISER_BYTES = 3 * 8 + 8 + 2
WEIGHT_BYTES = 2
UTILISATION = 0.5
DEVICE = "H100"


@dataclass(frozen=True, slots=True)
class UpdateCosts:
    """Imposes what an update costs, in seconds of the model's time.

    scale: the student is so many times as expensive as the published one.  share: by which share a
    step beside an update takes longer.

    Raises ValueError for one that is no finite number above 0.
    """

    scale: float = 1.0
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("scale", "share"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"an update's {name} is a number above 0, not {value}")

    def work_seconds(self, requests: int, positions: int, drafts: int) -> float:
        """Seconds of an update alone on the device, which are what the steps beside it lose.

        requests, positions: of its round.  drafts: positions that it is unrolled to.
        """
        gpu = device(DEVICE)
        operations = 6.0 * PARAMETERS * requests * positions * drafts
        transferred = PARAMETERS * (OPTIMISER_BYTES + 2 * WEIGHT_BYTES * drafts)
        arithmetic = operations / (UTILISATION * gpu.peak_flops)
        memory = transferred / gpu.bandwidth
        return self.scale * (arithmetic + memory)

    def seconds(self, requests: int, positions: int, drafts: int) -> float:
        """Seconds from the hand-over of a round to the landing of its weights."""
        work = self.work_seconds(requests, positions, drafts)
        return work * (1 + self.share) / self.share
