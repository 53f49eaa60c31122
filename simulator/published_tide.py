"""TIDE's measurements (arXiv 2602.05145): the latencies of Table 5."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TideModel:
    """One column of Table 5: EAGLE-3 in front of a target on H100 GPUs under tensor parallelism.

    target_ms: T(n) at n = 1, 2, 4, ... tokens in one pass; it ends where the table does.
    draft_ms: D_0, one pass of the drafter, whatever the batch.  layers: of the target (model card).
    """

    target_ms: tuple[float, ...]
    draft_ms: float
    layers: int

    @property
    def tokens(self) -> NDArray[np.float64]:
        """The n of `target_ms`."""
        return np.exp2(np.arange(len(self.target_ms), dtype=np.float64))

    @property
    def last_slope(self) -> float:
        """Seconds that one more token adds to the largest pass in the table."""
        n = self.tokens
        return float((self.target_ms[-1] - self.target_ms[-2]) / 1e3 / (n[-1] - n[-2]))

    def target_seconds(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Interpolates T(n) linearly; beyond the table it keeps the last slope."""
        n = self.tokens
        inside: NDArray[np.float64] = np.interp(tokens, n, np.array(self.target_ms) / 1e3)
        beyond: NDArray[np.float64] = np.maximum(tokens - n[-1], 0.0) * self.last_slope
        return inside + beyond

    def step_seconds(self, batch_sizes: NDArray[np.float64], gamma: int) -> NDArray[np.float64]:
        """Computes gamma D_0 + T(B (gamma + 1)), as Eq. 3 has it, in the shape of batch_sizes."""
        return gamma * self.draft_ms / 1e3 + self.target_seconds(batch_sizes * (gamma + 1))

    def max_batch_size(self, gamma_max: int) -> int:
        """Largest batch whose passes lie in the table up to gamma_max; 0 if none does."""
        return int(self.tokens[-1]) // (gamma_max + 1)


TIDE_MODELS: Mapping[str, TideModel] = {
    "tide-gpt-oss-120b": TideModel(
        (3.416, 3.844, 4.341, 5.236, 6.123, 7.637, 9.345, 11.79, 15.50, 21.50), 0.393, 36
    ),
    "tide-qwen3-235b": TideModel(
        (9.057, 10.07, 11.86, 14.68, 17.84, 23.47, 26.68, 31.46), 0.137, 94
    ),
    "tide-llama4-scout": TideModel(
        (6.461, 7.953, 8.932, 11.01, 13.61, 16.82, 19.58, 23.82, 27.89, 40.86), 0.330, 48
    ),
    "tide-llama3.3-70b": TideModel(
        (15.50, 16.00, 16.11, 16.36, 17.10, 18.45, 19.00, 21.38, 27.54, 64.76), 0.843, 80
    ),
}
