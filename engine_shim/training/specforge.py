"""Hands signals to SpecForge, for training that outgrows one machine, and takes drafters back.

SpecForge: arXiv:2603.18567, package `specforge` 0.2.0.  Its offline trainer reads a folder of
`torch.save` dictionaries, one sample each; what it has trained and exported (`specforge export`)
comes back as a version of the drafter, which serves without a restart.

    export_signals      features/rows_A-B/data_I.ckpt, draft/ (the drafter to continue from) and
                        specforge.json (for `specforge train --config`)
    import_draft        a drafter's folder -> the next version
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from engine_shim.training.checkpoint import load_dflash, load_draft, save_dflash, save_draft
from engine_shim.training.dflash import DFlashStudent
from engine_shim.training.eagle3 import Eagle3Shape, Eagle3Student
from engine_shim.training.mtp import MtpStudent
from engine_shim.training.signals import Signal, readable, signal_paths
from engine_shim.training.students import DraftStudent
from engine_shim.training.versions import Made, VersionError, Versions, check_parameters

_FOLDER_ROWS: Final = 2000
# Shorter ones teach a chain of drafts nothing.
_LEAST: Final = 8


class ExportError(ValueError):
    """SpecForge could not train on the signals or the drafter; the message says why."""


def eagle3_sample(signal: Signal) -> dict[str, torch.Tensor]:
    """Makes a sample for SpecForge's offline EAGLE3 reader.

    input_ids, loss_mask: int64 [n].  aux_hidden_state: [1, n, feature layers * hidden].
    hidden_state: [1, n, hidden], what the target's head is applied to.  Raises ExportError.
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

    input_ids, loss_mask: int64 [n].  hidden_states: [n, feature layers * hidden].
    """
    return _sample(signal) | {"hidden_states": signal.features}


def _sample(signal: Signal) -> dict[str, torch.Tensor]:
    return {
        "input_ids": signal.tokens.to(torch.int64),
        # A prompt's positions are context only.
        "loss_mask": (torch.arange(len(signal.tokens)) >= signal.context).to(torch.int64),
    }


def export_signals(
    signals_folder: Path, versions: Versions, version: int, target: str, out: Path
) -> int:
    """Writes what `specforge train` needs; returns the number of samples.

    version: of the drafter to continue from.  target: path of the target model, for its head and
    embedding; a folder where the drafter is a DFlash one.  Raises ExportError, VersionError,
    OSError.
    """
    student = _trainable(versions.student(version))
    sample = eagle3_sample if isinstance(student, Eagle3Student) else dflash_sample
    count, longest = 0, 0
    for signal in readable(signal_paths(signals_folder)):
        if len(signal.tokens) < _LEAST:
            continue
        folder = count // _FOLDER_ROWS * _FOLDER_ROWS
        place = out / "features" / f"rows_{folder}-{folder + _FOLDER_ROWS}"
        place.mkdir(parents=True, exist_ok=True)
        torch.save(sample(signal), place / f"data_{count}.ckpt")
        count, longest = count + 1, max(longest, len(signal.tokens))
    if not count:
        raise ExportError(f"no signal of {_LEAST} positions or more in {signals_folder}")
    _save(student, target, out / "draft")
    text = json.dumps(configuration(student, target, out, longest), indent=2)
    (out / "specforge.json").write_text(text + "\n", encoding="utf-8")
    return count


def _trainable(student: DraftStudent) -> Eagle3Student | DFlashStudent:
    """Raises ExportError for a drafter that SpecForge has no recipe for."""
    if isinstance(student, MtpStudent):
        raise ExportError("SpecForge trains EAGLE3 and DFlash drafters, not multi-token predictors")
    if isinstance(student, Eagle3Student):
        tokens, shape = student.tokens, student.shape
        obstacles = {
            "the drafter's head is the target's, and SpecForge trains one": not shape.own_head,
            "the drafter has a norm before fc (norm_before_fc), and SpecForge's have none": (
                shape.norm_before_fc
            ),
            # Its t2d is a mask, which keeps the order of the target's ids.
            "the drafter's d2t is not in the order of the target's ids, and SpecForge's are": (
                tokens is not None and not bool((tokens.diff() > 0).all())
            ),
        }
        for reason, is_so in obstacles.items():
            if is_so:
                raise ExportError(reason)
    return student


def _save(student: Eagle3Student | DFlashStudent, target: str, folder: Path) -> None:
    if isinstance(student, Eagle3Student):
        save_draft(student, folder)
        return
    config = Path(target) / "config.json"
    try:
        layers = json.loads(config.read_text(encoding="utf-8"))["num_hidden_layers"]
    except (OSError, ValueError, KeyError) as error:
        raise ExportError(
            f"{config} does not give the target's num_hidden_layers, which a DFlash drafter's "
            f"config needs: {error}"
        ) from error
    save_dflash(student, folder, target_layers=layers)


def configuration(
    student: Eagle3Student | DFlashStudent, target: str, out: Path, longest: int
) -> dict[str, Any]:
    """Configures SpecForge's trainer: FSDP on the GPUs of one node, from the exported drafter."""
    if isinstance(student, Eagle3Student):
        strategy: dict[str, Any] = {"strategy": "eagle3", "ttt_length": 7}
    else:
        strategy = {"strategy": "dflash"}
    return {
        "model": {
            "target_model_path": target,
            "draft_model_config": str(out / "draft" / "config.json"),
            "draft_checkpoint_path": str(out / "draft"),
        },
        "data": {"hidden_states_path": str(out / "features"), "max_length": longest},
        "training": {
            **strategy,
            "num_epochs": 4,
            "batch_size": 4,
            "learning_rate": 1.0e-4,
            "attention_backend": "sdpa",
            "fsdp_sharding": "SHARD_GRAD_OP",
        },
        "deployment": {"mode": "local_colocated", "trainer": {"nproc_per_node": 4}},
        "run_id": "from-signals",
        "output_dir": str(out / "runs"),
    }


