"""The hand-off to SpecForge: what is exported, and what is taken back."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student, MtpShape, MtpStudent
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from engine_shim.sglang.training.drafter_config import EAGLE_LAYERS
from engine_shim.sglang.training.signals import Signal, SignalStore
from engine_shim.sglang.training.students import DraftStudent
from engine_shim.sglang.training.versions import FOLDER_NAME, VersionError, Versions
from lab.cpu_engine.models.targets import save_target
from tests.support.training_rounds import SHAPE, make_target, with_draft_vocabulary
from trainer.checkpoint import save_dflash, save_eagle3
from trainer.specforge import (
    ExportError,
    dflash_sample,
    export_signals,
    import_draft,
)
from trainer.specforge_target import TargetError

SQUARE = replace(SHAPE, head_dim=16, heads=2)
LAYERS = (0, 1, 2)


def signal(rows: int, seed: int, *, final: bool = True, context: int = 0) -> Signal:
    torch.manual_seed(seed)
    return Signal(
        tokens=torch.randint(SHAPE.vocabulary, (rows,)),
        features=torch.randn(rows, len(LAYERS) * SHAPE.hidden).to(torch.bfloat16),
        top_tokens=torch.randint(SHAPE.vocabulary, (rows - context, 4), dtype=torch.int32),
        top_logs=-torch.rand(rows - context, 4),
        start=3,
        accepted=1,
        tried=2,
        final=torch.randn(rows, SHAPE.hidden).to(torch.bfloat16) if final else None,
        context=context,
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_target(make_target(), folder)
    return folder


@pytest.fixture
def student() -> Eagle3Student:
    torch.manual_seed(4)
    embedding = torch.randn(SHAPE.vocabulary, SHAPE.hidden)
    return Eagle3Student(Eagle3Shape(SQUARE.replace_layers(1), LAYERS), embedding)


def base_of(student: DraftStudent, folder: Path) -> Versions:
    base_versions = Versions(folder / FOLDER_NAME)
    parameters = {name: part.detach() for name, part in student.named_parameters()}
    base_versions.adopt_base(student.shape, parameters, student.borrowed)
    return base_versions


@pytest.fixture
def folder(tmp_path: Path, student: Eagle3Student) -> Path:
    """As an engine leaves it."""
    signal_folder = tmp_path / "signals"
    base_of(student, signal_folder)
    store = SignalStore(signal_folder, 1 << 30)
    for seed, rows in enumerate((40, 64, 5, 17)):
        store.add(signal(rows, seed))
    # Nothing but a prompt and a few tokens.
    store.add(signal(40, 4, context=36))
    return signal_folder


def test_signals_without_last_hidden_states_are_refused(folder: Path, target: Path, tmp_path: Path):
    SignalStore(folder, 1 << 30).add(signal(20, 9, final=False))
    with pytest.raises(ExportError, match="SPECULATION_SIGNALS_FINAL_STATES"):
        export_signals(folder, Versions(folder / FOLDER_NAME), 0, target, tmp_path / "out")


def test_a_predictor_is_none_of_its_drafters(target: Path, tmp_path: Path):
    torch.manual_seed(6)
    predictor = MtpStudent(
        MtpShape(SQUARE.replace_layers(1)), torch.randn(SHAPE.vocabulary, SHAPE.hidden)
    )
    versions = base_of(predictor, tmp_path / "signals")
    with pytest.raises(ExportError, match="not multi-token predictors"):
        export_signals(tmp_path / "signals", versions, 0, target, tmp_path / "out")
    with pytest.raises(ExportError, match="not multi-token predictors"):
        import_draft(tmp_path, versions)


def test_nothing_to_export_is_said(folder: Path, target: Path, tmp_path: Path):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ExportError, match="no signal"):
        export_signals(folder, Versions(folder / FOLDER_NAME), 0, target, tmp_path / "out")


def test_a_drafter_of_other_sizes_is_refused(folder: Path, tmp_path: Path):
    other = replace(SQUARE, mlp=64).replace_layers(1)
    embedding = torch.zeros(SHAPE.vocabulary, SHAPE.hidden)
    save_eagle3(Eagle3Student(Eagle3Shape(other, LAYERS), embedding), tmp_path / "draft")
    versions = Versions(folder / FOLDER_NAME)
    with pytest.raises(VersionError, match="mlp"):
        import_draft(tmp_path / "draft", versions)
    assert versions.version_numbers() == []


def test_a_drafter_of_another_vocabulary_is_refused(
    folder: Path, tmp_path: Path, student: Eagle3Student
):
    save_eagle3(with_draft_vocabulary(student, torch.arange(0, 40, 2)), tmp_path / "draft")
    versions = Versions(folder / FOLDER_NAME)
    with pytest.raises(VersionError, match="its draft_vocabulary is 20, the engine's drafter has"):
        import_draft(tmp_path / "draft", versions)
    even = with_draft_vocabulary(student, torch.arange(0, 40, 2))
    others = base_of(even, tmp_path / "even")
    assert import_draft(tmp_path / "draft", others) == 1
    save_eagle3(with_draft_vocabulary(student, torch.arange(1, 40, 2)), tmp_path / "odd")
    with pytest.raises(VersionError, match="its d2t is not that of the engine's drafter"):
        import_draft(tmp_path / "odd", others)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_theta": 5e5}, "its rope_base is 500000.0, the engine's drafter has 10000.0"),
        ({"norm_output": True}, "its norm_output is True"),
        ({"eagle_config": {EAGLE_LAYERS: [1, 2, 3]}}, r"its feature_layers is \(1, 2, 3\)"),
        ({"rope_scaling": {"type": "longrope"}}, "rotary positions are scaled"),
        # Of a list beside eagle_config it says what it was trained for.
        ({"eagle_config": None, EAGLE_LAYERS: [1, 2, 3]}, r"its feature_layers is \(1, 2, 3\)"),
        ({"of_tomorrow": 1}, r"does not follow: of_tomorrow \(1\)"),
    ],
)
def test_a_drafter_that_computes_something_else_is_refused(
    folder: Path,
    tmp_path: Path,
    student: Eagle3Student,
    changes: dict[str, object],
    reason: str,
):
    save_eagle3(student, tmp_path / "draft")
    change_config(tmp_path / "draft", **changes)
    with pytest.raises(VersionError, match=reason):
        import_draft(tmp_path / "draft", Versions(folder / FOLDER_NAME))


def test_a_drafter_whose_config_names_no_layers_reads_those_of_the_engine(
    folder: Path, tmp_path: Path, student: Eagle3Student
):
    save_eagle3(student, tmp_path / "draft")
    change_config(tmp_path / "draft", eagle_config=None, max_position_embeddings=9000)
    versions = Versions(folder / FOLDER_NAME)
    assert import_draft(tmp_path / "draft", versions) == 1
    imported_student = versions.load_student(1)
    assert isinstance(imported_student, Eagle3Student)
    assert imported_student.shape.feature_layers == LAYERS
    # And where the engine's names none either, the exported one does not.
    unnamed = replace(student.shape, feature_layers=())
    unnamed_student = Eagle3Student(unnamed, student.embedding)
    save_eagle3(unnamed_student, tmp_path / "unnamed")
    assert "eagle_config" not in json.loads((tmp_path / "unnamed" / "config.json").read_text())
    assert import_draft(tmp_path / "unnamed", base_of(unnamed_student, tmp_path / "other")) == 1


@pytest.mark.parametrize(
    ("changes", "tokens", "reason"),
    [
        ({"own_head": False}, None, "the drafter's head is the target's"),
        ({"norm_before_fc": True}, None, "norm before fc"),
        ({"feature_layers": (0, 2)}, None, "reads 2 target layers, and SpecForge's read three"),
        ({}, torch.arange(39, -1, -1), "not in the order of the target's ids"),
    ],
)
def test_a_drafter_that_specforge_does_not_train_is_not_exported(
    folder: Path,
    tmp_path: Path,
    student: Eagle3Student,
    changes: dict[str, Any],
    tokens: torch.Tensor | None,
    reason: str,
    target: Path,
):
    other = Eagle3Student(replace(student.shape, **changes), student.embedding, tokens=tokens)
    versions = base_of(other, tmp_path / "other")
    with pytest.raises(ExportError, match=reason):
        export_signals(folder, versions, 0, target, tmp_path / "out")


def test_without_a_drafter_the_export_says_what_is_missing(target: Path, tmp_path: Path):
    versions = Versions(tmp_path / FOLDER_NAME)
    with pytest.raises(VersionError, match="no engine has stored its drafter there"):
        export_signals(tmp_path, versions, 0, target, tmp_path / "out")
    with pytest.raises(VersionError, match="no engine has stored its drafter there"):
        import_draft(tmp_path, versions)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_is_no_drafter_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(VersionError, match="cannot be read as drafter of kind EAGLE3"):
        import_draft(tmp_path / "nowhere", Versions(folder / FOLDER_NAME))
    assert Versions(folder / FOLDER_NAME).version_numbers() == []


def test_samples_are_the_signals_position_by_position(folder: Path, target: Path, tmp_path: Path):
    with_prompt = signal(30, 5, context=10)
    SignalStore(folder, 1 << 30).add(with_prompt)
    assert export_signals(folder, Versions(folder / FOLDER_NAME), 0, target, tmp_path / "out") == 4
    place = tmp_path / "out" / "features" / "rows_0-2000"
    known = [*(signal(rows, seed) for seed, rows in ((0, 40), (1, 64), (3, 17))), with_prompt]
    for number, one in enumerate(known):
        sample = torch.load(place / f"data_{number}.ckpt")
        assert torch.equal(sample["input_ids"], one.tokens)
        assert torch.equal(sample["aux_hidden_state"][0], one.features)
        assert one.final is not None
        assert torch.equal(sample["hidden_state"][0], one.final)
        taught = [position >= one.context for position in range(len(one.tokens))]
        assert sample["loss_mask"].tolist() == taught
    # A block that begins at the first position of all would have no context.
    for one in known:
        training_sample = dflash_sample(one)
        assert torch.equal(training_sample["hidden_states"], one.features)
        first = max(one.context, 1)
        taught = [position >= first for position in range(len(one.tokens))]
        assert training_sample["loss_mask"].tolist() == taught


def test_an_export_appears_whole_or_not_at_all(
    folder: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    versions, out = Versions(folder / FOLDER_NAME), tmp_path / "exports" / "out"

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("trainer.specforge.write_target", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export_signals(folder, versions, 0, target, out)
    assert list(out.parent.iterdir()) == []
    out.mkdir()
    assert export_signals(folder, versions, 0, target, out) == 3
    assert list(out.parent.iterdir()) == [out]
    names = ["draft", "features", "specforge.json", "target"]
    assert sorted(path.name for path in out.iterdir()) == names
    # Others may read it: a trainer often runs as another user.
    assert out.stat().st_mode & 0o777 == 0o755
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(ExportError, match="exists and is not empty"):
        export_signals(folder, versions, 0, target, out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="exists and is not empty"):
        export_signals(folder, versions, 0, target, tmp_path / "file")


@contextmanager
def files_of_at_most(most: int) -> Iterator[None]:
    """Writing more bytes to a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# In the samples, which are written first, and in the drafter.
