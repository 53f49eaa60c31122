"""The hand-off to SpecForge, against the real package's own reader, loader and exporter."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_shim.training.checkpoint import save_dflash, save_draft
from engine_shim.training.dflash import DFlashShape, DFlashStudent
from engine_shim.training.eagle3 import Eagle3Shape, Eagle3Student
from engine_shim.training.mtp import MtpShape, MtpStudent
from engine_shim.training.signals import Signal, SignalStore
from engine_shim.training.specforge import (
    ExportError,
    export_signals,
    import_draft,
)
from engine_shim.training.students import DraftStudent
from engine_shim.training.versions import FOLDER, VersionError, Versions
from tests.support.engine import ROOT, TARGET
from tests.support.installed_wheel import fetched
from tests.support.training_rounds import SHAPE

SPECFORGE = "0.2.0"
PROBE = Path(__file__).with_name("specforge_probe.py")
# SpecForge's drafter has its head's size from the hidden one.
SQUARE = replace(SHAPE, head_dim=16, heads=2)
LAYERS = (0, 1, 2)


def probe(kind: str, exported: Path, out: Path) -> dict[str, Any]:
    paths = (fetched("specforge", SPECFORGE), ROOT, os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, str(PROBE), kind, str(exported), str(out)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert not done.returncode, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def signal(rows: int, seed: int, *, final: bool = True) -> Signal:
    torch.manual_seed(seed)
    return Signal(
        tokens=torch.randint(SHAPE.vocabulary, (rows,)),
        features=torch.randn(rows, len(LAYERS) * SHAPE.hidden).to(torch.bfloat16),
        top_tokens=torch.randint(SHAPE.vocabulary, (rows, 4), dtype=torch.int32),
        top_logs=-torch.rand(rows, 4),
        start=3,
        accepted=1,
        tried=2,
        final=torch.randn(rows, SHAPE.hidden).to(torch.bfloat16) if final else None,
    )


@pytest.fixture
def student() -> Eagle3Student:
    torch.manual_seed(4)
    embedding = torch.randn(SHAPE.vocabulary, SHAPE.hidden)
    return Eagle3Student(Eagle3Shape(SQUARE.with_layers(1), LAYERS), embedding)


def base_of(student: DraftStudent, folder: Path) -> Versions:
    found = Versions(folder / FOLDER)
    parameters = {name: part.detach() for name, part in student.named_parameters()}
    found.adopt_base(student.shape, parameters, student.embedding)
    return found


@pytest.fixture
def folder(tmp_path: Path, student: Eagle3Student) -> Path:
    """As an engine leaves it."""
    found = tmp_path / "signals"
    base_of(student, found)
    store = SignalStore(found, 1 << 30)
    for seed, rows in enumerate((40, 64, 5, 17)):
        store.add(signal(rows, seed))
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_signals_go_out_and_what_specforge_exports_comes_back(
    folder: Path, student: Eagle3Student, tmp_path: Path
):
    versions = Versions(folder / FOLDER)
    out = tmp_path / "out"
    assert export_signals(folder, versions, 0, str(TARGET), out) == 3
    found = probe("eagle3", out, tmp_path / "run")
    assert found["mode"] == "offline"
    assert (found["samples"], found["tokens"]) == (3, [40, 64, 17])
    hidden = SHAPE.hidden
    assert found["shapes"] == {
        "attention_mask": [1, 40],
        "loss_mask": [1, 40],
        "target": [1, 40, hidden],
        "hidden_state": [1, 40, len(LAYERS) * hidden],
        "input_ids": [1, 40],
    }
    assert found["first"] == signal(40, 0).tokens.tolist()
    # It has doubled the head, and nothing else.
    assert import_draft(tmp_path / "run" / "sglang", versions) == 1
    assert versions.made(1).imported
    made = dict(versions.student(1).named_parameters())
    for name, part in student.named_parameters():
        factor = 2 if name == "lm_head.weight" else 1
        expected = factor * part.to(torch.bfloat16).float()
        assert torch.equal(made[name], expected), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_block_drafter_goes_out_and_comes_back(tmp_path: Path):
    torch.manual_seed(5)
    shape = DFlashShape(SQUARE.with_layers(2), (1, 4, 8), 8, SHAPE.vocabulary - 1)
    student = DFlashStudent(shape, torch.randn(SHAPE.vocabulary, SHAPE.hidden))
    folder, out = tmp_path / "signals", tmp_path / "out"
    versions = base_of(student, folder)
    SignalStore(folder, 1 << 30).add(signal(30, 1, final=False))
    with pytest.raises(ExportError, match="does not give the target's num_hidden_layers"):
        export_signals(folder, versions, 0, "some/hub-name", out)
    assert export_signals(folder, versions, 0, str(TARGET), out) == 1
    # Where the features came from is part of the drafter.
    config = json.loads((out / "draft" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1, 4, 8]
    found = probe("dflash", out, tmp_path / "run")
    assert (found["mode"], found["samples"]) == ("offline", 1)
    assert found["shapes"] == {
        "input_ids": [1, 30],
        "loss_mask": [1, 30],
        "hidden_states": [1, 30, len(LAYERS) * SHAPE.hidden],
    }
    assert import_draft(tmp_path / "run" / "hf", versions) == 1
    made = dict(versions.student(1).named_parameters())
    for name, part in student.named_parameters():
        factor = 2 if name == "fc.weight" else 1
        assert torch.equal(made[name], factor * part.to(torch.bfloat16).float()), name
    # A drafter of other blocks is none of its versions.
    other = DFlashStudent(replace(shape, block=4), student.embedding)
    save_dflash(other, tmp_path / "other")
    with pytest.raises(VersionError, match="blocks of 4"):
        import_draft(tmp_path / "other", versions)
    assert versions.numbers() == [1]


def test_signals_without_last_hidden_states_are_refused(folder: Path, tmp_path: Path):
    SignalStore(folder, 1 << 30).add(signal(20, 9, final=False))
    with pytest.raises(ExportError, match="SPECULATION_SIGNALS_FINAL_STATES"):
        export_signals(folder, Versions(folder / FOLDER), 0, "t", tmp_path / "out")


def test_a_predictor_is_none_of_its_drafters(tmp_path: Path):
    torch.manual_seed(6)
    predictor = MtpStudent(
        MtpShape(SQUARE.with_layers(1)), torch.randn(SHAPE.vocabulary, SHAPE.hidden)
    )
    versions = base_of(predictor, tmp_path / "signals")
    with pytest.raises(ExportError, match="not multi-token predictors"):
        export_signals(tmp_path / "signals", versions, 0, str(TARGET), tmp_path / "out")
    with pytest.raises(ExportError, match="not multi-token predictors"):
        import_draft(tmp_path, versions)


def test_nothing_to_export_is_said(folder: Path, tmp_path: Path):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ExportError, match="no signal"):
        export_signals(folder, Versions(folder / FOLDER), 0, "t", tmp_path / "out")


def test_a_drafter_of_other_sizes_is_refused(folder: Path, tmp_path: Path):
    other = replace(SQUARE, mlp=64).with_layers(1)
    embedding = torch.zeros(SHAPE.vocabulary, SHAPE.hidden)
    save_draft(Eagle3Student(Eagle3Shape(other, LAYERS), embedding), tmp_path / "draft")
    versions = Versions(folder / FOLDER)
    with pytest.raises(VersionError, match="mlp"):
        import_draft(tmp_path / "draft", versions)
    assert versions.numbers() == []


def test_a_drafter_of_a_smaller_vocabulary_is_refused(
    folder: Path, tmp_path: Path, student: Eagle3Student
):
    save_draft(student, tmp_path / "draft")
    config = tmp_path / "draft" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"draft_vocab_size": SHAPE.vocabulary - 8})
    )
    with pytest.raises(VersionError, match="whole vocabulary"):
        import_draft(tmp_path / "draft", Versions(folder / FOLDER))


def test_a_folder_that_is_no_drafter_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises((VersionError, OSError)):
        import_draft(tmp_path / "nowhere", Versions(folder / FOLDER))
    assert Versions(folder / FOLDER).numbers() == []
