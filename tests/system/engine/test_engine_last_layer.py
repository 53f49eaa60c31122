"""A DFlash drafter that reads the output of the target's last layer, which SGLang's Qwen3 omits."""

import json
import shutil
from pathlib import Path

import pytest

from lab.cpu_engine.models.targets import load_target
from lab.harness.scripted_sidecar import Arm, scripted_sidecar
from tests.support.engine import DFLASH, DFLASH_ONLY, EAGLE3, MODES, TARGET, running_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import (
    SINGLE_PROMPT,
    accepted_by_context,
    check_against_student,
    play,
)
from trainer.checkpoint import load_dflash

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 200
# Of six layers, counted from zero.
LAYERS = [1, 2, 5]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped drafter, which now reads the last layer in place of the fourth."""
    folder = tmp_path_factory.mktemp("drafter") / "dflash"
    shutil.copytree(DFLASH, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = LAYERS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("alone", "mode"), [(True, "eager"), (True, "overlapped"), (False, "eager"), (False, "graphs")]
)
def test_it_drafts_what_it_would_elsewhere(
    alone: bool, mode: str, drafter: Path, plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    arm: Arm = (7, False, 0 if alone else 1)
    second = {} if alone else {"SPECULATION_DFLASH_MODEL_PATH": str(drafter)}
    flags = (*DFLASH_ONLY[:-1], str(drafter)) if alone else EAGLE3
    with scripted_sidecar(tmp_path) as sidecar:
        variables = {**sidecar.variables, **MODES[mode], **second, "SPECULATION_GAMMAS": "0,3,7"}
        with running_engine(tmp_path / "engine", flags, variables) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            answers, reports = play(engine, sidecar, lambda _: arm, SINGLE_PROMPT, [LENGTH])
    assert answers[0].tokens == plain["alone"][0][:LENGTH]
    live = accepted_by_context(reports, "dflash", 7)
    target = load_target(TARGET)
    student = load_dflash(drafter, target.model.embed_tokens.weight)
    check_against_student(live, [*SINGLE_PROMPT[0], *answers[0].tokens], target, student)
    assert sum(live.values()) > len(live)
