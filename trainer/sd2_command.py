"""The command `speculation-trainer sd2` makes an SD2 drafter from a pretrained one.

Both models run in plain torch on one device, as in the paper: its loss needs the target's whole
distribution at every position, but collected signals contain only the likeliest tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from torch import Tensor

from engine_shim.sglang.training.blocks import SD2_FAMILIES
from trainer.language_model import LanguageModel, ModelFolderError, load_language_model, read_config
from trainer.sd2 import (
    OffsetMode,
    Sd2Draft,
    Sd2Shape,
    Sd2Training,
    divergence,
    draw_random_offsets,
    load_sd2,
    save_sd2,
    train_sd2,
)

_log = structlog.get_logger(__name__)

_TOKENIZER: Final = "tokenizer.json"
_LOG_INTERVAL_SECONDS: Final = 10.0
# One of this many windows is held out.
_HOLDOUT_INTERVAL: Final = 20
_MAX_HELD_OUT: Final = 32
_DEFAULTS: Final = Sd2Training(steps=1)
_HELP: Final = {
    "batch": "texts in an optimiser step",
    "together": "texts that go through the models at once: fewer need less memory",
    "drafts": "drafts per round that the steering is trained for",
    "learning_rate": "peak learning rate of AdamW; the paper has 1e-5 to 5e-5 by model",
    "steering_factor": "how many times faster the steering learns than the drafter",
    "warmup_steps": "steps in which the rate rises, at most a quarter of all steps",
    "weight_decay": "weight decay of AdamW",
    "clip": "largest norm of the gradient",
    "seed": "seed of the order of the texts and of the offsets",
}


class TextsError(ValueError):
    """Texts or a tokenizer that cannot be used for training; the message says why."""


def add_sd2_command(commands: Any) -> None:
    """Adds the command to the subparsers of `speculation-trainer`."""
    parser = commands.add_parser(
        "sd2", help="train an SD2 drafter, which the target's hidden states steer"
    )
    for name, help_text in (
        ("target", "folder of the target model: a Llama, Qwen2 or Qwen3"),
        ("drafter", "folder of the pretrained drafter, of these families; or of an SD2 drafter"),
        ("texts", "best the target's own answers: FILE.jsonl with a text a line, or plain text"),
        ("out", "folder to write, which must not exist"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=help_text)
    parser.add_argument("--epochs", type=int, default=6, help="passes over the texts (default 6)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text (default 256)")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        help="target layers to read, from 0; default: those after which 3, half of all, and all "
        "but 2 layers have run",
    )
    parser.add_argument(
        "--offsets",
        type=OffsetMode,
        choices=list(OffsetMode),
        default=OffsetMode.RANDOM,
        help="distance of the hidden states: for each row (random) or as in serving (blocked)",
    )
    parser.add_argument("--frozen", action="store_true", help="train the steering alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    add_settings(parser, _DEFAULTS, _HELP)


def add_settings(
    parser: argparse.ArgumentParser, defaults: object, help_texts: Mapping[str, str]
) -> None:
    """Adds an option for each setting of `defaults` that `help_texts` names; a bool is a switch."""
    for name, help_text in help_texts.items():
        default, option = getattr(defaults, name), f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true", help=help_text)
        else:
            help_with_default = f"{help_text} (default {default})"
            parser.add_argument(option, type=type(default), default=default, help=help_with_default)


def run_sd2_command(options: argparse.Namespace) -> None:
    """Trains the drafter and writes its folder atomically.  Raises ValueError and OSError."""
    if options.out.exists():
        raise FileExistsError(f"{options.out} exists: name a folder that does not")
    if min(options.epochs, options.threads) < 1 or options.length < 2:
        raise ValueError("epochs and threads must be 1 or more, the length 2 or more")
    training = _training_settings(options, steps=1)
    torch.set_num_threads(options.threads)
    target = load_language_model(options.target)
    draft = _load_drafter(options, target)
    windows = _read_windows(options, target)
    training_windows, held_out = _split_windows(windows)
    steps = options.epochs * max(1, len(training_windows) // training.batch)
    training = _training_settings(options, steps)
    target.to(options.device).requires_grad_(requires_grad=False)
    draft.to(options.device)
    _log.info("begins", windows=len(training_windows), held_out=len(held_out), steps=steps)
    loss_before = _held_out_loss(draft, target, held_out, training)
    try:
        train_sd2(
            draft,
            target,
            _batches(training_windows, training),
            training,
            _ProgressLog(steps).report,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError("the device is out of memory: lower --together or --length") from error
    loss_after = _held_out_loss(draft, target, held_out, training)
    _write_folder(draft.cpu(), options.out)
    _log.info("written", folder=str(options.out), nats_before=loss_before, nats_after=loss_after)


def _training_settings(options: argparse.Namespace, steps: int) -> Sd2Training:
    names = {field.name for field in fields(Sd2Training)} & vars(options).keys()
    return Sd2Training(steps=steps, **{name: getattr(options, name) for name in names})


def _load_drafter(options: argparse.Namespace, target: LanguageModel) -> Sd2Draft:
    """Reads the pretrained drafter and adds its steering, or reads an SD2 drafter to continue."""
    architectures = read_config(options.drafter).get("architectures") or ()
    if SD2_FAMILIES.keys() & set(architectures):
        if options.layers:
            raise ValueError("an SD2 drafter names its layers; --layers is for a pretrained one")
        return load_sd2(options.drafter)
    model = load_language_model(options.drafter)
    if model.shape.vocabulary != target.shape.vocabulary:
        raise ModelFolderError(
            f"{options.drafter} has a vocabulary of {model.shape.vocabulary} tokens, "
            f"{options.target} "
            f"of {target.shape.vocabulary}"
        )
    layer_count = target.shape.layers
    layers = options.layers or sorted(
        {min(2, layer_count - 2), layer_count // 2 - 1, layer_count - 3}
    )
    # SGLang reads the output of a layer on entering the next one.
    if not all(0 <= layer < layer_count - 1 for layer in layers) or sorted(set(layers)) != layers:
        raise ValueError(f"layers {layers} must be ascending and in [0, {layer_count - 2}]")
    shape = Sd2Shape(
        model.shape, target.shape.hidden, tuple(layers), model.family, model.lm_head is None
    )
    draft = Sd2Draft(shape)
    draft.decoder = model
    return draft


def _read_windows(options: argparse.Namespace, target: LanguageModel) -> Tensor:
    """Returns the tokens of all texts, concatenated, in windows [count, length]."""
    tokenizer = _read_tokenizer(options.target, options.drafter)
    end_token = read_config(options.target).get("eos_token_id")
    end_tokens = (
        end_token if isinstance(end_token, list) else [] if end_token is None else [end_token]
    )
    tokens: list[int] = []
    for text in _read_texts(options.texts):
        tokens += tokenizer.encode(text, add_special_tokens=False).ids
        tokens += end_tokens[:1]
    window_count = len(tokens) // options.length
    if window_count < 2:
        raise TextsError(
            f"{options.texts} has {len(tokens)} tokens; two windows of {options.length} are needed"
        )
    windows = torch.tensor(tokens[: window_count * options.length]).view(
        window_count, options.length
    )
    if int(windows.max()) >= target.shape.vocabulary:
        raise TextsError(
            f"the tokenizer of {options.target} has more tokens than its model's "
            f"{target.shape.vocabulary}"
        )
    return windows


def _read_tokenizer(target: Path, drafter: Path) -> Any:
    """Reads the target's tokenizer; a drafter's own must have the same tokens."""
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  # no other command needs it
    except ImportError as error:
        raise TextsError("the package tokenizers is needed: pip install tokenizers") from error

    def read(folder: Path) -> Any:
        try:
            return Tokenizer.from_file(str(folder / _TOKENIZER))
        except Exception as error:  # tokenizers raises a bare Exception
            raise TextsError(f"{folder} has no readable {_TOKENIZER}: {error}") from error

    target_tokenizer = read(target)
    if (drafter / _TOKENIZER).exists():
        drafter_vocabulary = read(drafter).get_vocab(with_added_tokens=True)
        if drafter_vocabulary != target_tokenizer.get_vocab(with_added_tokens=True):
            raise TextsError(f"the tokenizers of {target} and {drafter} have different tokens")
    return target_tokenizer


def _read_texts(file: Path) -> Iterator[str]:
    """Yields the texts of a file.  Raises TextsError and OSError."""
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8")
            return
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse_text(line, f"{file}, line {number}")
    except UnicodeDecodeError as error:
        raise TextsError(f"{file} is not UTF-8: {error}") from error


def _parse_text(line: str, location: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TextsError(f"{location}: not JSON") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise TextsError(f'{location}: not an object with a "text"')
    return text


def _split_windows(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the windows for training and those for evaluation, at least one."""
    is_held_out = (
        torch.arange(len(windows)) % _HOLDOUT_INTERVAL == min(_HOLDOUT_INTERVAL, len(windows)) - 1
    )
    return windows[~is_held_out], windows[is_held_out][:_MAX_HELD_OUT]