def import_draft(folder: Path, versions: Versions) -> int:
    """Stores a drafter in SGLang's layout (`specforge export --to sglang`); returns its version.

    Raises VersionError where it is not the base's kind of drafter, ExportError where SpecForge has
    no such kind.
    """
    base = _trainable(versions.student(0))
    kind = "EAGLE3" if isinstance(base, Eagle3Student) else "DFlash"
    try:
        made = _load(folder, base)
    except (KeyError, RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise VersionError(f"{folder} cannot be read as {kind} drafter: {error}") from error
    parameters = dict(made.named_parameters())
    check_parameters(parameters, dict(base.named_parameters()), folder)
    facts = Made(0, 0.0, 0.0, 0.0, 0, 0.0)
    return versions.publish(parameters, facts)


def _load(folder: Path, like: Eagle3Student | DFlashStudent) -> Eagle3Student | DFlashStudent:
    if isinstance(like, Eagle3Student):
        draft = load_draft(folder, like.embedding, like.head)
        _require_alike(draft, like)
        return draft
    made = load_dflash(folder, like.embedding, like.head)
    ours, theirs = like.shape, made.shape
    if (ours.block, ours.mask_token) != (theirs.block, theirs.mask_token):
        raise ValueError(
            f"blocks of {theirs.block} with mask token {theirs.mask_token}, the drafter's are of "
            f"{ours.block} with {ours.mask_token}"
        )
    return made


def _facts(shape: Eagle3Shape) -> dict[str, Any]:
    facts = asdict(shape)
    decoder: dict[str, Any] = facts.pop("decoder")
    return decoder | facts


def _require_alike(draft: Eagle3Student, like: Eagle3Student) -> None:
    """Raises ValueError where a draft with these parameters would be another one than ``like``.

    Parameters alone do not show the rotary base, the norms' epsilon, which tokens the head drafts,
    or which target layers are read.
    """
    ours, theirs = _facts(like.shape), _facts(draft.shape)
    if not (ours["feature_layers"] and theirs["feature_layers"]):
        # Without names the engine chooses, and the config does not say of how many layers.
        del ours["feature_layers"]
    # It says nothing about what is computed.
    del ours["max_positions"]
    for name, fact in ours.items():
        if theirs[name] != fact:
            raise ValueError(f"its {name} is {theirs[name]}, that of the engine's drafter {fact}")
    if (draft.tokens is None) != (like.tokens is None) or (
        draft.tokens is not None
        and like.tokens is not None
        and not torch.equal(draft.tokens, like.tokens)
    ):
        raise ValueError("its d2t is not that of the engine's drafter")
