"""Hand-off to SpecForge, where training outgrows one machine: signals out, drafters in.

SpecForge: arXiv:2603.18567, package `specforge` 0.2.0.  Its offline trainer reads a folder of
`torch.save` dictionaries, one sample each; what it has trained and exported (`specforge export`)
comes back as a version of the drafter, which serves without a restart.

    export_signals      features/rows_A-B/data_I.ckpt, draft/ (the drafter to go on from) and
                        specforge.json (for `specforge train --config`)
    import_draft        a drafter's folder -> the next version
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from engine_shim.training.checkpoint import load_dflash, load_draft, save_dflash, save_draft
from engine_shim.training.dflash import DFlashStudent
from engine_shim.training.eagle3 import Eagle3Student
from engine_shim.training.mtp import MtpStudent
from engine_shim.training.signals import Signal, SignalError, load
from engine_shim.training.students import DraftStudent
from engine_shim.training.versions import Made, VersionError, Versions

_FOLDER_ROWS: Final = 2000
# Shorter ones teach a chain of drafts nothing.
_LEAST: Final = 8


class ExportError(ValueError):
    """Signals that SpecForge could not train on; the message says why."""


def eagle3_sample(signal: Signal) -> dict[str, torch.Tensor]:
    """A signal as SpecForge's offline EAGLE3 reader has it.

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
    """A signal as SpecForge's offline DFlash reader has it.

    input_ids, loss_mask: int64 [n].  hidden_states: [n, feature layers * hidden].
    """
    return _sample(signal) | {"hidden_states": signal.features}


def _sample(signal: Signal) -> dict[str, torch.Tensor]:
    return {
        "input_ids": signal.tokens.to(torch.int64),
        "loss_mask": torch.ones(len(signal.tokens), dtype=torch.int64),
    }


def export_signals(
    signals_folder: Path, versions: Versions, version: int, target: str, out: Path
) -> int:
    """Writes what `specforge train` needs; how many samples.

    version: of the drafter to go on from.  target: path of the target model, for its head and
    embedding; a folder where the drafter is a DFlash one.  Raises ExportError, VersionError,
    OSError.
    """
    student = _trainable(versions.student(version))
    sample = eagle3_sample if isinstance(student, Eagle3Student) else dflash_sample
    paths = sorted(signals_folder.glob("*.safetensors"))
    count, longest = 0, 0
    for signal in _readable(paths):
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
        raise ExportError("SpecForge trains EAGLE3 and DFlash drafters, no multi-token predictors")
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
            f"how many layers the target has is part of a DFlash drafter's config, and {config} "
            f"does not say: {error}"
        ) from error
    save_dflash(student, folder, target_layers=layers)


def configuration(
    student: Eagle3Student | DFlashStudent, target: str, out: Path, longest: int
) -> dict[str, Any]:
    """A run of SpecForge's trainer, FSDP on the GPUs of one node, from the exported drafter."""
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
    """A drafter in SGLang's layout (`specforge export --to sglang`) as the next version, a number.

    Raises VersionError where it is not the base's kind of drafter, ExportError where that is none
    of SpecForge's, OSError.
    """
    base = _trainable(versions.student(0))
    kind = "EAGLE3" if isinstance(base, Eagle3Student) else "DFlash"
    try:
        made = _load(folder, base)
    except (KeyError, RuntimeError, ValueError) as error:
        raise VersionError(f"{folder} is no {kind} drafter that can be read: {error}") from error
    _require_whole_vocabulary(folder)
    ours, theirs = _shapes(base), _shapes(made)
    if ours != theirs:
        name = min(ours.items() ^ theirs.items())[0]
        raise VersionError(
            f"{folder}: {name} is {theirs.get(name, 'missing')}, the drafter's "
            f"{ours.get(name, 'missing')}"
        )
    bad = [name for name, part in made.named_parameters() if not bool(torch.isfinite(part).all())]
    if bad:
        raise VersionError(f"{folder}: {bad[0]} holds what is no number")
    facts = Made(0, 0.0, 0.0, 0.0, 0, 0.0)
    return versions.publish(dict(made.named_parameters()), facts)


def _load(folder: Path, like: Eagle3Student | DFlashStudent) -> Eagle3Student | DFlashStudent:
    if isinstance(like, Eagle3Student):
        return load_draft(folder, like.embedding)
    made = load_dflash(folder, like.embedding, like.head)
    ours, theirs = like.shape, made.shape
    if (ours.block, ours.mask_token) != (theirs.block, theirs.mask_token):
        raise ValueError(
            f"blocks of {theirs.block} with mask token {theirs.mask_token}, the drafter's are of "
            f"{ours.block} with {ours.mask_token}"
        )
    return made


def _shapes(student: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(part.shape) for name, part in student.named_parameters()}


def _require_whole_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size, drafts = config["vocab_size"], config.get("draft_vocab_size") or config["vocab_size"]
    if size != drafts:
        raise VersionError(
            f"{folder} drafts {drafts} of {size} tokens: versions have the whole vocabulary"
        )


def _readable(paths: Sequence[Path]) -> Iterator[Signal]:
    for path in paths:
        try:
            signal = load(path)
        except (FileNotFoundError, SignalError):
            continue
        if len(signal.tokens) >= _LEAST:
            yield signal
