"""TIDE's mixed pools (arXiv 2602.05145, section 5.5 and appendix A.4) by its own card rates.

The rates are those of Figure 11 as the text gives them.  Of Figures 10 and 12 only what the text
states in numbers can be compared; the bars are drawn, not tabled.
"""

from dataclasses import dataclass

from controller.core.training.gpu_allocation import Demand, Pool, evaluate

# Inference and training rate of one card, over an MI250's.
RATES = {"H100": (6.76, 2.44), "MI300X": (4.42, 1.77), "MI250": (1.0, 1.0)}


@dataclass(frozen=True, slots=True)
class StatedGain:
    """high serve, all of low train.  relative: as the paper has it."""

    high: str
    high_cards: int
    low: str
    low_cards: int
    speedup: float
    relative: float

    @property
    def gpus(self) -> str:
        """Describes the pool for people."""
        return f"{self.high_cards} {self.high} serve, {self.low_cards} {self.low} train"


STATED = (
    StatedGain("H100", 8, "MI250", 4, 1.15, 1.08),  # Figure 10, ShareGPT
    StatedGain("H100", 8, "MI250", 4, 1.30, 1.22),  # Figure 10, Science
    StatedGain("H100", 4, "MI250", 1, 1.30, 1.26),  # Figure 12
    StatedGain("MI300X", 2, "MI250", 1, 1.10, 0.99),  # Figure 12
)


def relative_throughput(stated: StatedGain) -> float:
    """Computes the throughput over that of all GPUs serving without speculation."""
    pools = [
        Pool(stated.high, stated.high_cards, *RATES[stated.high]),
        Pool(stated.low, stated.low_cards, *RATES[stated.low]),
    ]
    return evaluate(pools, Demand(stated.speedup), (0, stated.low_cards)).relative
