"""Makes the shipped models again: ``python -m lab.cpu_engine.models.make``.

Everything is made from the running Python's standard library and fixed seeds, offline, on one
core.  Budgets end by steps or by wall time, whichever comes first, so a busy machine gives a
somewhat worse set rather than a later one.
"""

# ruff: noqa: E402 -- what is missing is reported before it is imported.
import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lab.harness.requirements import require

require("lab.cpu_engine.models.make", "engine_shim", "numpy", "safetensors", "tokenizers", "torch")

import numpy as np
import torch
from tokenizers import Tokenizer

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Student
from lab.cpu_engine.models import corpus
from lab.cpu_engine.models._draft import (
    agreement_by_domain,
    block_agreement_by_domain,
    train_blocks,
    train_draft,
    train_predictor,
)
from lab.cpu_engine.models._edits import train_edit_draft, train_edit_target
from lab.cpu_engine.models._sd2 import make_sd2
from lab.cpu_engine.models._target import cross_entropy, train_target
from lab.cpu_engine.models.edits import KINDS, EncodedEdit, code_edits, save_edits
from lab.cpu_engine.models.prompts import passage_file
from lab.cpu_engine.models.recipe import EDITS, MIMO, SHALLOW, EditRecipe, Recipe
from lab.cpu_engine.models.targets import load_target, save_predictor, save_target
from trainer.checkpoint import save_dflash, save_eagle3
from trainer.sd2 import save_sd2

TARGET = "target"
HELD_OUT = "held_out"
TOKENIZER = "tokenizer.json"
# The edits that are kept for requests: how many of each kind, and the answers' lengths in tokens.
_KEPT_EDITS = 24
_KEPT_LENGTHS = range(150, 451)

_log = logging.getLogger(__name__)


