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

from engine_shim.sglang.training.blocks import STEERED
from trainer.language_model import LanguageModel, ModelFolderError, load_language_model, read_config
from trainer.sd2 import (
    Offsets,
    Sd2Draft,
    Sd2Shape,
    Sd2Training,
    divergence,
    load_sd2,
    offsets,
    save_sd2,
    train_sd2,
)

_log = structlog.get_logger(__name__)

_TOKENIZER: Final = "tokenizer.json"
_REPORT_SECONDS: Final = 10.0
# One of this many windows is held out.
_HELD_OUT: Final = 20
_HELD_OUT_MOST: Final = 32
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
    for name, what in (
        ("target", "folder of the target model: a Llama, Qwen2 or Qwen3"),
        ("drafter", "folder of the pretrained drafter, of these families; or of an SD2 drafter"),
        ("texts", "best the target's own answers: FILE.jsonl with a text a line, or plain text"),
        ("out", "folder to write, which must not exist"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=what)
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
        type=Offsets,
        choices=list(Offsets),
        default=Offsets.RANDOM,
        help="distance of the hidden states: for each row (random) or as in serving (blocked)",
    )
    parser.add_argument("--frozen", action="store_true", help="train the steering alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    add_settings(parser, _DEFAULTS, _HELP)


def add_settings(
    parser: argparse.ArgumentParser, defaults: object, helps: Mapping[str, str]
) -> None:
    """Adds an option for each setting of `defaults` that `helps` names; a bool is a switch."""
    for name, what in helps.items():
        default, option = getattr(defaults, name), f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true", help=what)
        else:
            about = f"{what} (default {default})"
            parser.add_argument(option, type=type(default), default=default, help=about)


def run_sd2_command(asked: argparse.Namespace) -> None:
    """Trains the drafter and writes its folder atomically.  Raises ValueError and OSError."""
    if asked.out.exists():
        raise FileExistsError(f"{asked.out} exists: name a folder that does not")
    if min(asked.epochs, asked.threads) < 1 or asked.length < 2:
        raise ValueError("epochs and threads must be 1 or more, the length 2 or more")
    training = _training(asked, steps=1)
    torch.set_num_threads(asked.threads)
    target = load_language_model(asked.target)
    draft = _drafter(asked, target)
    windows = _windows(asked, target)
    learnt, held_out = _parted(windows)
    steps = asked.epochs * max(1, len(learnt) // training.batch)
    training = _training(asked, steps)
    target.to(asked.device).requires_grad_(requires_grad=False)
    draft.to(asked.device)
    _log.info("begins", windows=len(learnt), held_out=len(held_out), steps=steps)
    before = _loss(draft, target, held_out, training)
    try:
        train_sd2(draft, target, _batches(learnt, training), training, _Progress(steps).report)
    except torch.OutOfMemoryError as error:
        raise ValueError("the device is out of memory: lower --together or --length") from error
    after = _loss(draft, target, held_out, training)
    _write(draft.cpu(), asked.out)
    _log.info("written", folder=str(asked.out), nats_before=before, nats_after=after)


def _training(asked: argparse.Namespace, steps: int) -> Sd2Training:
    names = {field.name for field in fields(Sd2Training)} & vars(asked).keys()
    return Sd2Training(steps=steps, **{name: getattr(asked, name) for name in names})


def _drafter(asked: argparse.Namespace, target: LanguageModel) -> Sd2Draft:
    """Reads the pretrained drafter and adds its steering, or reads an SD2 drafter to continue."""
    architectures = read_config(asked.drafter).get("architectures") or ()
    if STEERED.keys() & set(architectures):
        if asked.layers:
            raise ValueError("an SD2 drafter names its layers; --layers is for a pretrained one")
        return load_sd2(asked.drafter)
    model = load_language_model(asked.drafter)
    if model.shape.vocabulary != target.shape.vocabulary:
        raise ModelFolderError(
            f"{asked.drafter} has a vocabulary of {model.shape.vocabulary} tokens, {asked.target} "
            f"of {target.shape.vocabulary}"
        )
    count = target.shape.layers
    layers = asked.layers or sorted({min(2, count - 2), count // 2 - 1, count - 3})
    # SGLang reads the output of a layer on entering the next one.
    if not all(0 <= layer < count - 1 for layer in layers) or sorted(set(layers)) != layers:
        raise ValueError(f"layers {layers} must be ascending and in [0, {count - 2}]")
    shape = Sd2Shape(
        model.shape, target.shape.hidden, tuple(layers), model.family, model.lm_head is None
    )
    draft = Sd2Draft(shape)
    draft.decoder = model
    return draft


def _windows(asked: argparse.Namespace, target: LanguageModel) -> Tensor:
    """Returns the tokens of all texts, concatenated, in windows [count, length]."""
    tokenizer = _tokenizer(asked.target, asked.drafter)
    end = read_config(asked.target).get("eos_token_id")
    ends = end if isinstance(end, list) else [] if end is None else [end]
    tokens: list[int] = []
    for text in _texts(asked.texts):
        tokens += tokenizer.encode(text, add_special_tokens=False).ids
        tokens += ends[:1]
    count = len(tokens) // asked.length
    if count < 2:
        raise TextsError(
            f"{asked.texts} has {len(tokens)} tokens; two windows of {asked.length} are needed"
        )
    windows = torch.tensor(tokens[: count * asked.length]).view(count, asked.length)
    if int(windows.max()) >= target.shape.vocabulary:
        raise TextsError(
            f"the tokenizer of {asked.target} has more tokens than its model's "
            f"{target.shape.vocabulary}"
        )
    return windows


def _tokenizer(target: Path, drafter: Path) -> Any:
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

    found = read(target)
    if (drafter / _TOKENIZER).exists():
        theirs = read(drafter).get_vocab(with_added_tokens=True)
        if theirs != found.get_vocab(with_added_tokens=True):
            raise TextsError(f"the tokenizers of {target} and {drafter} have different tokens")
    return found


def _texts(file: Path) -> Iterator[str]:
    """Yields the texts of a file.  Raises TextsError and OSError."""
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8")
            return
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, f"{file}, line {number}")
    except UnicodeDecodeError as error:
        raise TextsError(f"{file} is not UTF-8: {error}") from error


def _text_of(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise TextsError(f"{where}: not JSON") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise TextsError(f'{where}: not an object with a "text"')
    return text


def _parted(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the windows for training and those for evaluation, at least one."""
    held = torch.arange(len(windows)) % _HELD_OUT == min(_HELD_OUT, len(windows)) - 1
    return windows[~held], windows[held][:_HELD_OUT_MOST]


def _batches(windows: Tensor, training: Sd2Training) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(training.seed)
    while True:
        order = torch.randperm(len(windows), generator=generator)
        full = len(order) // training.batch * training.batch
        # If there are fewer windows than a batch has, they are one batch.
        for some in order[:full].split(training.batch) if full else [order]:
            yield windows[some]


@torch.no_grad()
def _loss(draft: Sd2Draft, target: LanguageModel, windows: Tensor, training: Sd2Training) -> float:
    """Computes the mean divergence on windows, in nats, with the same offsets every time."""
    generator = torch.Generator().manual_seed(0)
    device, total = target.head.device, 0.0
    for texts in windows.split(training.together):
        back = offsets(texts.shape[1] - 1, len(texts), training.drafts, generator).to(device)
        logits, features = target.logits_and_features(texts.to(device), draft.shape.feature_layers)
        known = torch.cat(features, dim=-1)
        total += divergence(draft, texts.to(device), logits, known, back).item() * len(texts)
    return round(total / len(windows), 4)


class _Progress:
    """Logs the progress of a training every few seconds and at its end."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._begun = self._said = time.monotonic()

    def report(self, step: int, loss: float) -> None:
        """Reports a step, counted from 0, and its loss."""
        now, done = time.monotonic(), step + 1
        if done == self._steps or now - self._said >= _REPORT_SECONDS:
            self._said = now
            left = (now - self._begun) / done * (self._steps - done)
            _log.info(
                "trains", step=done, of=self._steps, nats=round(loss, 4), seconds_left=round(left)
            )


def _write(draft: Sd2Draft, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as place:
        whole = Path(place) / "whole"
        save_sd2(draft, whole)
        # Fails if a non-empty folder has been created here in the meantime.
        whole.rename(folder)