@pytest.mark.parametrize("most", [8 << 10, 24 << 10])
def test_an_export_to_a_full_disk_leaves_nothing(
    most: int, folder: Path, target: Path, tmp_path: Path
):
    with files_of_at_most(most), pytest.raises(OSError, match="out cannot be written"):
        export_signals(folder, Versions(folder / FOLDER_NAME), 0, target, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_an_import_to_a_full_disk_leaves_no_version(
    folder: Path, tmp_path: Path, student: Eagle3Student
):
    save_eagle3(student, tmp_path / "draft")
    before = sorted((folder / FOLDER_NAME).iterdir())
    with files_of_at_most(8 << 10), pytest.raises(OSError, match="cannot be written"):
        import_draft(tmp_path / "draft", Versions(folder / FOLDER_NAME))
    assert sorted((folder / FOLDER_NAME).iterdir()) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "cannot be read as drafter of kind EAGLE3"),
        ("[]", "cannot be read as drafter of kind EAGLE3"),
        ("\x00\xff", "cannot be read as drafter of kind EAGLE3"),
        ({"hidden_size": 1 << 40}, "its hidden is 1099511627776, the engine's drafter has 32"),
        ({"hidden_size": "32"}, "cannot be read as drafter of kind EAGLE3"),
        ({"vocab_size": -1}, "cannot be read as drafter of kind EAGLE3"),
        ({"eagle_config": [1]}, "cannot be read as drafter of kind EAGLE3"),
        ({"rms_norm_eps": float("nan")}, "its norm_epsilon is nan"),
        ({"draft_vocab_size": {}}, "cannot be read as drafter of kind EAGLE3"),
    ],
)
def test_a_hostile_config_is_refused(
    folder: Path,
    tmp_path: Path,
    student: Eagle3Student,
    content: str | dict[str, object],
    reason: str,
):
    save_eagle3(student, tmp_path / "draft")
    if isinstance(content, str):
        (tmp_path / "draft" / "config.json").write_text(content)
    else:
        change_config(tmp_path / "draft", **content)
    versions = Versions(folder / FOLDER_NAME)
    with pytest.raises(VersionError, match=reason):
        import_draft(tmp_path / "draft", versions)
    assert versions.version_numbers() == []


