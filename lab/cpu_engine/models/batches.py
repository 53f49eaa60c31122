"""Random windows of token streams, mixed over domains."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass
class WindowSampler:
    """Draws windows of tokens, each from one domain, chosen by the weights of ``mixture``.

    ``streams`` maps a domain to its token ids [tokens].  The state of ``generator`` is all the
    state there is.
    """

    streams: Mapping[str, npt.NDArray[np.uint16]]
    mixture: Mapping[str, float]
    generator: torch.Generator = field(default_factory=torch.Generator)

    def draw(self, windows: int, length: int) -> Tensor:
        """Token ids [windows, length], int64."""
        domains = list(self.mixture)
        weights = torch.tensor([self.mixture[domain] for domain in domains], dtype=torch.float32)
        picks = torch.multinomial(weights, windows, replacement=True, generator=self.generator)
        return torch.stack([self._window(domains[int(pick)], length) for pick in picks])

    def _window(self, domain: str, length: int) -> Tensor:
        stream = self.streams[domain]
        start = int(torch.randint(len(stream) - length + 1, (1,), generator=self.generator))
        return torch.from_numpy(stream[start : start + length].astype(np.int64))
