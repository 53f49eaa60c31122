import pytest
import torch

from lab.gpu_check.acceptance import DrawnAcceptance

ROWS = 20_000


def accept(drawn: DrawnAcceptance, gamma: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What SGLang hands over of rows whose own drafts were all wrong, and what it gets back."""
    width = gamma + 1
    index = torch.full((ROWS, width), -1, dtype=torch.int32)
    index[:, 0] = torch.arange(ROWS, dtype=torch.int32) * width
    predict = torch.zeros(ROWS * width, dtype=torch.int32)
    correct = torch.zeros(ROWS, dtype=torch.int32)
    accepted_tokens = drawn.accept(
        accept_index=index, predict=predict, num_correct_drafts=correct, spec_steps=gamma
    )
    assert accepted_tokens.dtype == torch.int32
    assert (predict == 100).all()
    return accepted_tokens, correct


def test_each_position_is_accepted_with_the_drafters_probability():
    torch.manual_seed(3)
    _, correct = accept(DrawnAcceptance({"eagle3": 0.7, "dflash": 0.9}), 5)
    for position in range(1, 6):
        share = (correct >= position).float().mean().item()
        assert share == pytest.approx(0.7**position, abs=0.012)


def test_a_row_names_its_own_tokens_up_to_the_last_accepted():
    accepted_tokens, correct = accept(DrawnAcceptance({"eagle3": 0.5}), 3)
    offsets = torch.arange(4)
    expected = torch.arange(ROWS)[:, None] * 4 + offsets
    assert torch.equal(
        accepted_tokens, torch.where(offsets <= correct[:, None], expected, -1).int()
    )


def test_without_drafts_there_is_the_bonus_token_alone():
    accepted_tokens, correct = accept(DrawnAcceptance({"eagle3": 1.0}), 0)
    assert accepted_tokens.shape == (ROWS, 1)
    assert not correct.any()


def test_certainty_and_impossibility():
    assert (accept(DrawnAcceptance({"eagle3": 1.0}), 4)[1] == 4).all()
    assert (accept(DrawnAcceptance({"eagle3": 0.0}), 4)[1] == 0).all()
