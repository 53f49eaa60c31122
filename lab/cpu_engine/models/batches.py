"""Random windows of token streams, mixed over domains."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lab.cpu_engine.models.corpus import Split


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
        """Draws token ids [windows, length], int64."""
        domains = list(self.mixture)
        weights = torch.tensor([self.mixture[domain] for domain in domains], dtype=torch.float32)
        picks = torch.multinomial(weights, windows, replacement=True, generator=self.generator)
        return torch.stack([self._window(domains[int(pick)], length) for pick in picks])

    def _window(self, domain: str, length: int) -> Tensor:
        stream = self.streams[domain]
        start = int(torch.randint(len(stream) - length + 1, (1,), generator=self.generator))
        return torch.from_numpy(stream[start : start + length].astype(np.int64))


def training_sampler(
    splits: Mapping[str, Split], mixture: Mapping[str, float], seed: int
) -> WindowSampler:
    """Makes a sampler of training windows of several domains."""
    streams = {domain: split.train for domain, split in splits.items()}
    return WindowSampler(streams, mixture, torch.Generator().manual_seed(seed))


def held_out_sampler(splits: Mapping[str, Split], domain: str) -> WindowSampler:
    """Makes a sampler of one domain's validation windows, the same ones for every model."""
    streams = {domain: splits[domain].validation}
    return WindowSampler(streams, {domain: 1.0}, torch.Generator().manual_seed(1))
