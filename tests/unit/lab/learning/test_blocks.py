"""Counting accepted drafts: the same models as without a cache, and the sampling of the paper."""

from dataclasses import replace

import pytest
import torch

from engine_shim.sglang.training.blocks import LLAMA
from lab.learning.sd2 import CachedModel, generate_answers, mean_accepted_drafts
from tests.support.training_rounds import LAYERS, SHAPE, make_target
from trainer.sd2 import Sd2Draft, Sd2Shape, greedy_chain

NARROW = replace(SHAPE, layers=2, hidden=16, mlp=24, head_dim=8)


@pytest.fixture
def draft() -> Sd2Draft:
    torch.manual_seed(3)
    sd2_draft = Sd2Draft(Sd2Shape(NARROW, SHAPE.hidden, LAYERS, LLAMA, tied=False))
    with torch.no_grad():
        for parameter in sd2_draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return sd2_draft.eval()


def prompts() -> torch.Tensor:
    return torch.randint(SHAPE.vocabulary, (5, 6), generator=torch.Generator().manual_seed(1))


def dice() -> torch.Generator:
    return torch.Generator().manual_seed(2)


@torch.no_grad()
def test_a_cut_cache_continues_as_if_run_at_once(draft: Sd2Draft) -> None:
    tokens = torch.randint(SHAPE.vocabulary, (3, 12), generator=dice())
    g = torch.randn(3, 12, SHAPE.hidden)
    whole = draft(tokens, g)
    model = CachedModel(draft.decoder, draft=draft)
    model.run(tokens, torch.randn(3, 12, SHAPE.hidden))
    again = CachedModel(draft.decoder, draft=draft)
    first, _ = again.run(tokens[:, :7], g[:, :7])
    again.run(tokens[:, 7:], torch.randn(3, 5, SHAPE.hidden))
    rest, _ = again.cut(7).run(tokens[:, 7:], g[:, 7:])
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_greedy_blocks_are_the_students_chains(draft: Sd2Draft) -> None:
    target = make_target()
    answers = generate_answers(target, LAYERS, prompts(), 62, 0.0, dice())
    assert torch.equal(target(answers.tokens)[:, 5:-1].argmax(-1), answers.tokens[:, 6:])
    # A drafter that is right occasionally, as both end in the same few tokens.
    draft.decoder.lm_head.weight[:] = 0  # type: ignore[union-attr]
    common = answers.tokens[:, 20:].flatten().mode().values
    draft.decoder.lm_head.weight[common] = 1  # type: ignore[union-attr]
    draft.decoder.model.norm.weight.abs_()
    for steered in (True, False):
        counts = []
        for newest in range(6, 67, 8):
            known, tokens = answers.features[:, :newest], answers.tokens[:, : newest + 1]
            chain = greedy_chain(draft, known, tokens, 4, steered=steered)
            truth = answers.tokens[:, newest + 1 : newest + 5]
            counts.append((chain == truth).int().cumprod(1).sum(1).float())
        expected = float(torch.stack(counts).mean())
        assert 0 < expected < 4
        assert mean_accepted_drafts(draft, answers, 4, dice(), steered=steered) == pytest.approx(
            expected
        )


@torch.no_grad()
def test_sampled_drafts_are_accepted_as_often_as_distributions_overlap(draft: Sd2Draft) -> None:
    """The first draft of many blocks: the expected acceptance is the sum of the smaller shares."""
    target = make_target()
    many = prompts()[:1].expand(4000, -1)
    answers = generate_answers(target, LAYERS, many, 2, 1.0, dice())
    acceptance_rate = mean_accepted_drafts(draft, answers, 1, dice(), steered=True)
    newest = 6
    g = draft.steering(answers.features[:, :newest])
    own = draft(answers.tokens[:, 1 : newest + 1], g)[:, -1].softmax(-1)
    theirs = target(answers.tokens[:, : newest + 1])[:, -1].softmax(-1)
    overlap = torch.minimum(own, theirs).sum(-1).mean()
    assert acceptance_rate == pytest.approx(float(overlap), abs=0.02)
