"""`speculation-trainer sd2`: a pretrained drafter becomes a steered one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.__main__ import main
from trainer.sd2 import load_sd2

WORDS = 60


def model(folder: Path, hidden: int, layers: int, vocabulary: int = WORDS, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tokenizer(folder: Path, words: int = WORDS) -> None:
    word_tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w1"))
    word_tokenizer.pre_tokenizer = Whitespace()
    word_tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    folders = {"target": model(place / "target", 32, 6), "drafter": model(place / "drafter", 16, 2)}
    for folder in folders.values():
        tokenizer(folder)
    random = torch.Generator().manual_seed(5)
    folders["texts"] = place / "texts.jsonl"
    texts = [
        " ".join(f"w{i}" for i in torch.randint(WORDS, (80,), generator=random).tolist())
        for _ in range(12)
    ]
    folders["texts"].write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    return folders


def ran(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], *more: str) -> int:
    words = [word for name, folder in folders.items() for word in (f"--{name}", str(folder))]
    few = ["--length", "32", "--batch", "4", "--epochs", "4", "--learning-rate", "0.01"]
    monkeypatch.setattr(sys, "argv", ["training", "sd2", *words, *few, *more])
    return main()


def test_it_writes_a_drafter_that_is_nearer_to_the_target(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "made/steered"
    assert ran(monkeypatch, {**models, "out": out}) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in events] == ["begins", "trains", "written"]
    assert events[-1]["nats_after"] < events[-1]["nats_before"]
    draft = load_sd2(out)
    # After layers 3, half of all, and all but 2 of them, from one.
    assert draft.shape.feature_layers == (2, 3)
    assert (draft.shape.decoder.hidden, draft.shape.target_hidden) == (16, 32)
    assert draft.shape.family.architecture == "LlamaForCausalLM"
    assert not draft.shape.tied
    assert [path.name for path in out.parent.iterdir()] == ["steered"]
    # It continues from there, on other texts.
    again = {**models, "drafter": out, "out": tmp_path / "again"}
    assert ran(monkeypatch, again, "--frozen", "--offsets", "blocked") == 0
    continued = load_sd2(tmp_path / "again")
    assert torch.equal(continued.decoder.head, draft.decoder.head)
    assert not torch.equal(continued.mix.weight, draft.mix.weight)


def spoilt(models: dict[str, Path], place: Path, name: str) -> dict[str, Any]:
    """Folders and options of which one is wrong."""
    good: dict[str, Any] = {**models, "out": place / "out"}
    other = place / "other"
    if name == "out":
        (place / "out").mkdir()
    elif name == "vocabulary":
        good["drafter"] = model(other, 16, 2, vocabulary=WORDS + 1)
    elif name == "tokenizer":
        good["drafter"] = model(other, 16, 2)
        tokenizer(other, WORDS - 1)
    elif name == "no tokenizer":
        good["target"] = model(other, 32, 6)
    elif name == "layers":
        good["layers"] = 5
    elif name == "no model":
        good["drafter"] = place
    else:
        good["texts"] = bad_texts(place / "other.jsonl", name)
    return good


def bad_texts(file: Path, name: str) -> Path:
    texts = {
        "empty": "",
        "short": json.dumps({"text": "w2 w3"}),
        "no JSON": "w2 w3",
        "no text": json.dumps({"messages": []}),
        "no UTF-8": b"\xff\xfe",
        "no file": None,
    }[name]
    if isinstance(texts, bytes):
        file.write_bytes(texts)
    elif texts is not None:
        file.write_text(texts)
    return file


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("out", "exists: name a folder"),
        ("vocabulary", f"a vocabulary of {WORDS + 1} tokens"),
        ("tokenizer", "have different tokens"),
        ("no tokenizer", "has no readable tokenizer.json"),
        ("layers", "must be ascending and in [0, 4]"),
        ("no model", "has no readable config.json"),
        ("empty", "has 0 tokens"),
        ("short", "two windows of 32 are needed"),
        ("no JSON", "line 1: not JSON"),
        ("no text", 'not an object with a "text"'),
        ("no UTF-8", "is not UTF-8"),
        ("no file", "No such file"),
    ],
)
def test_bad_input_ends_it_with_a_reason_and_without_a_folder(
    name: str,
    reason: str,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = spoilt(models, tmp_path, name)
    assert ran(monkeypatch, asked) == 2
    last_event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert reason in last_event["error"]
    assert not (asked["out"] / "config.json").exists()


def test_a_training_that_diverges_writes_nothing(
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {**models, "out": tmp_path / "out"}
    assert ran(monkeypatch, folders, "--learning-rate", "1e30", "--clip", "1e30") == 2
    assert "lower the learning rate" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
