"""Window sampling: deterministic, within the streams, in the asked proportions."""

from __future__ import annotations

import numpy as np
import torch

from lab.cpu_engine.models.schedule import WindowSampler

STREAMS = {
    "low": np.arange(0, 500, dtype=np.uint16),
    "high": np.arange(1000, 1050, dtype=np.uint16),
}


def sampler(seed: int) -> WindowSampler:
    return WindowSampler(STREAMS, {"low": 0.75, "high": 0.25}, torch.Generator().manual_seed(seed))


def test_windows_are_contiguous_stretches_of_one_stream() -> None:
    windows = sampler(0).draw(64, 20)
    assert windows.shape == (64, 20)
    assert windows.dtype == torch.int64
    assert bool((windows.diff(dim=1) == 1).all())


def test_the_last_token_of_a_stream_can_be_drawn() -> None:
    assert int(WindowSampler({"high": STREAMS["high"]}, {"high": 1.0}).draw(8, 50)[0, -1]) == 1049


def test_domains_come_in_the_proportions_of_the_mixture() -> None:
    share = float((sampler(1).draw(2000, 1) < 1000).float().mean())
    assert abs(share - 0.75) < 0.04


def test_the_same_seed_draws_the_same_windows() -> None:
    assert torch.equal(sampler(2).draw(8, 10), sampler(2).draw(8, 10))
    assert not torch.equal(sampler(2).draw(8, 10), sampler(3).draw(8, 10))
