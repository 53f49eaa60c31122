"""Compares a pretrained drafter with two that were distilled: without and with SD2's steering."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from engine_shim.training.checkpoint import load_target, save_sd2
from lab.cpu_engine.engine_command import MODELS
from lab.cpu_engine.models import corpus
from lab.cpu_engine.models._sd2 import distil, pretrain
from lab.cpu_engine.models.prompts import DOMAINS
from lab.cpu_engine.models.recipe import MIXTURE, Recipe, Sd2Recipe
from lab.cpu_engine.models.schedule import StepBudget
from lab.harness.spread import Spread
from lab.learning.engines_at_work import LabSetting, running, step_seconds

_GAMMA = 7
_BATCH = 4
_MANY = 100_000


def sd2(setting: LabSetting) -> dict[str, Any]:
    """Trains the three drafters, then serves each."""
    folders, seconds = _trained(setting)
    if setting.quick:
        # The pretrained one is served as the others are.
        del folders["pretrained"]
    found: dict[str, Any] = {
        "gamma": _GAMMA,
        "batch size": _BATCH,
        "training seconds": seconds,
    }
    for name, folder in folders.items():
        found[name] = _served(setting, name, folder)
    ratio = found["sd2"]["step ms"] / found["distilled"]["step ms"]
    found["step of sd2 over distilled"] = round(ratio, 4)
    return found


def _trained(setting: LabSetting) -> tuple[dict[str, Path], dict[str, float]]:
    torch.set_num_threads(1)
    first, then = (4.0, 3.0) if setting.quick else (100.0, 100.0)
    recipe = Sd2Recipe(MIXTURE, StepBudget(_MANY, first), StepBudget(_MANY, then))
    target = load_target(MODELS / "target").requires_grad_(requires_grad=False)
    tokenizer = Tokenizer.from_file(str(MODELS / "target/tokenizer.json"))
    splits = corpus.tokenize(corpus.documents(), tokenizer)
    folders = {name: setting.scratch / name for name in ("pretrained", "distilled", "sd2")}
    with setting.terminal.working("three drafters are trained"):
        pretrained = pretrain(recipe, Recipe(target.shape).sd2_shape, splits)
        save_sd2(pretrained, folders["pretrained"])
        for name in ("distilled", "sd2"):
            made = distil(recipe, pretrained, target, splits, recipe.budget, steered=name == "sd2")
            save_sd2(made, folders[name])
    return folders, {"pretraining": first, "distilled": then, "sd2": then}


def _served(setting: LabSetting, name: str, folder: Path) -> dict[str, Any]:
    tokens, domains = (32, ("code", "json")) if setting.quick else (150, DOMAINS)
    with running(setting, f"sd2-{name}", folder, (0, 3, _GAMMA)) as lab:
        with lab.pinned(0):
            lab.generate("json", _BATCH, 16, 3)
            plain = lab.generate("json", _BATCH, tokens, 4)
        lengths: dict[str, Any] = {}
        speeds: dict[str, Any] = {}
        with lab.pinned(_GAMMA) as pin:
            lab.generate("json", _BATCH, 16, 3)
            for domain in domains:
                played = [
                    lab.generate(domain, _BATCH, tokens, 10 + seed) for seed in range(setting.seeds)
                ]
                lengths[domain] = Spread(tuple(p.acceptance_length for p in played)).as_json()
                speeds[domain] = Spread(tuple(p.tokens_per_second for p in played)).as_json()
            exact = lab.generate("json", _BATCH, tokens, 4).tokens == plain.tokens
            seconds = step_seconds(pin.reports, _GAMMA, _BATCH)
    mean = sum(row["median"] for row in lengths.values()) / len(lengths)
    return {
        "acceptance length": lengths,
        "mean acceptance length": round(mean, 3),
        "tokens/s": speeds,
        "gamma 0 tokens/s (json)": round(plain.tokens_per_second, 1),
        "step ms": round(1e3 * seconds, 3),
        "same tokens as gamma 0": exact,
    }
