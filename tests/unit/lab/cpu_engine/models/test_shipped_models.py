"""The folders in the repository: what their files hold, and that they are what they claim to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

import lab.cpu_engine.models
from lab.cpu_engine.models._draft import agreement, teach
from lab.cpu_engine.models._target import branch_shares
from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.cpu_engine.models.recipe import MIMO, SHALLOW, Recipe
from lab.cpu_engine.models.targets import Qwen2Target, Qwen3Target, load_predictor, load_target
from trainer.checkpoint import load_dflash, load_eagle3
from trainer.sd2 import divergence, load_sd2

MODELS = Path(lab.cpu_engine.models.__file__).parent
SHALLOW_SET = MODELS / "shallow"
MIMO_SET = MODELS / "mimo"
RECIPE = Recipe()
CEILINGS = {"code": 3.8, "prose": 4.0, "json": 0.6, "csv": 1.2}
"""Nats a token; the measured losses stand in the README beside the models."""


@pytest.fixture(scope="module")
def target() -> Qwen3Target:
    return load_target(MODELS / "target").requires_grad_(False)


def windows(domain: str, count: int, length: int) -> Tensor:
    return torch.tensor(held_out_prompts(domain, count, length, seed=17))


def test_the_target_is_the_recipes(target: Qwen3Target) -> None:
    assert target.shape == RECIPE.shape


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_target_equals_transformers_reading_of_its_folder(
    target: Qwen3Target, domain: str
) -> None:
    theirs = Qwen3ForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    tokens = windows(domain, 2, 200)
    with torch.no_grad():
        torch.testing.assert_close(target(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("domain", "nats"), CEILINGS.items())
def test_the_target_knows_its_domains(target: Qwen3Target, domain: str, nats: float) -> None:
    tokens = windows(domain, 8, 257)
    logits = target(tokens[:, :-1])
    assert functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item() < nats


def test_every_layer_of_the_target_does_something(target: Qwen3Target) -> None:
    tokens = torch.cat([windows(domain, 2, 128) for domain in DOMAINS])
    assert min(branch_shares(target, tokens)) > RECIPE.least_branch_share


def agreements(target: Qwen3Target, name: str, domain: str) -> list[float]:
    student = load_eagle3(MODELS / name, target.model.embed_tokens.weight)
    return agreement(student, teach(target, student, windows(domain, 16, 134), 6), 6)


def test_the_shallow_set_is_its_recipes_and_speculates() -> None:
    target = load_target(SHALLOW_SET / "target").requires_grad_(False)
    assert target.shape == SHALLOW.shape
    embedding = target.model.embed_tokens.weight
    student = load_eagle3(SHALLOW_SET / "draft-mixed", embedding)
    assert student.shape == SHALLOW.draft_shape
    assert min(agreement(student, teach(target, student, windows("json", 16, 134), 6), 6)) > 0.6
    block = load_dflash(SHALLOW_SET / "dflash", embedding).shape
    assert block == SHALLOW.block_shape(block.mask_token)
    assert load_sd2(SHALLOW_SET / "sd2").shape == SHALLOW.sd2_shape(SHALLOW.sd2["sd2"])


def test_the_mimo_set_is_its_recipes_and_both_of_its_drafters_speculate() -> None:
    target = load_target(MIMO_SET / "target").requires_grad_(False)
    assert isinstance(target, Qwen2Target)
    assert target.shape == MIMO.shape
    embedding = target.model.embed_tokens.weight
    predictor = load_predictor(MIMO_SET / "target", embedding)
    assert predictor.shape == MIMO.predictor_shape
    for domain, least in (("json", 0.6), ("prose", 0.5)):
        lesson = teach(target, predictor, windows(domain, 16, 134), 6)
        assert min(agreement(predictor, lesson, 6)) > least
    block = load_dflash(MIMO_SET / "dflash", embedding)
    assert block.shape == MIMO.block_shape(block.shape.mask_token)


@pytest.mark.parametrize("domain", ["json", "csv"])
def test_the_mixed_draft_follows_regular_text_to_the_sixth_step(
    target: Qwen3Target, domain: str
) -> None:
    assert min(agreements(target, "draft-mixed", domain)) > 0.6


def test_the_code_draft_is_lost_off_its_domain(target: Qwen3Target) -> None:
    code = agreements(target, "draft-code", "code")
    for domain in ("json", "csv"):
        assert agreements(target, "draft-code", domain)[0] < 0.6 * code[0]
        assert agreements(target, "draft-mixed", domain)[0] > code[0]


@pytest.mark.parametrize("domain", DOMAINS)
def test_steering_brings_the_draft_nearer_to_the_target(target: Qwen3Target, domain: str) -> None:
    draft = load_sd2(MODELS / "sd2")
    assert draft.shape == RECIPE.sd2_shape(RECIPE.sd2["sd2"])
    tokens = windows(domain, 6, 200)
    with torch.no_grad():
        logits, features = target.logits_and_features(tokens, draft.shape.feature_layers)
        known = torch.cat(features, dim=-1)
        for steps_back in (0, 3):
            back = (torch.arange(199) - steps_back).clamp_min(0).expand(6, 199)
            steered = divergence(draft, tokens, logits, known, back)
            assert steered < 0.995 * divergence(draft, tokens, logits, None, back)
