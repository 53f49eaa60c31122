"""The maker, end to end on a recipe of seconds: every file it promises, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import lab.cpu_engine.models
from engine_shim.sglang.training.blocks import DecoderShape
from lab.cpu_engine.models import corpus, edits
from lab.cpu_engine.models.edits import KINDS, load_edits
from lab.cpu_engine.models.make import make, make_edits
from lab.cpu_engine.models.prompts import DOMAINS, LONGEST_PROMPT, PASSAGES, passage_file
from lab.cpu_engine.models.recipe import DraftRecipe, EditRecipe, Recipe, Sd2Recipe
from lab.cpu_engine.models.schedule import StepBudget
from lab.cpu_engine.models.targets import Qwen2Target, load_predictor, load_target
from trainer.checkpoint import load_dflash, load_eagle3
from trainer.sd2 import load_sd2

SHAPE = DecoderShape(hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=48, layers=6)
A_FEW = StepBudget(steps=2, seconds=60)
FEW = {"code": 40, "prose": 250, "json": 40, "csv": 60}


def recipe(least_branch_share: float = 0.0) -> Recipe:
    return Recipe(
        shape=SHAPE,
        shallow_layers=2,
        shallow_budget=A_FEW,
        full_budget=A_FEW,
        least_branch_share=least_branch_share,
        drafts={"draft-small": DraftRecipe({"json": 1.0}, A_FEW)},
        blocks={"block-small": DraftRecipe({"json": 1.0}, A_FEW)},
        sd2={"steered-small": Sd2Recipe({"json": 1.0}, 2, 2)},
    )


@pytest.fixture(scope="module")
def few_texts(texts: dict[str, list[str]]) -> dict[str, list[str]]:
    """Just enough for every held-out passage."""
    return {domain: documents[: FEW[domain]] for domain, documents in texts.items()}


def test_a_recipe_becomes_folders(few_texts: dict[str, list[str]], tmp_path: Path) -> None:
    make(recipe(), tmp_path, few_texts)
    target = load_target(tmp_path / "target")
    assert target.shape == SHAPE
    draft = load_eagle3(tmp_path / "draft-small", target.model.embed_tokens.weight)
    assert draft.shape == recipe().draft_shape
    blocks = load_dflash(tmp_path / "block-small", target.model.embed_tokens.weight)
    assert blocks.shape == recipe().block_shape(blocks.shape.mask_token)
    steered = load_sd2(tmp_path / "steered-small")
    assert steered.shape == recipe().sd2_shape(recipe().sd2["steered-small"])
    assert any(part.abs().max() > 0 for part in steered.steer.parameters())
    tokenizer = Tokenizer.from_file(str(tmp_path / "target/tokenizer.json"))
    for domain in DOMAINS:
        passages = np.load(passage_file(tmp_path / "held_out", domain))
        assert blocks.shape.mask_token not in passages
        assert blocks.shape.mask_token != tokenizer.token_to_id(corpus.DOCUMENT_TOKEN)
    for domain in DOMAINS:
        passages = np.load(passage_file(tmp_path / "held_out", domain))
        assert passages.shape == (PASSAGES, LONGEST_PROMPT)
        assert passages.max() < corpus.VOCABULARY_SIZE


@pytest.mark.nightly
def test_a_set_that_edits_code_has_a_target_a_draft_and_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 40 files of the library; the shipped target that it starts from is the real one."""
    some = list(edits._paths())[:400:10]
    monkeypatch.setattr(edits, "_paths", lambda: iter(some))
    shipped = Path(lab.cpu_engine.models.__file__).parent
    kinds = dict.fromkeys(KINDS, 1.0)
    make_edits(EditRecipe(kinds, A_FEW, A_FEW, A_FEW), shipped, tmp_path, keep_target=False)
    target = load_target(tmp_path / "target")
    assert target.shape == load_target(shipped / "shallow" / "target").shape
    load_eagle3(tmp_path / "draft", target.model.embed_tokens.weight)
    kept = load_edits(tmp_path)
    assert {edit.kind for edit in kept} == set(KINDS)
    tokenizer = Tokenizer.from_file(str(tmp_path / "target/tokenizer.json"))
    (licensed, *_) = (edit for edit in kept if edit.kind == "licence")
    assert tokenizer.decode(licensed.answer).startswith("# Licensed under")


def test_a_second_set_shares_the_tokenizer_and_the_held_out_text(
    few_texts: dict[str, list[str]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    predictor = DraftRecipe({"json": 1.0}, A_FEW)
    with_predictor = replace(recipe(), drafts={}, blocks={}, sd2={}, predictor=predictor)
    make(with_predictor, tmp_path, few_texts, tokenizer=tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    target = load_target(tmp_path / "target")
    assert isinstance(target, Qwen2Target)
    loaded_predictor = load_predictor(tmp_path / "target", target.model.embed_tokens.weight)
    assert loaded_predictor.shape == with_predictor.predictor_shape
    saved = Tokenizer.from_file(str(tmp_path / "target/tokenizer.json"))
    assert saved.to_str() == tokenizer.to_str()
