"""Measures what online updates do for a multi-token predictor on text that it has never seen.

The shipped predictor knows all domains, so one is trained here that has seen code and nothing else,
as the shipped EAGLE3 drafter beside which it is measured.  Both learn csv.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_shim.training.checkpoint import load_target, save_predictor
from lab.cpu_engine.engine_command import MIMO, SHALLOW, chain_flags
from lab.cpu_engine.models import recipe
from lab.cpu_engine.models._draft import train_predictor
from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.prompts import FOLDER, passage_file
from lab.cpu_engine.models.schedule import StepBudget
from lab.harness.errors import HarnessError
from lab.harness.spread import Spread
from lab.learning.engines_at_work import Lab, LabSetting, running

_DOMAIN = "csv"
_GAMMA = 3
_REQUESTS = 4
_TOKENS = 150
_ONLINE = {"SPECULATION_ONLINE_UPDATES": "1"}
_REGIME = "online:2"
_WAVES_MAX = 60
_NO_LIMIT_SECONDS = 1e6


def predictor(setting: LabSetting) -> dict[str, Any]:
    """Lets both drafters learn as many updates, and compares their acceptance lengths."""
    folder = _code_only(setting, steps=3 if setting.quick else 100)
    drafters = {
        "predictor (MTP)": (folder, chain_flags("NEXTN", folder / "target", _GAMMA)),
        "EAGLE3": (SHALLOW, chain_flags("EAGLE3", SHALLOW / "draft-code", _GAMMA)),
    }
    found: dict[str, Any] = {"domain": _DOMAIN, "gamma": _GAMMA, "regime": _REGIME}
    for number, (name, (models, flags)) in enumerate(drafters.items()):
        with running(
            setting, f"predictor-{number}", models, (0, _GAMMA), _ONLINE, models=models, flags=flags
        ) as lab:
            found[name] = _learnt(setting, lab)
    return found


def _code_only(setting: LabSetting, steps: int) -> Path:
    """Trains a predictor of the shipped MiMo on code; the folder holds its set."""
    folder = setting.scratch / "mimo-code"
    shutil.copytree(MIMO / "target", folder / "target")
    torch.set_num_threads(1)
    target = load_target(MIMO / "target").requires_grad_(requires_grad=False)
    code = np.load(passage_file(FOLDER, "code")).ravel()
    taught = recipe.DraftRecipe({"code": 1.0}, StepBudget(steps, _NO_LIMIT_SECONDS))
    splits = {"code": Split(code, code)}
    with setting.terminal.working("a predictor is trained on code"):
        made = train_predictor(taught, recipe.MIMO.predictor_shape, target, splits)
    save_predictor(made, folder / "target")
    return folder


def _learnt(setting: LabSetting, lab: Lab) -> dict[str, Any]:
    """Plays the same requests before and after the updates."""
    updates = 2 if setting.quick else 100
    before = _measured(setting, lab)
    landed = 0
    with lab.regime(_REGIME), lab.pinned(_GAMMA) as pin:
        for wave in range(_WAVES_MAX):
            lab.generate(_DOMAIN, _REQUESTS, _TOKENS, 1000 + wave)
            landed = sum(report.update_seconds > 0 for report in pin.reports)
            if landed >= updates:
                break
    if landed < updates:
        raise HarnessError(f"{landed} of {updates} updates in {_WAVES_MAX} waves of requests")
    after = _measured(setting, lab)
    return {
        "updates": landed,
        "acceptance length before": Spread(before).as_json(),
        "acceptance length after": Spread(after).as_json(),
        "ratio": Spread(_ratios(before, after)).as_json(),
    }


def _measured(setting: LabSetting, lab: Lab) -> tuple[float, ...]:
    """Returns acceptance lengths without updates, one a seed."""
    with lab.regime("off"), lab.pinned(_GAMMA):
        return tuple(
            lab.generate(_DOMAIN, _REQUESTS, _TOKENS, seed).acceptance_length
            for seed in range(setting.seeds)
        )


def _ratios(before: Sequence[float], after: Sequence[float]) -> tuple[float, ...]:
    return tuple(late / early for early, late in zip(before, after, strict=True))