def _batches(windows: Tensor, training: Sd2Training) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(training.seed)
    while True:
        order = torch.randperm(len(windows), generator=generator)
        full_batches_length = len(order) // training.batch * training.batch
        # If there are fewer windows than a batch has, they are one batch.
        for indices in (
            order[:full_batches_length].split(training.batch) if full_batches_length else [order]
        ):
            yield windows[indices]


@torch.no_grad()
def _held_out_loss(
    draft: Sd2Draft, target: LanguageModel, windows: Tensor, training: Sd2Training
) -> float:
    """Computes the mean divergence on windows, in nats, with the same offsets every time."""
    generator = torch.Generator().manual_seed(0)
    device, total = target.head.device, 0.0
    for texts in windows.split(training.together):
        steering_rows = draw_random_offsets(
            texts.shape[1] - 1, len(texts), training.drafts, generator
        ).to(device)
        logits, features = target.logits_and_features(texts.to(device), draft.shape.feature_layers)
        steering_features = torch.cat(features, dim=-1)
        total += divergence(
            draft, texts.to(device), logits, steering_features, steering_rows
        ).item() * len(texts)
    return round(total / len(windows), 4)


class _ProgressLog:
    """Logs the progress of a training every few seconds and at its end."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._start_time = self._last_log_time = time.monotonic()

    def report(self, step: int, loss: float) -> None:
        """Reports a step, counted from 0, and its loss."""
        now, steps_done = time.monotonic(), step + 1
        if steps_done == self._steps or now - self._last_log_time >= _LOG_INTERVAL_SECONDS:
            self._last_log_time = now
            seconds_left = (now - self._start_time) / steps_done * (self._steps - steps_done)
            _log.info(
                "trains",
                step=steps_done,
                of=self._steps,
                nats=round(loss, 4),
                seconds_left=round(seconds_left),
            )


def _write_folder(draft: Sd2Draft, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        complete_folder = Path(temporary) / "whole"
        save_sd2(draft, complete_folder)
        # Fails if a non-empty folder has been created here in the meantime.
        complete_folder.rename(folder)
