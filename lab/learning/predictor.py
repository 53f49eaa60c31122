"""Measures what online updates do for a multi-token predictor on text that it has never seen.

The shipped predictor knows all domains, so one is trained here that has seen code and nothing else,
as the shipped EAGLE3 drafter beside which it is measured.  Both learn csv.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lab.cpu_engine.engine_command import MIMO, SHALLOW, chain_flags
from lab.cpu_engine.models import recipe
from lab.cpu_engine.models._draft import train_predictor
from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.prompts import FOLDER, passage_file
from lab.cpu_engine.models.schedule import StepBudget
from lab.cpu_engine.models.targets import load_target, save_predictor
from lab.harness.errors import HarnessError
from lab.harness.measured import Spread
from lab.learning.engines import Lab, LabSetting, start_engine
from lab.learning.headline import Headline, Paper, Verdict

_DOMAIN = "csv"
_GAMMA = 3
_REQUESTS = 4
_TOKENS = 150
_ONLINE = {"SPECULATION_ONLINE_UPDATES": "1"}
_REGIME = "online:2"
_WAVES_MAX = 60
_NO_LIMIT_SECONDS = 1e6


def predictor(setting: LabSetting) -> Headline:
    """Lets both drafters learn as many updates, and compares their acceptance lengths.

    It holds if the predictor accepts more of every set of requests after the updates, in part
    if it does in the median.
    """
    folder = _train_code_predictor(setting, steps=3 if setting.quick else 100)
    drafters = {
        "predictor (MTP)": (folder, chain_flags("NEXTN", folder / "target", _GAMMA)),
        "EAGLE3": (SHALLOW, chain_flags("EAGLE3", SHALLOW / "draft-code", _GAMMA)),
    }
    results: dict[str, _LearningResult] = {}
    for number, (name, (models, flags)) in enumerate(drafters.items()):
        with start_engine(
            setting, f"predictor-{number}", models, (0, _GAMMA), _ONLINE, models=models, flags=flags
        ) as lab:
            results[name] = _measure_learning(setting, lab)
    ratio = results["predictor (MTP)"].ratio
    return Headline(
        Paper.TTS,
        "Multi-token predictors learn as well",
        "The algorithm takes a draft model q of any kind (sections 4 and 4.1); the paper measures "
        "DFlash and EAGLE-3, and no multi-token predictor.",
        f"The real SGLang with a MiMo whose predictor was trained on code only, and with the "
        f"shipped EAGLE3 drafter of code; both learn {_DOMAIN} at γ = {_GAMMA}, an update every "
        f"second round. The same {_REQUESTS} requests for each of {setting.seeds} seeds are played "
        "without updates before and after.",
        ("drafter", "updates", "tokens a verification before", "after", "ratio"),
        tuple(
            (
                name,
                str(row.updates),
                row.acceptance_before.text(),
                row.acceptance_after.text(),
                row.ratio.text(),
            )
            for name, row in results.items()
        ),
        Verdict.from_parts(full=ratio.low > 1, part=ratio.median > 1),
        f"The predictor accepts {ratio.median:.2f} times as many tokens after the updates "
        f"({ratio.low:.2f} to {ratio.high:.2f}), EAGLE3 {results['EAGLE3'].ratio.median:.2f} "
        "times.",
        {
            name: {
                "updates": row.updates,
                "acceptance length before": row.acceptance_before.as_json(),
                "acceptance length after": row.acceptance_after.as_json(),
                "ratio": row.ratio.as_json(),
            }
            for name, row in results.items()
        },
    )


@dataclass(frozen=True, slots=True)
class _LearningResult:
    """Acceptance lengths of the same requests, by seed, and the updates between them."""

    updates: int
    acceptance_before: Spread
    acceptance_after: Spread

    @property
    def ratio(self) -> Spread:
        return self.acceptance_after.ratio_to(self.acceptance_before)


def _train_code_predictor(setting: LabSetting, steps: int) -> Path:
    """Trains a predictor of the shipped MiMo on code; the folder holds its set."""
    folder = setting.scratch / "mimo-code"
    shutil.copytree(MIMO / "target", folder / "target")
    torch.set_num_threads(1)
    target = load_target(MIMO / "target").requires_grad_(requires_grad=False)
    code = np.load(passage_file(FOLDER, "code")).ravel()
    draft_recipe = recipe.DraftRecipe({"code": 1.0}, StepBudget(steps, _NO_LIMIT_SECONDS))
    splits = {"code": Split(code, code)}
    with setting.terminal.show_progress("a predictor is trained on code"):
        trained_predictor = train_predictor(
            draft_recipe, recipe.MIMO.predictor_shape, target, splits
        )
    save_predictor(trained_predictor, folder / "target")
    return folder


def _measure_learning(setting: LabSetting, lab: Lab) -> _LearningResult:
    """Plays the same requests before and after the updates."""
    updates = 2 if setting.quick else 100
    acceptance_before = _measure_acceptance(setting, lab)
    landed = 0
    with lab.regime(_REGIME), lab.pinned(_GAMMA) as pin:
        for wave in range(_WAVES_MAX):
            lab.generate(_DOMAIN, _REQUESTS, _TOKENS, 1000 + wave)
            landed = sum(report.update_seconds > 0 for report in pin.reports)
            if landed >= updates:
                break
    if landed < updates:
        raise HarnessError(f"{landed} of {updates} updates in {_WAVES_MAX} waves of requests")
    return _LearningResult(landed, acceptance_before, _measure_acceptance(setting, lab))


def _measure_acceptance(setting: LabSetting, lab: Lab) -> Spread:
    """Returns acceptance lengths without updates, one a seed."""
    with lab.regime("off"), lab.pinned(_GAMMA):
        return Spread(
            tuple(
                lab.generate(_DOMAIN, _REQUESTS, _TOKENS, seed).acceptance_length
                for seed in range(setting.seeds)
            )
        )
