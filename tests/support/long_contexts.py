"""What an engine's drafter proposes in long contexts, against what its student would."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from engine_shim.sglang.training.chain import Eagle3Student
from engine_shim.sglang.training.dflash import DFlashStudent
from lab.cpu_engine.models.prompts import held_out_prompts
from lab.cpu_engine.models.targets import load_target
from lab.harness.scripted_sidecar import ScriptedSidecar
from tests.support.canvas_recorder import CANVASES
from tests.support.engine import TARGET, EngineProcess, install_plugin

GAMMA = 3
_PROMPT, _ANSWER = 900, 60
_DOMAINS = ("code", "csv", "prose")
# Log-probabilities that are closer are in the order that rounding leaves them in.
_ROUNDING = 1e-3
EVERYTHING = 0


def recorder(folder: Path) -> tuple[Path, dict[str, str]]:
    """The file of the canvases, and the variables with which an engine writes it."""
    canvases = folder / "canvases"
    target = "tests.support.canvas_recorder:record_canvases"
    plugin = install_plugin(folder / "plugin", target, name="zz_canvases")
    return canvases, {CANVASES: str(canvases), "PYTHONPATH": str(plugin)}


def agreement(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    canvases: Path,
    student: Eagle3Student | DFlashStudent,
    windows: tuple[int, ...],
) -> Mapping[int, float]:
    """How often the first draft is the student's, by the positions that the student attends to.

    With EVERYTHING, every draft of every canvas has to be the student's, or as likely to it but for
    rounding.
    """
    target = load_target(TARGET)
    matches_by_window: dict[int, list[bool]] = {window: [] for window in (EVERYTHING, *windows)}
    for domain in _DOMAINS:
        prompt = held_out_prompts(domain, 1, _PROMPT, seed=21)[0]
        sidecar.run(lambda _: (GAMMA, False))
        canvases.unlink(missing_ok=True)
        (answer,) = engine.generate([prompt], [_ANSWER])
        tokens = torch.tensor(prompt + answer.tokens)
        with torch.no_grad():
            layer_features = target.logits_and_features(tokens[None], student.shape.feature_layers)[
                1
            ]
        features = torch.cat(layer_features, dim=-1)
        for line in canvases.read_text().splitlines():
            context, canvas = json.loads(line)
            if len(canvas) != GAMMA + 1 or context >= len(tokens):
                continue
            assert context >= 800
            assert canvas[0] == tokens[context]
            ids = torch.cat([tokens[:context], torch.tensor(canvas)])
            for window, matches in matches_by_window.items():
                logs = _drafts(student, features, ids, context, window or context)
                drafts = [int(student.drafted_tokens(row)) for row in logs]
                matches.append(drafts[0] == canvas[1])
                if window == EVERYTHING:
                    columns = student.columns(torch.tensor(canvas[1:]))
                    for row, column in zip(logs, columns, strict=True):
                        assert row.max() - row[column] < _ROUNDING, (domain, context, canvas)
    assert len(matches_by_window[EVERYTHING]) >= 60
    return {window: sum(matches) / len(matches) for window, matches in matches_by_window.items()}


@torch.no_grad()
def _drafts(
    student: Eagle3Student | DFlashStudent,
    features: torch.Tensor,
    ids: torch.Tensor,
    context: int,
    window: int,
) -> list[torch.Tensor]:
    """Log-probabilities of each position behind the canvas's first token, given those before."""
    first = context - window
    unrolled = student.unroll(
        features[:, first:context],
        ids[None, first:],
        GAMMA,
        first_anchor=window - 1,
        positions=torch.arange(first, context),
    )
    return [logits[0, 0].log_softmax(-1) for logits in unrolled]