def drop_part(name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: part for key, part in parts.items() if key != name}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda parts: drop_part("fc.weight", parts), "fc.weight"),
        (lambda parts: parts | {"more.weight": torch.zeros(2)}, "more.weight"),
        (lambda parts: parts | {"fc.weight": torch.zeros(1, 1)}, "fc.weight"),
        (lambda parts: parts | {"fc.weight": torch.zeros(32, 96, dtype=torch.int8)}, "floating"),
        (lambda parts: parts | {"norm.weight": torch.full((32,), torch.nan)}, "NaN"),
        (lambda parts: parts | {"d2t": torch.zeros(40, 2)}, "cannot be read"),
        (lambda parts: parts | {"embed_tokens.weight": torch.zeros(1 << 20)}, "larger than"),
        (lambda parts: drop_part("midlayer.self_attn.k_proj.weight", parts), "k_proj"),
        (lambda parts: {}, "cannot be read"),
    ],
)
def test_weights_of_another_kind_are_refused(
    folder: Path,
    tmp_path: Path,
    student: Eagle3Student,
    changed: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    reason: str,
):
    save_eagle3(student, tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    save_file(changed(load_file(weights)), weights)
    versions = Versions(folder / FOLDER_NAME)
    with pytest.raises(VersionError, match=reason):
        import_draft(tmp_path / "draft", versions)
    assert versions.version_numbers() == []


def test_pickled_weights_are_never_read(folder: Path, tmp_path: Path, student: Eagle3Student):
    save_eagle3(student, tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    parts = load_file(weights)
    weights.unlink()
    torch.save(parts, weights.with_name("pytorch_model.bin"))
    with pytest.raises(VersionError, match=r"model\.safetensors"):
        import_draft(tmp_path / "draft", Versions(folder / FOLDER_NAME))
    torch.save(parts, weights)
    with pytest.raises(VersionError, match="cannot be read as drafter of kind EAGLE3"):
        import_draft(tmp_path / "draft", Versions(folder / FOLDER_NAME))


def test_a_block_drafter_of_another_kind_is_refused(tmp_path: Path):
    torch.manual_seed(5)
    shape = DFlashShape(SHAPE.replace_layers(2), LAYERS, 8, SHAPE.vocabulary - 1)
    student = DFlashStudent(shape, torch.randn(SHAPE.vocabulary, SHAPE.hidden))
    versions = base_of(student, tmp_path / "signals")
    changes: dict[str, dict[str, object]] = {
        "its block is 4": {"block_size": 4},
        "its rope_base is 5.0": {"rope_theta": 5.0},
        "do not see the whole context": {"layer_types": ["sliding_attention"]},
        "has no mask_token_id, and there is no tokenizer": {"dflash_config": None},
        "has no mask_token_id": {"dflash_config": {"target_layer_ids": [0, 1, 2]}},
        "its feature_layers is": {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 39}},
        "its feature_layers is (1, 5)": {
            "dflash_config": {"mask_token_id": 39},
            "num_target_layers": 8,
        },
        "its block is 16": {"block_size": None},
        "dflash_config.attention_value_scale (0.6)": {
            "dflash_config": {
                "target_layer_ids": [0, 1, 2],
                "mask_token_id": 39,
                "attention_value_scale": 0.6,
            }
        },
        "of_tomorrow (1)": {"of_tomorrow": 1},
    }
    for number, (reason, change) in enumerate(changes.items()):
        place = tmp_path / str(number)
        save_dflash(student, place)
        change_config(place, **change)
        with pytest.raises(
            VersionError, match="cannot be read as drafter of kind DFlash"
        ) as raised:
            import_draft(place, versions)
        assert reason in str(raised.value)
    assert versions.version_numbers() == []


def test_a_block_drafter_is_imported_wherever_its_config_names_its_sizes(tmp_path: Path):
    """SGLang serves all of them as one drafter."""
    torch.manual_seed(5)
    shape = DFlashShape(SHAPE.replace_layers(2), LAYERS, 8, SHAPE.vocabulary - 1)
    student = DFlashStudent(shape, torch.randn(SHAPE.vocabulary, SHAPE.hidden))
    versions = base_of(student, tmp_path / "signals")
    sizes = {"target_layer_ids": [0, 1, 2], "mask_token_id": 39}
    changes: tuple[dict[str, object], ...] = (
        {},
        {"block_size": None, "dflash_config": sizes | {"block_size": 8}},
        {"block_size": 4, "dflash_config": sizes | {"block_size": 8}},
        {"dflash_config": None} | sizes,
        # The engine's, where nothing says how many the target has.
        {"dflash_config": {"mask_token_id": 39}},
    )
    for number, change in enumerate(changes, start=1):
        place = tmp_path / str(number)
        save_dflash(student, place)
        if change.get("block_size", 0) is None:
            config = json.loads((place / "config.json").read_text())
            del config["block_size"]
            (place / "config.json").write_text(json.dumps(config))
            del change["block_size"]
        change_config(place, **change)
        assert import_draft(place, versions) == number
        imported_student = versions.load_student(number)
        assert isinstance(imported_student, DFlashStudent)
        assert imported_student.shape == shape


def test_an_exported_block_drafter_is_weighed_as_its_paper_suggests(
    folder: Path, target: Path, tmp_path: Path
):
    for block, decay in ((8, 4), (16, 7)):
        shape = DFlashShape(SHAPE.replace_layers(2), LAYERS, block, SHAPE.vocabulary - 1)
        student = DFlashStudent(shape, torch.randn(SHAPE.vocabulary, SHAPE.hidden))
        out, place = tmp_path / str(block), tmp_path / f"{block}-signals"
        export_signals(folder, base_of(student, place), 0, target, out)
        training = json.loads((out / "specforge.json").read_text())["training"]
        assert training["loss_decay_gamma"] == decay


def test_a_target_that_is_none_is_refused(folder: Path, target: Path, tmp_path: Path):
    versions = Versions(folder / FOLDER_NAME)

    def refused(place: Path) -> str:
        with pytest.raises(TargetError) as raised:
            export_signals(folder, versions, 0, place, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(raised.value)

    assert "cannot be read as a target" in refused(Path("some/hub-name"))
    config = (target / "config.json").read_text()
    place = tmp_path / "place"
    place.mkdir()
    (place / "config.json").write_text(config)
    assert "has no model.embed_tokens.weight in safetensors files" in refused(place)
    parts = load_file(target / "model.safetensors")
    save_file({"model.embed_tokens.weight": torch.zeros(8, 32)}, place / "model.safetensors")
    assert "its embedding is (8, 32), the drafter's (40, 32)" in refused(place)
    save_file(parts, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert "its config does not tie the head" in refused(place)
    (place / "config.json").write_text("[" * 100_000)
    assert "cannot be read as a target" in refused(place)
    (place / "config.json").write_text(config)
    index = place / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": ["model.embed_tokens.weight"]}))
    assert "cannot be read as a target" in refused(place)
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "gone"}}))
    assert "cannot be read as a target" in refused(place)


def test_a_target_in_several_files_is_read_by_its_index(folder: Path, target: Path, tmp_path: Path):
    place = tmp_path / "sharded"
    place.mkdir()
    text = {**json.loads((target / "config.json").read_text()), "tie_word_embeddings": False}
    # As in a model for images and text.
    (place / "config.json").write_text(json.dumps({"text_config": text}))
    parts = load_file(target / "model.safetensors")
    embedding, name = parts["model.embed_tokens.weight"], "language_model.model.embed_tokens.weight"
    save_file({name: embedding}, place / "a.safetensors")
    save_file({"language_model.lm_head.weight": 2 * embedding}, place / "b.safetensors")
    save_file({"vision.embed_tokens.weight.x": embedding}, place / "c.safetensors")
    places = {name: "a.safetensors", "language_model.lm_head.weight": "b.safetensors"}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    export_signals(folder, Versions(folder / FOLDER_NAME), 0, place, tmp_path / "out")
    written = load_file(tmp_path / "out" / "target" / "model.safetensors")
    assert torch.equal(written["model.embed_tokens.weight"], embedding)
    assert torch.equal(written["lm_head.weight"], 2 * embedding)
