"""Exports signals to SpecForge, for training on more than one GPU, and imports trained drafters.

SpecForge: arXiv:2603.18567, package `specforge` 0.2.0.  Its offline trainer reads a folder of
`torch.save` dictionaries, one sample each.  A drafter that it has trained and exported (`specforge
export`) is imported as a version of the drafter, which serves without a restart.

    export_signals      features/rows_A-B/data_I.ckpt, draft/ (the drafter to continue from),
                        target/ (the target's config, embedding and head) and specforge.json (for
                        `specforge train --config`, in the folder itself: its paths are relative)
    import_draft        a drafter's folder -> the next version
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student, MtpStudent
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent, loss_decay
from engine_shim.sglang.training.signals import Signal, readable, signal_paths
from engine_shim.sglang.training.students import DraftStudent, dflash_shape, eagle3_shape
from engine_shim.sglang.training.versions import Made, VersionError, Versions, check_parameters
from trainer.checkpoint import load_dflash, load_draft, save_dflash, save_draft, write_json
from trainer.specforge_target import (
    EMBEDDING,
    MALFORMED,
    TargetError,
    TargetParts,
    read_target,
    write_target,
)

_FOLDER_ROWS: Final = 2000
# A signal with fewer verified positions is useless for training a chain of drafts.
_LEAST: Final = 8
# Number of target layers that SpecForge's EAGLE3 drafters read.
_FEATURES: Final = 3
# Samples per step and GPU, and number of GPUs.  SpecForge drops samples that do not fill a step.
_BATCH: Final = 4
_PROCESSES: Final = 4
# The draft vocabulary as its trainer reads it.
_VOCABULARY: Final = "vocabulary.pt"
# Tensors that are not parameters, and the types of parameters.
_INTEGERS: Final = {"d2t", "t2d"}
_FLOATS: Final = {"F64", "F32", "F16", "BF16"}


class ExportError(ValueError):
    """SpecForge cannot train on the signals or the drafter; the message says why."""


def eagle3_sample(signal: Signal) -> dict[str, torch.Tensor]:
    """Makes a sample for SpecForge's offline EAGLE3 reader.

    input_ids, loss_mask: int64 [n].  aux_hidden_state: [1, n, feature layers * hidden].
    hidden_state: [1, n, hidden], the input of the target's head.  Raises ExportError.
    """
    if signal.final is None:
        raise ExportError(
            "the signals have no last hidden states of the target: collect them with "
            "SPECULATION_SIGNALS_FINAL_STATES=1"
        )
    return _sample(signal) | {
        "aux_hidden_state": signal.features[None],
        "hidden_state": signal.final[None],
    }


def dflash_sample(signal: Signal) -> dict[str, torch.Tensor]:
    """Makes a sample for SpecForge's offline DFlash reader.

    input_ids, loss_mask: int64 [n].  hidden_states: [n, feature layers * hidden].  The first
    position is masked: a block that begins there would have no context, unlike in service.
    """
    sample = _sample(signal) | {"hidden_states": signal.features}
    sample["loss_mask"][0] = 0
    return sample


def _sample(signal: Signal) -> dict[str, torch.Tensor]:
    return {
        "input_ids": signal.tokens.to(torch.int64),
        # A prompt's positions are context only.
        "loss_mask": (torch.arange(len(signal.tokens)) >= signal.context).to(torch.int64),
    }


def export_signals(
    signals_folder: Path, versions: Versions, version: int, target: Path, out: Path
) -> int:
    """Writes the input of `specforge train`; returns the number of samples.

    version: of the drafter to continue from.  target: the target's folder, for its config,
    embedding and head.  out: must not exist or be empty.  It is written atomically; a killed export
    leaves a folder OUT.part-... beside it.  Raises ExportError, TargetError, VersionError, OSError.
    """
    student = _trainable(versions.student(version))
    parts = read_target(target)
    _require_target(parts, student, target)
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} exists and is not empty: name a new or empty folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=f"{out.name}.part-", dir=out.parent))
    try:
        count, longest = _write_samples(signals_folder, student, aside / "features")
        _save(student, parts, aside / "draft")
        write_target(parts, aside / "target", target)
        write_json(aside / "specforge.json", configuration(student, parts, count, longest))
        # A trainer often runs as another user.
        aside.chmod(0o755)
        aside.rename(out)
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return count


def _write_samples(
    signals_folder: Path, student: Eagle3Student | DFlashStudent, features: Path
) -> tuple[int, int]:
    """Returns the number of samples and the positions of the longest one."""
    sample = eagle3_sample if isinstance(student, Eagle3Student) else dflash_sample
    count, longest = 0, 0
    for signal in readable(signal_paths(signals_folder)):
        if len(signal.tokens) - signal.context < _LEAST:
            continue
        folder = count // _FOLDER_ROWS * _FOLDER_ROWS
        place = features / f"rows_{folder}-{folder + _FOLDER_ROWS}"
        place.mkdir(parents=True, exist_ok=True)
        torch.save(sample(signal), place / f"data_{count}.ckpt")
        count, longest = count + 1, max(longest, len(signal.tokens))
    if not count:
        raise ExportError(f"no signal of {_LEAST} verified positions or more in {signals_folder}")
    return count, longest


def _require_target(target: TargetParts, student: DraftStudent, folder: Path) -> None:
    """Raises TargetError if the folder has another target than the drafter's."""
    decoder = student.shape.decoder
    ours, theirs = (decoder.vocabulary, decoder.hidden), tuple(target.embedding.shape)
    if ours != theirs:
        raise TargetError(
            f"{folder} is not the drafter's target: its embedding is {theirs}, the drafter's {ours}"
        )


