"""What is copied of a verified step, and what that takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.sglang.learning.signal_runs import (
    DeviceBudget,
    VerifiedStepCopy,
    copy_verified_step,
    verified_step_bytes,
)
from engine_shim.sglang.learning.verified_step import Verification

REQUESTS, GAMMA, WIDTH, HIDDEN, VOCABULARY = 3, 2, 8, 6, 20
ROWS = REQUESTS * (GAMMA + 1)


def verification(features: torch.Tensor) -> Verification:
    batch: Any = SimpleNamespace(
        reqs=[SimpleNamespace(rid=f"{number}") for number in range(REQUESTS)],
        seq_lens=torch.arange(REQUESTS),
        spec_info=SimpleNamespace(draft_token=torch.arange(ROWS).view(REQUESTS, -1)),
    )
    output = SimpleNamespace(next_token_logits=torch.randn(ROWS, VOCABULARY))
    accepted = torch.ones(REQUESTS, dtype=torch.int32)
    return Verification(
        batch, SimpleNamespace(logits_output=output, accept_lens=accepted), features
    )


def tensors_of(canvas: VerifiedStepCopy) -> list[torch.Tensor]:
    parts = [getattr(canvas, name) for name in VerifiedStepCopy.__slots__]
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("top", [4, 64])
@pytest.mark.parametrize("final", [None, torch.randn(ROWS, HIDDEN)])
@pytest.mark.parametrize(
    "features",
    [
        torch.randn(ROWS, WIDTH),
        torch.randn(ROWS, WIDTH).bfloat16(),
        # Two drafters: the hidden states of each lie side by side.
        torch.randn(ROWS, 5 * WIDTH)[:, WIDTH : 2 * WIDTH],
    ],
)
def test_the_bytes_are_known_before_anything_is_copied(
    features: torch.Tensor, final: torch.Tensor | None, top: int
) -> None:
    step_verification = verification(features)
    canvas = copy_verified_step(step_verification, top, final)
    storages = [tensor.untyped_storage() for tensor in tensors_of(canvas)]
    assert verified_step_bytes(step_verification, top, final) == sum(
        storage.nbytes() for storage in storages
    )
    assert torch.equal(canvas.features, features.bfloat16())
    assert canvas.features.data_ptr() != features.data_ptr()
    assert canvas.top_tokens.shape == (ROWS, min(top, VOCABULARY))


def test_a_budget_is_never_exceeded_and_what_is_given_back_can_be_had_again() -> None:
    budget = DeviceBudget(10)
    assert budget.reserve(6)
    assert not budget.reserve(5)
    assert budget.reserve(4)
    budget.release_read(6)
    assert budget.used_bytes == 4
    assert not budget.reserve(7)
    budget.release(4)
    assert budget.reserve(10)
    assert budget.used_bytes == 10