def make(
    recipe: Recipe,
    output: Path,
    texts: Mapping[str, list[str]],
    *,
    keep_target: bool = False,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Trains every model of ``recipe`` on ``texts`` and writes the folders under ``output``.

    With ``keep_target`` the target and its tokenizer already in ``output`` stay, and only the
    drafts are made.  With a ``tokenizer``, which belongs to another set made of these texts, it is
    used, and the held-out text, which that set has, is not written.
    """
    if keep_target:
        tokenizer = Tokenizer.from_file(str(output / TARGET / TOKENIZER))
        splits = corpus.tokenize(texts, tokenizer)
    else:
        shared = tokenizer is not None
        tokenizer = tokenizer or corpus.train_tokenizer(texts)
        splits = corpus.tokenize(texts, tokenizer)
        save_target(train_target(recipe, splits), output / TARGET)
        save_tokenizer(tokenizer, output / TARGET)
        if not shared:
            save_held_out(splits, output / HELD_OUT)
    # Read back rather than passed on: drafts must learn the rounded weights, which are what an
    # engine serves.
    target = load_target(output / TARGET).requires_grad_(False)
    _log.info("target as served: cross entropy %s", cross_entropy(target, splits))
    if recipe.predictor is not None:
        predictor = train_predictor(recipe.predictor, recipe.predictor_shape, target, splits)
        save_predictor(predictor, output / TARGET)
        _log.info("predictor: agreement %s", agreement_by_domain(predictor, target, splits))
    for name, draft in recipe.drafts.items():
        student = train_draft(draft, recipe.draft_shape, target, splits)
        save_eagle3(student, output / name)
        _log.info("%s: agreement %s", name, agreement_by_domain(student, target, splits))
    for name, draft in recipe.blocks.items():
        shape = recipe.block_shape(mask_token(tokenizer))
        blocks = train_blocks(draft, shape, target, splits)
        save_dflash(blocks, output / name)
        _log.info("%s: agreement %s", name, block_agreement_by_domain(blocks, target, splits))
    for name, sd2 in recipe.sd2.items():
        sd2_draft = make_sd2(sd2, recipe.sd2_shape(sd2), target, splits)
        save_sd2(sd2_draft, output / name)


def make_edits(recipe: EditRecipe, shipped: Path, output: Path, *, keep_target: bool) -> None:
    """Trains a target that edits code, from the shallow one, and its draft, and keeps edits.

    shipped: the folder of the sets that exist.  keep_target: the one in ``output`` stays.
    """
    tokenizer = Tokenizer.from_file(str(shipped / TARGET / TOKENIZER))
    split = code_edits(tokenizer)
    if not keep_target:
        target = load_target(shipped / "shallow" / TARGET)
        train_edit_target(recipe, target, split)
        save_target(target, output / TARGET)
        save_tokenizer(tokenizer, output / TARGET)
    target = load_target(output / TARGET).requires_grad_(False)
    student = Eagle3Student(SHALLOW.draft_shape, target.model.embed_tokens.weight)
    train_edit_draft(recipe, student, target, split)
    save_eagle3(student, output / "draft")
    save_edits([edit for kind in KINDS for edit in _select_edits(kind, split.validation)], output)


def _select_edits(kind: str, edits: Sequence[EncodedEdit]) -> list[EncodedEdit]:
    """Returns evenly spaced edits of a kind, no two of the same request."""
    edits_by_prompt = {
        e.prompt: e for e in edits if e.kind == kind and len(e.answer) in _KEPT_LENGTHS
    }
    picks = np.linspace(0, len(edits_by_prompt) - 1, _KEPT_EDITS).astype(int)
    return [list(edits_by_prompt.values())[pick] for pick in picks]


def mask_token(tokenizer: Tokenizer) -> int:
    """Returns the token of a byte that no UTF-8 text holds, so that it may stand for a mask."""
    token_id = tokenizer.token_to_id("ÿ")
    assert isinstance(token_id, int)
    return token_id


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer files that ``AutoTokenizer`` and SGLang look for."""
    tokenizer.save(str(folder / TOKENIZER))
    # Written by hand: transformers 5 would name a class that transformers 4 does not know.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.DOCUMENT_TOKEN,
        "eos_token": corpus.DOCUMENT_TOKEN,
        "pad_token": corpus.DOCUMENT_TOKEN,
        "model_max_length": DecoderShape().max_positions,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def save_held_out(splits: Mapping[str, corpus.Split], folder: Path) -> None:
    """Writes the token ids that prompts are cut from (:mod:`lab.cpu_engine.models.prompts`)."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain, split in splits.items():
        np.save(passage_file(folder, domain), corpus.passages(split.validation))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.cpu_engine.models.make", description=__doc__
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="where the model folders go"
    )
    parser.add_argument(
        "--keep-target",
        action="store_true",
        help="make only the drafts, for the target already there",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="DRAFT", help="with --keep-target: make these drafts only"
    )
    # Sets of their own: one after the other.
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument(
        "--shallow",
        action="store_true",
        help="make the set for tests beside the full one, whose tokenizer it shares",
    )
    sets.add_argument(
        "--mimo",
        action="store_true",
        help="make the set with a multi-token predictor, which shares the full one's tokenizer",
    )
    sets.add_argument(
        "--edits",
        action="store_true",
        help="make the set that edits code, from the shallow one (35 minutes)",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)  # more threads wait for each other on matrices this small
    if arguments.edits:
        folder = arguments.output / "code-edits"
        make_edits(EDITS, arguments.output, folder, keep_target=arguments.keep_target)
        return
    recipe, output, tokenizer = Recipe(), arguments.output, None
    if arguments.shallow or arguments.mimo:
        tokenizer = Tokenizer.from_file(str(output / TARGET / TOKENIZER))
    if arguments.shallow:
        recipe, output = SHALLOW, output / "shallow"
    if arguments.mimo:
        recipe, output = MIMO, output / "mimo"
    if arguments.only:
        groups = ("drafts", "blocks", "sd2")
        selected_recipes = {
            group: {n: r for n, r in getattr(recipe, group).items() if n in arguments.only}
            for group in groups
        }
        recipe = replace(recipe, **selected_recipes)  # type: ignore[arg-type]
    make(
        recipe,
        output,
        corpus.documents(),
        keep_target=arguments.keep_target,
        tokenizer=tokenizer,
    )


if __name__ == "__main__":
    main()