def _trainable(student: DraftStudent) -> Eagle3Student | DFlashStudent:
    """Returns the drafter.  Raises ExportError if SpecForge cannot train it."""
    if isinstance(student, MtpStudent):
        raise ExportError("SpecForge trains EAGLE3 and DFlash drafters, not multi-token predictors")
    if isinstance(student, Eagle3Student):
        tokens, shape = student.tokens, student.shape
        obstacles = {
            "the drafter's head is the target's, and SpecForge trains one": not shape.own_head,
            "the drafter has a norm before fc (norm_before_fc), and SpecForge's have none": (
                shape.norm_before_fc
            ),
            f"the drafter reads {shape.features} target layers, and SpecForge's read three": (
                shape.features != _FEATURES
            ),
            # SpecForge's t2d is a mask, which requires the order of the target's ids.
            "the drafter's d2t is not in the order of the target's ids, and SpecForge's are": (
                tokens is not None and not bool((tokens.diff() > 0).all())
            ),
        }
        for reason, is_so in obstacles.items():
            if is_so:
                raise ExportError(reason)
    return student


def _save(student: Eagle3Student | DFlashStudent, target: TargetParts, folder: Path) -> None:
    if isinstance(student, DFlashStudent):
        save_dflash(student, folder, target_layers=target.layers)
        return
    save_draft(student, folder)
    if student.tokens is not None:
        weights = load_file(folder / "model.safetensors")
        torch.save({name: weights[name] for name in ("d2t", "t2d")}, folder / _VOCABULARY)


