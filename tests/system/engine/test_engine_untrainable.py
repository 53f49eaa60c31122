"""A drafter that SGLang serves and that has no student: what it cannot do is not announced."""

import json
import shutil
from pathlib import Path

import pytest

from engine_shim.sglang.training.versions import FOLDER_NAME, VersionError, Versions
from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1 import engine_pb2
from tests.support.engine import DRAFT, EAGLE3, TARGET, running_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import WAVE_LENGTH, WAVES
from trainer.specforge import export_signals

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

REASON = (
    "the plugin cannot train this kind of drafter: its config sets what a student does not follow: "
    "a_field_of_tomorrow (7); its rotary positions are scaled (linear)"
)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """The shipped one, with a field that SGLang does not read, and a scaling that does nothing."""
    folder = Path(shutil.copytree(DRAFT, tmp_path / "draft"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 1.0}
    config["a_field_of_tomorrow"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_it_serves_and_neither_learns_nor_collects_nor_takes_versions(
    draft: Path, tmp_path: Path, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    signals = tmp_path / "signals"
    variables = {
        **sidecar.variables,
        "SPECULATION_GAMMAS": "0,1,3",
        "SPECULATION_SIGNALS_FOLDER": str(signals),
        "SPECULATION_ONLINE_UPDATES": "1",
    }
    arguments = (*EAGLE3[:-1], str(draft))
    with running_engine(tmp_path / "engine", arguments, variables) as engine:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        spec = sidecar.introductions[0]
        # Even if it is asked for.
        sidecar.collect = True
        sidecar.run(lambda _: (3, False))
        answers = engine.generate(WAVES[0], [WAVE_LENGTH] * len(WAVES[0]))
        status = engine.internal_state()["speculation_controller"]
        log = engine.log.read_text()
    assert [answer.tokens for answer in answers] == plain["waves"][: len(WAVES[0])]
    assert not spec.capabilities.can_update_online
    assert not spec.capabilities.can_collect
    assert not spec.capabilities.can_take_versions
    lost = {loss.capability: loss.reason for loss in spec.lost}
    assert lost.keys() == {
        engine_pb2.CAPABILITY_UPDATE_ONLINE,
        engine_pb2.CAPABILITY_COLLECT,
        engine_pb2.CAPABILITY_TAKE_VERSIONS,
    }
    for reason in lost.values():
        assert reason.startswith(REASON)
    assert f"this engine has lost collect and tells the sidecar so: {REASON}" in log
    assert (status["online"], status["signals"], status["draft"]) == (None, None, None)
    assert not list(signals.glob("*.safetensors"))
    with pytest.raises(VersionError, match="no engine has stored its drafter there"):
        export_signals(signals, Versions(signals / FOLDER_NAME), 0, TARGET, tmp_path / "out")
