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
from engine_shim.sglang.training.signals import Signal, read_valid, signal_paths
from engine_shim.sglang.training.students import DraftStudent, dflash_shape, eagle3_shape
from engine_shim.sglang.training.versions import (
    VersionError,
    VersionOrigin,
    Versions,
    check_parameters,
)
from trainer.checkpoint import load_dflash, load_eagle3, save_dflash, save_eagle3, write_json
from trainer.specforge_target import (
    EMBEDDING,
    MALFORMED_ERRORS,
    TargetError,
    TargetParts,
    read_target,
    write_target,
)

_FOLDER_ROWS: Final = 2000
# A signal with fewer verified positions is useless for training a chain of drafts.
_MIN_VERIFIED_POSITIONS: Final = 8
# Number of target layers that SpecForge's EAGLE3 drafters read.
_EAGLE3_FEATURE_LAYERS: Final = 3
# Samples per step and GPU, and number of GPUs.  SpecForge drops samples that do not fill a step.
_MAX_BATCH: Final = 4
_MAX_PROCESSES: Final = 4
# The draft vocabulary as its trainer reads it.
_VOCABULARY_FILE: Final = "vocabulary.pt"
# Tensors that are not parameters, and the types of parameters.
_INTEGER_TENSORS: Final = {"d2t", "t2d"}
_FLOAT_TYPES: Final = {"F64", "F32", "F16", "BF16"}


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
    student = _require_trainable(versions.load_student(version))
    parts = read_target(target)
    _require_target(parts, student, target)
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} exists and is not empty: name a new or empty folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(mkdtemp(prefix=f"{out.name}.part-", dir=out.parent))
    try:
        count, longest = _write_samples(signals_folder, student, temporary / "features")
        _save_drafter(student, parts, temporary / "draft")
        write_target(parts, temporary / "target", target)
        write_json(
            temporary / "specforge.json", specforge_configuration(student, parts, count, longest)
        )
        # A trainer often runs as another user.
        temporary.chmod(0o755)
        temporary.rename(out)
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return count


def _write_samples(
    signals_folder: Path, student: Eagle3Student | DFlashStudent, features: Path
) -> tuple[int, int]:
    """Returns the number of samples and the positions of the longest one."""
    sample = eagle3_sample if isinstance(student, Eagle3Student) else dflash_sample
    count, longest = 0, 0
    for signal in read_valid(signal_paths(signals_folder)):
        if len(signal.tokens) - signal.context < _MIN_VERIFIED_POSITIONS:
            continue
        folder = count // _FOLDER_ROWS * _FOLDER_ROWS
        rows_folder = features / f"rows_{folder}-{folder + _FOLDER_ROWS}"
        rows_folder.mkdir(parents=True, exist_ok=True)
        torch.save(sample(signal), rows_folder / f"data_{count}.ckpt")
        count, longest = count + 1, max(longest, len(signal.tokens))
    if not count:
        raise ExportError(
            f"no signal of {_MIN_VERIFIED_POSITIONS} verified positions or more in {signals_folder}"
        )
    return count, longest


def _require_target(target: TargetParts, student: DraftStudent, folder: Path) -> None:
    """Raises TargetError if the folder has another target than the drafter's."""
    decoder = student.shape.decoder
    drafter_sizes, target_sizes = (
        (decoder.vocabulary, decoder.hidden),
        tuple(target.embedding.shape),
    )
    if drafter_sizes != target_sizes:
        raise TargetError(
            f"{folder} is not the drafter's target: its embedding is {target_sizes}, the drafter's "
            f"{drafter_sizes}"
        )


def _require_trainable(student: DraftStudent) -> Eagle3Student | DFlashStudent:
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
            f"the drafter reads {shape.feature_count} target layers, and SpecForge's read three": (
                shape.feature_count != _EAGLE3_FEATURE_LAYERS
            ),
            # SpecForge's t2d is a mask, which requires the order of the target's ids.
            "the drafter's d2t is not in the order of the target's ids, and SpecForge's are": (
                tokens is not None and not bool((tokens.diff() > 0).all())
            ),
        }
        for reason, applies in obstacles.items():
            if applies:
                raise ExportError(reason)
    return student