def configuration(
    student: Eagle3Student | DFlashStudent, target: TargetParts, samples: int, longest: int
) -> dict[str, Any]:
    """Configures SpecForge's trainer: FSDP on the GPUs of one node, from the exported drafter.

    The attention is SDPA, which SpecForge supports for both kinds of drafters.  Paths are relative
    to the folder of the export.  samples: number of samples.  longest: positions of the longest.
    """
    if isinstance(student, Eagle3Student):
        strategy: dict[str, Any] = {"strategy": "eagle3", "ttt_length": 7}
    else:
        # By default SpecForge weights all positions equally.
        strategy = {"strategy": "dflash", "loss_decay_gamma": loss_decay(student.shape.block)}
    # Otherwise the trainer makes a new draft vocabulary of the samples' most frequent tokens.
    pruned = isinstance(student, Eagle3Student) and student.tokens is not None
    vocabulary = {"vocab_mapping_path": f"draft/{_VOCABULARY}"} if pruned else {}
    processes = min(_PROCESSES, samples)
    return {
        "model": {
            "target_model_path": "target",
            "embedding_key": EMBEDDING,
            "lm_head_key": target.head_key,
            "draft_model_config": "draft/config.json",
            "draft_checkpoint_path": "draft",
            **vocabulary,
        },
        "data": {"hidden_states_path": "features", "max_length": longest},
        "training": {
            **strategy,
            "num_epochs": 4,
            "batch_size": min(_BATCH, samples // processes),
            "learning_rate": 1.0e-4,
            "attention_backend": "sdpa",
            "fsdp_sharding": "SHARD_GRAD_OP",
        },
        "deployment": {"mode": "local_colocated", "trainer": {"nproc_per_node": processes}},
        "run_id": "from-signals",
        "output_dir": "runs",
    }


def import_draft(folder: Path, versions: Versions) -> int:
    """Stores a drafter that `specforge export` has written; returns its version.

    EAGLE3 drafters are exported with `--to sglang`, DFlash drafters with `--to hf`.  Only JSON and
    safetensors are read.  Raises VersionError if the kind of drafter differs from the base's, and
    ExportError if SpecForge does not support that kind.
    """
    base = _trainable(versions.student(0))
    kind = "EAGLE3" if isinstance(base, Eagle3Student) else "DFlash"
    try:
        made = _load(folder, base)
    except MALFORMED as error:
        reason = str(error) or type(error).__name__
        raise VersionError(
            f"{folder} cannot be read as drafter of kind {kind}: {reason}"
        ) from error
    parameters = dict(made.named_parameters())
    check_parameters(parameters, dict(base.named_parameters()), folder)
    facts = Made(0, 0.0, 0.0, 0.0, 0, 0.0)
    return versions.publish(parameters, facts)


def _load(folder: Path, like: Eagle3Student | DFlashStudent) -> Eagle3Student | DFlashStudent:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if isinstance(like, Eagle3Student):
        # The sizes are compared before tensors of these sizes are allocated.
        _require_alike(eagle3_shape(config), like.shape)
        _require_floats(folder / "model.safetensors", like)
        draft = load_draft(folder, like.embedding, like.head)
        _require_tokens(draft, like)
        return draft
    # If the config names no layers, the engine would use the base drafter's layers.
    unnamed = like.shape.feature_layers
    _require_alike(dflash_shape(config, unnamed_layers=unnamed), like.shape)
    _require_floats(folder / "model.safetensors", like)
    return load_dflash(folder, like.embedding, like.head, unnamed_layers=unnamed)


def _facts(shape: Eagle3Shape | DFlashShape) -> dict[str, Any]:
    facts = asdict(shape)
    decoder: dict[str, Any] = facts.pop("decoder")
    return decoder | facts


def _require_alike(draft: Eagle3Shape | DFlashShape, like: Eagle3Shape | DFlashShape) -> None:
    """Raises ValueError if the draft's configuration differs from that of ``like``.

    The parameters alone do not show the rotary base, the norms' epsilon, or the target layers that
    are read.
    """
    ours, theirs = _facts(like), _facts(draft)
    if not (ours["feature_layers"] and theirs["feature_layers"]):
        # Without layer names the engine chooses them; the config does not contain their number.
        del ours["feature_layers"]
    # It does not change the computation.
    del ours["max_positions"]
    for name, fact in ours.items():
        if theirs[name] != fact:
            raise ValueError(f"its {name} is {theirs[name]}, the engine's drafter has {fact}")


def _require_tokens(draft: Eagle3Student, like: Eagle3Student) -> None:
    """Raises ValueError if the draft has another draft vocabulary."""
    theirs, ours = (None if own is None else own.tolist() for own in (draft.tokens, like.tokens))
    if theirs != ours:
        raise ValueError("its d2t is not that of the engine's drafter")


def _require_floats(weights: Path, like: Eagle3Student | DFlashStudent) -> None:
    """Raises ValueError for weights that are quantised, or larger than such a drafter has."""
    # float64, plus the embedding as a bound for the other tensors: the embedding, d2t and t2d.
    most = 8 * (sum(part.numel() for part in like.parameters()) + like.embedding.numel())
    with safe_open(weights, "pt") as file:
        names = file.keys()
        types = {name: file.get_slice(name).get_dtype() for name in names}
    others = {name: kind for name, kind in types.items() if kind not in _FLOATS}
    if others.keys() - _INTEGERS:
        raise ValueError(f"weights must be floating-point numbers, and these are not: {others}")
    if weights.stat().st_size > most + (1 << 20):
        raise ValueError(f"{weights} is larger than such a drafter can be ({most} bytes)")
