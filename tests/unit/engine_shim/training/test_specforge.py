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
from safetensors.torch import load_file

from engine_shim.training.checkpoint import save_dflash, save_draft
from engine_shim.training.configs import EAGLE_LAYERS
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
from tests.support.training_rounds import SHAPE, with_draft_vocabulary

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
    found.adopt_base(student.shape, parameters, student.borrowed)
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
@pytest.mark.parametrize("tokens", [None, torch.arange(3, 33)], ids=["whole", "part"])
def test_signals_go_out_and_what_specforge_exports_comes_back(
    folder: Path, student: Eagle3Student, tmp_path: Path, tokens: torch.Tensor | None
):
    versions = Versions(folder / FOLDER)
    if tokens is not None:
        student = with_draft_vocabulary(student, tokens)
        versions = base_of(student, tmp_path / "part")
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
    exported = load_file(tmp_path / "run" / "sglang" / "model.safetensors")
    drafts = torch.arange(SHAPE.vocabulary) if tokens is None else tokens
    assert torch.equal(exported["d2t"] + torch.arange(len(drafts)), drafts)
    assert torch.equal(exported["t2d"].nonzero().flatten(), drafts)
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


def test_a_drafter_of_another_vocabulary_is_refused(
    folder: Path, tmp_path: Path, student: Eagle3Student
):
    save_draft(with_draft_vocabulary(student, torch.arange(0, 40, 2)), tmp_path / "draft")
    versions = Versions(folder / FOLDER)
    with pytest.raises(VersionError, match="its draft_vocabulary is 20, that of the engine's"):
        import_draft(tmp_path / "draft", versions)
    even = with_draft_vocabulary(student, torch.arange(0, 40, 2))
    others = base_of(even, tmp_path / "even")
    assert import_draft(tmp_path / "draft", others) == 1
    save_draft(with_draft_vocabulary(student, torch.arange(1, 40, 2)), tmp_path / "odd")
    with pytest.raises(VersionError, match="its d2t is not that of the engine's drafter"):
        import_draft(tmp_path / "odd", others)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_theta": 5e5}, "its rope_base is 500000.0, that of the engine's drafter 10000.0"),
        ({"norm_output": True}, "its norm_output is True"),
        ({"eagle_config": {EAGLE_LAYERS: [1, 2, 3]}}, r"its feature_layers is \(1, 2, 3\)"),
        ({"rope_scaling": {"type": "longrope"}}, "rotary positions are scaled"),
    ],
)
def test_a_drafter_that_computes_something_else_is_refused(
    folder: Path,
    tmp_path: Path,
    student: Eagle3Student,
    changes: dict[str, object],
    reason: str,
):
    save_draft(student, tmp_path / "draft")
    change_config(tmp_path / "draft", **changes)
    with pytest.raises(VersionError, match=reason):
        import_draft(tmp_path / "draft", Versions(folder / FOLDER))


def test_a_drafter_whose_config_names_no_layers_reads_those_of_the_engine(
    folder: Path, tmp_path: Path, student: Eagle3Student
):
    save_draft(student, tmp_path / "draft")
    change_config(tmp_path / "draft", eagle_config=None, max_position_embeddings=9000)
    versions = Versions(folder / FOLDER)
    assert import_draft(tmp_path / "draft", versions) == 1
    found = versions.student(1)
    assert isinstance(found, Eagle3Student)
    assert found.shape.feature_layers == LAYERS
    # And where the engine's names none either, the exported one does not.
    unnamed = replace(student.shape, feature_layers=())
    made = Eagle3Student(unnamed, student.embedding)
    save_draft(made, tmp_path / "unnamed")
    assert "eagle_config" not in json.loads((tmp_path / "unnamed" / "config.json").read_text())
    assert import_draft(tmp_path / "unnamed", base_of(made, tmp_path / "other")) == 1


@pytest.mark.parametrize(
    ("changes", "tokens", "reason"),
    [
        ({"own_head": False}, None, "the drafter's head is the target's"),
        ({"norm_before_fc": True}, None, "norm before fc"),
        ({}, torch.arange(39, -1, -1), "not in the order of the target's ids"),
    ],
)
def test_a_drafter_that_specforge_does_not_train_is_not_exported(
    folder: Path,
    tmp_path: Path,
    student: Eagle3Student,
    changes: dict[str, bool],
    tokens: torch.Tensor | None,
    reason: str,
):
    other = Eagle3Student(replace(student.shape, **changes), student.embedding, tokens=tokens)  # type: ignore[arg-type]
    versions = base_of(other, tmp_path / "other")
    with pytest.raises(ExportError, match=reason):
        export_signals(folder, versions, 0, "t", tmp_path / "out")


def test_without_a_drafter_the_export_says_what_is_missing(tmp_path: Path):
    versions = Versions(tmp_path / FOLDER)
    with pytest.raises(VersionError, match="no engine has left its drafter there"):
        export_signals(tmp_path, versions, 0, "t", tmp_path / "out")
    with pytest.raises(VersionError, match="no engine has left its drafter there"):
        import_draft(tmp_path, versions)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_is_no_drafter_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(VersionError, match="cannot be read as EAGLE3 drafter"):
        import_draft(tmp_path / "nowhere", Versions(folder / FOLDER))
    assert Versions(folder / FOLDER).numbers() == []
