"""The likeliest tokens of many rows, against those of all logits at once."""

import pytest
import torch

from engine_shim.sglang.learning import verified_step as module
from engine_shim.sglang.learning.verified_step import likeliest_tokens
from tests.support.peak_memory import peak_bytes

ROWS, VOCABULARY, TOP = 50, 300, 7


def at_once(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is read off a copy of all logits, in float64: float32 rounds the sum of large ones."""
    logits = logits.double()
    top_logits, top_tokens = logits.topk(top, dim=-1)
    return top_tokens, (top_logits - logits.logsumexp(-1, keepdim=True)).float()


@pytest.mark.parametrize("passes", [1, 3, ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_those_of_all_logits_at_once(
    passes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = 1 if dtype is torch.float32 else 2
    monkeypatch.setattr(module, "MAX_WORKING_BYTES", copies * 4 * VOCABULARY * -(-ROWS // passes))
    # Of a padded vocabulary.  Some values are alike in 16 bits: those have no order.
    generator = torch.Generator().manual_seed(passes)
    order = torch.stack([torch.randperm(VOCABULARY + 20, generator=generator) for _ in range(ROWS)])
    logits = (order[:, :VOCABULARY].float() / 8).to(dtype)
    logits = torch.nn.functional.pad(logits, (0, 20))[:, :VOCABULARY]
    expected_tokens, expected_logs = at_once(logits, TOP)
    before = logits.clone()
    tokens, logs = likeliest_tokens(logits, TOP)
    assert (tokens.dtype, logs.dtype) == (torch.int32, torch.float32)
    assert torch.equal(logits.gather(1, tokens.long()), logits.gather(1, expected_tokens))
    assert dtype is not torch.float32 or torch.equal(tokens.long(), expected_tokens)
    torch.testing.assert_close(logs, expected_logs)
    assert torch.equal(logits, before)


def test_of_large_numbers_and_of_forbidden_tokens_too() -> None:
    """A grammar gives tokens that may not follow minus infinity."""
    logits = torch.randn(ROWS, VOCABULARY) * 1e4
    logits[:, 5:] = -torch.inf
    tokens, logs = likeliest_tokens(logits, TOP)
    expected_tokens, expected_logs = at_once(logits, TOP)
    torch.testing.assert_close(logs, expected_logs)
    assert torch.equal(tokens[:, :5].long(), expected_tokens[:, :5])
    assert (logs[:, 5:] == -torch.inf).all()


def test_there_are_no_more_than_the_vocabulary_has() -> None:
    tokens, logs = likeliest_tokens(torch.randn(3, 4), 64)
    assert tokens.shape == logs.shape == (3, 4)
    assert tokens.sort().values.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_take_a_small_part_of_what_the_logits_take(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, vocabulary, room = 512, 20_000, 1 << 20
    monkeypatch.setattr(module, "MAX_WORKING_BYTES", room)
    logits = torch.randn(rows, vocabulary).to(dtype)
    result = rows * TOP * (4 + 4)
    # Their conversion and all logs at once would take 82 MB.
    assert result < peak_bytes(lambda: likeliest_tokens(logits, TOP)) < 1.1 * room + result


def test_a_row_that_is_larger_than_the_room_is_a_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_WORKING_BYTES", 1)
    logits = torch.randn(3, VOCABULARY)
    tokens, logs = likeliest_tokens(logits, TOP)
    expected_tokens, expected_logs = at_once(logits, TOP)
    assert torch.equal(tokens.long(), expected_tokens)
    torch.testing.assert_close(logs, expected_logs)