def _save_drafter(
    student: Eagle3Student | DFlashStudent, target: TargetParts, folder: Path
) -> None:
    if isinstance(student, DFlashStudent):
        save_dflash(student, folder, target_layers=target.layers)
        return
    save_eagle3(student, folder)
    if student.tokens is not None:
        weights = load_file(folder / "model.safetensors")
        torch.save({name: weights[name] for name in ("d2t", "t2d")}, folder / _VOCABULARY_FILE)


def specforge_configuration(
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
    vocabulary = {"vocab_mapping_path": f"draft/{_VOCABULARY_FILE}"} if pruned else {}
    processes = min(_MAX_PROCESSES, samples)
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
            "batch_size": min(_MAX_BATCH, samples // processes),
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
    base = _require_trainable(versions.load_student(0))
    kind = "EAGLE3" if isinstance(base, Eagle3Student) else "DFlash"
    try:
        imported = _load_drafter(folder, base)
    except MALFORMED_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise VersionError(
            f"{folder} cannot be read as drafter of kind {kind}: {reason}"
        ) from error
    parameters = dict(imported.named_parameters())
    check_parameters(parameters, dict(base.named_parameters()), folder)
    version_facts = VersionOrigin(0, 0.0, 0.0, 0.0, 0, 0.0)
    return versions.publish(parameters, version_facts)


def _load_drafter(
    folder: Path, base: Eagle3Student | DFlashStudent
) -> Eagle3Student | DFlashStudent:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if isinstance(base, Eagle3Student):
        # The sizes are compared before tensors of these sizes are allocated.
        _require_same_shape(eagle3_shape(config), base.shape)
        _require_float_weights(folder / "model.safetensors", base)
        draft = load_eagle3(folder, base.embedding, base.head)
        _require_same_tokens(draft, base)
        return draft
    # If the config names no layers, the engine would use the base drafter's layers.
    base_layers = base.shape.feature_layers
    _require_same_shape(dflash_shape(config, unnamed_layers=base_layers), base.shape)
    _require_float_weights(folder / "model.safetensors", base)
    return load_dflash(folder, base.embedding, base.head, unnamed_layers=base_layers)


def _shape_fields(shape: Eagle3Shape | DFlashShape) -> dict[str, Any]:
    shape_fields = asdict(shape)
    decoder: dict[str, Any] = shape_fields.pop("decoder")
    return decoder | shape_fields


def _require_same_shape(draft: Eagle3Shape | DFlashShape, base: Eagle3Shape | DFlashShape) -> None:
    """Raises ValueError if the draft's configuration differs from that of ``base``.

    The parameters alone do not show the rotary base, the norms' epsilon, or the target layers that
    are read.
    """
    base_fields, draft_fields = _shape_fields(base), _shape_fields(draft)
    if not (base_fields["feature_layers"] and draft_fields["feature_layers"]):
        # Without layer names the engine chooses them; the config does not contain their number.
        del base_fields["feature_layers"]
    # It does not change the computation.
    del base_fields["max_positions"]
    for name, base_value in base_fields.items():
        if draft_fields[name] != base_value:
            raise ValueError(
                f"its {name} is {draft_fields[name]}, the engine's drafter has {base_value}"
            )


def _require_same_tokens(draft: Eagle3Student, base: Eagle3Student) -> None:
    """Raises ValueError if the draft has another draft vocabulary."""
    draft_tokens, base_tokens = (
        None if token_map is None else token_map.tolist()
        for token_map in (draft.tokens, base.tokens)
    )
    if draft_tokens != base_tokens:
        raise ValueError("its d2t is not that of the engine's drafter")


def _require_float_weights(weights: Path, base: Eagle3Student | DFlashStudent) -> None:
    """Raises ValueError for weights that are quantised, or larger than such a drafter has."""
    # float64, plus the embedding as a bound for the other tensors: the embedding, d2t and t2d.
    max_bytes = 8 * (sum(part.numel() for part in base.parameters()) + base.embedding.numel())
    with safe_open(weights, "pt") as file:
        names = file.keys()
        types = {name: file.get_slice(name).get_dtype() for name in names}
    non_float_types = {name: kind for name, kind in types.items() if kind not in _FLOAT_TYPES}
    if non_float_types.keys() - _INTEGER_TENSORS:
        raise ValueError(
            f"weights must be floating-point numbers, and these are not: {non_float_types}"
        )
    if weights.stat().st_size > max_bytes + (1 << 20):
        raise ValueError(f"{weights} is larger than such a drafter can be ({max_bytes} bytes)")
