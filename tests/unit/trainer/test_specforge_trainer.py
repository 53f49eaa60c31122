"""SpecForge's own trainer on what is exported, and its drafters as versions.

The losses that it logs are those of the same drafters here, on the same samples: features, shifts,
masks, positions, vocabularies and weights of positions mean the same to both.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent, position_weights
from engine_shim.sglang.training.online import divergence
from engine_shim.sglang.training.signals import Signal, SignalStore
from engine_shim.sglang.training.students import DraftStudent
from engine_shim.sglang.training.versions import FOLDER_NAME, Versions
from lab.cpu_engine.models.targets import save_target
from tests.support.specforge_runs import Run, train_runs
from tests.support.training_rounds import SHAPE, make_target, with_draft_vocabulary
from trainer.checkpoint import load_dflash, load_eagle3
from trainer.specforge import export_signals, import_draft

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS = (0, 1, 2)
ROWS = (24, 17, 12)
# Of them, positions of the prompt.
CONTEXTS = (5, 0, 0)
DEPTH = 3
PART = torch.arange(SHAPE.vocabulary)[torch.arange(SHAPE.vocabulary) % 4 != 1]
# In float32, so that losses can be compared; the target's head is bfloat16 in any case.
OVERRIDES = (
    "model.torch_dtype=float32",
    f"training.batch_size={len(ROWS)}",
    "training.max_steps=2",
    "training.learning_rate=0.01",
    "training.warmup_ratio=0",
)


@dataclass(frozen=True)
class Trained:
    """One kind's export, what the trainer has logged of it, and the versions it came from."""

    exported: Path
    logged: list[dict[str, Any]]
    versions: Versions
    trained_folder: Path

    def samples(self) -> list[dict[str, Tensor]]:
        checkpoints = sorted((self.exported / "features").rglob("*.ckpt"))
        return [torch.load(path) for path in checkpoints]

    def configuration(self) -> dict[str, Any]:
        specforge_config: dict[str, Any] = json.loads(
            (self.exported / "specforge.json").read_text()
        )
        return specforge_config


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that ties its head to the embedding, in one file, and one with a head of its own."""
    place = tmp_path_factory.mktemp("targets")
    folders = {name: place / name for name in ("tied", "untied")}
    for folder in folders.values():
        save_target(make_target(), folder)
    weights = load_file(folders["untied"] / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(SHAPE.vocabulary, SHAPE.hidden, generator=generator)
    weights["lm_head.weight"] = head.to(torch.bfloat16)
    save_file(weights, folders["untied"] / "model.safetensors", {"format": "pt"})
    config = json.loads((folders["untied"] / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (folders["untied"] / "config.json").write_text(json.dumps(config))
    return folders


def signals() -> list[Signal]:
    target = make_target()
    signal_list = []
    for seed, (rows, context) in enumerate(zip(ROWS, CONTEXTS, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(SHAPE.vocabulary, (1, rows), generator=generator)
        with torch.no_grad():
            final, features = target.hidden_and_features(tokens, LAYERS)
            logs = target(tokens).log_softmax(-1)
        top_logs, top = logs[0, context:].topk(4, dim=-1)
        signal_list.append(
            Signal(
                tokens[0],
                torch.cat(features, dim=-1)[0].to(torch.bfloat16),
                top.int(),
                top_logs,
                start=0,
                accepted=1,
                tried=2,
                final=final[0].to(torch.bfloat16),
                context=context,
            )
        )
    return signal_list


def students() -> dict[str, DraftStudent]:
    torch.manual_seed(4)
    embedding = make_target().model.embed_tokens.weight.detach()
    # Nothing that a reader of the config could have by default.
    decoder = replace(SHAPE, rope_base=500.0, norm_epsilon=1e-3)
    whole = Eagle3Student(Eagle3Shape(decoder.replace_layers(1), LAYERS, fc_norm=True), embedding)
    blocks = DFlashShape(decoder.replace_layers(2), LAYERS, 6, SHAPE.vocabulary - 1)
    students_by_name: dict[str, DraftStudent] = {
        "whole": whole,
        "part": with_draft_vocabulary(whole, PART),
        "blocks": DFlashStudent(blocks, embedding),
    }
    for student in students_by_name.values():
        with torch.no_grad():
            for part in student.parameters():
                if part.dim() == 2:
                    part.mul_(4)
    return students_by_name


@pytest.fixture(scope="module")
def runs(targets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    place = tmp_path_factory.mktemp("specforge")
    versions = {}
    planned = {}
    more: tuple[str, ...]
    for name, student in students().items():
        folder = place / name
        store = SignalStore(folder, 1 << 30)
        for signal in signals():
            store.add(signal)
        versions[name] = Versions(folder / FOLDER_NAME)
        parameters = {key: part.detach() for key, part in student.named_parameters()}
        versions[name].adopt_base(student.shape, parameters, student.borrowed)
        target = targets["untied" if name == "part" else "tied"]
        out = place / f"{name}-exported"
        assert export_signals(folder, versions[name], 0, target, out) == len(ROWS)
        widen(out)
        form, more = "sglang", (f"training.ttt_length={DEPTH}",)
        if name == "blocks":
            form, more = "hf", ()
        planned[name] = Run(out, form, (*OVERRIDES, *more))
    logged = train_runs(*planned.values(), kernel=True)
    return {
        name: Trained(run.exported, steps, versions[name], run.trained_folder)
        for (name, run), steps in zip(planned.items(), logged, strict=True)
    }


def widen(exported: Path) -> None:
    """The features as float32: the trainer casts them in FSDP only, which needs a GPU."""
    for path in (exported / "features").rglob("*.ckpt"):
        sample = torch.load(path)
        for name in sample.keys() & {"aux_hidden_state", "hidden_states"}:
            sample[name] = sample[name].float()
        torch.save(sample, path)


def target_logits(run: Trained, sample: dict[str, Tensor], head: str) -> Tensor:
    """As SpecForge computes them, in bfloat16: [n, vocabulary]."""
    weights = load_file(run.exported / "target" / "model.safetensors")[head]
    return functional.linear(sample["hidden_state"][0], weights).float()


@torch.no_grad()
def chain_logs(student: Eagle3Student, sample: dict[str, Tensor]) -> list[Tensor]:
    """Log-probabilities by depth: row p of depth k predicts what the target does at p + 1 + k."""
    tokens = functional.pad(sample["input_ids"], (0, DEPTH))[None]
    unrolled = student.unroll(sample["aux_hidden_state"].float(), tokens, DEPTH)
    rows = len(sample["input_ids"]) - 1
    return [logits[0, : rows - k].log_softmax(-1) for k, logits in enumerate(unrolled)]


def exported_embedding(run: Trained) -> Tensor:
    return load_file(run.exported / "target" / "model.safetensors")["model.embed_tokens.weight"]


def test_a_chain_has_the_same_loss_here_and_there(runs: dict[str, Trained]) -> None:
    run = runs["whole"]
    student = load_eagle3(run.exported / "draft", exported_embedding(run))
    expected = torch.zeros(DEPTH)
    for sample in run.samples():
        targets = target_logits(run, sample, "model.embed_tokens.weight").log_softmax(-1)
        every = torch.arange(SHAPE.vocabulary).expand(1, len(targets), -1)
        for k, logs in enumerate(chain_logs(student, sample)):
            taught, mask = targets[1 + k :], sample["loss_mask"][k : k + len(logs)]
            entropy = -(taught.exp() * taught).sum(-1)
            ours = divergence(every[:, 1 + k :], taught[None], logs[None])[0]
            expected[k] += ((ours + entropy) * mask).sum() / (len(ROWS) * max(ROWS))
    logged = [run.logged[0][f"ploss_{k}"] for k in range(DEPTH)]
    assert logged == pytest.approx(expected.tolist(), rel=1e-4)
    weights = [student.position_discount**k for k in range(DEPTH)]
    whole = sum(weight * loss for weight, loss in zip(weights, logged, strict=True))
    assert run.logged[0]["loss"] == pytest.approx(whole, rel=1e-5)


def test_a_draft_vocabulary_and_a_head_of_the_targets_own_mean_the_same(
    runs: dict[str, Trained],
) -> None:
    """SpecForge renormalises over the draft vocabulary, and passes over tokens outside of it."""
    run = runs["part"]
    student = load_eagle3(run.exported / "draft", exported_embedding(run))
    assert student.tokens is not None
    expected = torch.zeros(DEPTH)
    for sample in run.samples():
        targets = target_logits(run, sample, "lm_head.weight")
        counted = torch.isin(targets.argmax(-1), PART)
        assert 0 < int(counted.sum()) < len(counted)
        renormalised = targets[:, PART].softmax(-1)
        for k, logs in enumerate(chain_logs(student, sample)):
            mask = counted[1 + k :] * sample["loss_mask"][k : k + len(logs)]
            losses = -(renormalised[1 + k :] * logs).sum(-1) * mask
            expected[k] += losses.sum() / (len(ROWS) * max(ROWS))
    logged = [run.logged[0][f"ploss_{k}"] for k in range(DEPTH)]
    assert logged == pytest.approx(expected.tolist(), rel=1e-4)


@torch.no_grad()
def test_a_block_has_the_same_loss_here_and_there(runs: dict[str, Trained]) -> None:
    run = runs["blocks"]
    student = load_dflash(run.exported / "draft", exported_embedding(run))
    total = weight = torch.zeros(())
    for sample in run.samples():
        tokens, rows = sample["input_ids"], len(sample["input_ids"])
        mask = sample["loss_mask"]
        # A block begins at a verified token, which has a context and a successor.
        anchors = (mask[:-1] * mask[1:]).nonzero().flatten()
        assert anchors[0] == mask.argmax() > 0
        features = sample["hidden_states"][None].float()
        logs = student.block_logits(features, tokens[None], anchors)[0].log_softmax(-1)
        places = anchors[:, None] + torch.arange(1, student.shape.block)
        weights = position_weights(student.shape.block) * (places < rows)
        taught = tokens[places.clamp_max(rows - 1)]
        losses = -logs.gather(-1, taught[..., None])[..., 0]
        total, weight = total + (losses * weights).sum(), weight + weights.sum()
    assert run.logged[0]["loss"] == pytest.approx(float(total / weight), rel=1e-4)


@pytest.mark.parametrize("name", ["whole", "part", "blocks"])
def test_what_it_has_trained_becomes_a_version(name: str, runs: dict[str, Trained]) -> None:
    run = runs[name]
    assert len(run.logged) == 2
    assert run.logged[1]["loss"] != run.logged[0]["loss"]
    assert import_draft(run.trained_folder, run.versions) == 1
    assert run.versions.read_origin(1).is_imported
    before = dict(run.versions.load_student(0).named_parameters())
    stored = load_file(run.trained_folder / "model.safetensors")
    for key, part in run.versions.load_student(1).named_parameters():
        assert not torch.equal(part, before[key]), key
    if name != "blocks":
        tokens = PART if name == "part" else torch.arange(SHAPE.vocabulary)
        assert torch.equal(stored["d2t"] + torch.arange(len(tokens)), tokens)
        assert torch.equal(stored["t2d"].nonzero().flatten(), tokens)


def test_the_configuration_is_one_for_gpus_and_names_what_is_beside_it(
    runs: dict[str, Trained], targets: dict[str, Path]
) -> None:
    expected = {
        "whole": ("eagle3", "model.embed_tokens.weight", None),
        "part": ("eagle3", "lm_head.weight", None),
        "blocks": ("dflash", "model.embed_tokens.weight", 3.0),
    }
    for name, (strategy, head, gamma) in expected.items():
        specforge_config = runs[name].configuration()
        training, model = specforge_config["training"], specforge_config["model"]
        assert training["strategy"] == strategy
        assert training.get("loss_decay_gamma") == gamma
        assert training["fsdp_sharding"] == "SHARD_GRAD_OP"
        assert model["lm_head_key"] == head
        assert specforge_config["data"]["max_length"] == max(ROWS)
        # No sample is left out, however few there are.
        assert (
            specforge_config["deployment"]["trainer"]["nproc_per_node"] * training["batch_size"]
            == 3
        )
        index = json.loads(
            (runs[name].exported / "target" / "model.safetensors.index.json").read_text()
        )
        assert head in index["weight_map"]
    weights = load_file(runs["part"].exported / "target" / "model.safetensors")
    source = load_file(targets["untied"] / "model.safetensors")
    assert weights.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    for key, part in weights.items():
        assert torch.equal(part, source[key])
