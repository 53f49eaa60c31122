"""What is collected of a step, without an engine around it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.sglang.collect import Collector
from engine_shim.sglang.settings import PluginSettings
from engine_shim.sglang.verification import Verification
from engine_shim.training.signals import SignalStore

GAMMA, STEPS, ACCEPTED = 3, 12, 3
WIDTH, VOCABULARY = 8, 20


def verification(step: int, *, by_learner: bool) -> Verification:
    rows = GAMMA + 1
    batch: Any = SimpleNamespace(
        reqs=[SimpleNamespace(rid="one")],
        seq_lens=torch.tensor([100 + step * ACCEPTED]),
        spec_info=SimpleNamespace(draft_token=torch.arange(rows) + step),
    )
    output = SimpleNamespace(next_token_logits=torch.randn(rows, VOCABULARY))
    result: Any = SimpleNamespace(logits_output=output, accept_lens=torch.tensor([ACCEPTED]))
    return Verification(batch, result, torch.randn(rows, WIDTH), by_learner)


@pytest.mark.parametrize(
    ("by_learner", "accepted", "tried"),
    [(True, STEPS * (ACCEPTED - 1), STEPS * ACCEPTED), (False, 0, 0)],
)
def test_only_the_learners_own_drafts_are_counted(
    tmp_path: Path, *, by_learner: bool, accepted: int, tried: int
) -> None:
    """Positions are kept whoever drafted them."""
    settings = PluginSettings(signals_folder=str(tmp_path), signals_top=4)
    collector = Collector(settings, None)
    for step in range(STEPS):
        collector.after_verify(verification(step, by_learner=by_learner), collecting=True)
    collector.close()
    (signal,) = SignalStore(tmp_path, 1 << 20).read()
    assert (signal.start, len(signal.tokens)) == (100, STEPS * ACCEPTED)
    assert (signal.accepted, signal.tried) == (accepted, tried)
