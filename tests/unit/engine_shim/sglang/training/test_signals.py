"""Signals on disk: whole or not there, bounded, and never guessed at."""

import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from engine_shim.sglang.training import signals as signals_module
from engine_shim.sglang.training.signals import (
    Signal,
    SignalError,
    SignalStore,
    SignalWriter,
    load_signal,
)
from tests.support.eventually import eventually

PLENTY = 1 << 30


def signal(rows: int = 6, seed: int = 0) -> Signal:
    torch.manual_seed(seed)
    return Signal(
        tokens=torch.randint(0, 1000, (rows,)),
        features=torch.randn(rows, 12).to(torch.bfloat16),
        top_tokens=torch.randint(0, 1000, (rows, 4), dtype=torch.int32),
        top_logs=-torch.rand(rows, 4),
        start=40,
        accepted=3,
        tried=5,
    )


def with_prompt(rows: int = 6, context: int = 2) -> Signal:
    plain_signal = signal(rows)
    return replace(
        plain_signal,
        top_tokens=plain_signal.top_tokens[context:],
        top_logs=plain_signal.top_logs[context:],
        context=context,
    )


def same(one: Signal, other: Signal) -> bool:
    tensors = ("tokens", "features", "top_tokens", "top_logs")
    numbers = ("start", "accepted", "tried", "context")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors) and all(
        getattr(one, name) == getattr(other, name) for name in numbers
    )


def test_what_was_written_is_read_in_the_order_of_writing(tmp_path: Path):
    store = SignalStore(tmp_path / "deep" / "store", PLENTY)
    written = [*(signal(seed=seed) for seed in range(4)), with_prompt()]
    for one in written:
        store.add(one)
    stored_signals = list(SignalStore(store.folder, PLENTY).read())
    assert len(stored_signals) == 5
    assert all(same(a, b) for a, b in zip(written, stored_signals, strict=True))


def test_a_signal_of_the_format_before_has_no_prompt(tmp_path: Path):
    earlier = signal()
    facts = {"format": "speculation-signals-2", "start": "40", "accepted": "3", "tried": "5"}
    path = tmp_path / "earlier.safetensors"
    path.write_bytes(save(earlier.tensors, facts))
    assert same(load_signal(path), earlier)


@pytest.mark.parametrize("context", [-1, 1, 3, 6])
def test_a_prompt_of_another_length_is_refused(context: int):
    with pytest.raises(SignalError, match="verified rows"):
        replace(with_prompt(), context=context)


def test_the_oldest_go_when_there_is_no_room(tmp_path: Path):
    size = len(signal().encode())
    store = SignalStore(tmp_path, 3 * size + 10)
    for seed in range(7):
        store.add(signal(seed=seed))
        assert sum(path.stat().st_size for path in store.paths()) <= 3 * size + 10
    assert [same(one, signal(seed=4 + i)) for i, one in enumerate(store.read())] == [True] * 3


def test_one_that_is_larger_than_the_store_takes_nothing_with_it(tmp_path: Path):
    store = SignalStore(tmp_path, len(signal().encode()) + 10)
    store.add(signal())
    with pytest.raises(OSError, match="more than the store's"):
        store.add(signal(rows=4000))
    assert len(store.paths()) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda _: b"",
        lambda content: b"\xff" * 16 + content[16:],
        lambda content: content.replace(b"speculation-signals-3", b"speculation-signals-9"),
        lambda content: content.replace(b'"tried":"5"', b'"tried":"1"'),
        lambda content: content.replace(b'"start":"40"', b'"start":"4x"'),
    ],
    ids=["cut", "empty", "garbage", "another format", "impossible counts", "no number"],
)
def test_a_damaged_one_is_named_and_passed_over(
    damage, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = SignalStore(tmp_path, PLENTY)
    path = store.add(signal())
    store.add(signal(seed=1))
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    with pytest.raises(SignalError, match=path.name):
        load_signal(path)
    with caplog.at_level(logging.WARNING):
        (left,) = store.read()
    assert same(left, signal(seed=1))
    assert path.name in caplog.text


def test_a_token_that_cannot_follow_is_read_but_not_a_position_without_any(tmp_path: Path):
    store = SignalStore(tmp_path, PLENTY)
    one = signal()
    one.top_logs[3, 1:] = -torch.inf
    load_signal(store.add(one))
    one.top_logs[3] = -torch.inf
    path = store.add(one)
    with pytest.raises(SignalError, match=f"{path.name}.*every token has probability 0"):
        load_signal(path)


def test_a_writer_that_is_killed_leaves_no_half_signal(tmp_path: Path):
    """It writes as fast as it can, and is killed at some moment or other."""
    code = (
        "import sys, pathlib\n"
        "from tests.unit.engine_shim.sglang.training.test_signals import SignalStore, signal\n"
        "store = SignalStore(pathlib.Path(sys.argv[1]), 1 << 30)\n"
        "while True:\n"
        "    store.add(signal(rows=3000))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as writer:
        eventually(
            lambda: len(list(tmp_path.glob("*.safetensors"))) > 5,
            timeout_seconds=60,
            description="files",
        )
        writer.kill()
    store = SignalStore(tmp_path, PLENTY)
    paths = store.paths()
    assert [len(load_signal(path).tokens) for path in paths] == [3000] * len(paths)


def test_what_a_killed_writer_left_aside_goes_when_it_is_old(tmp_path: Path):
    old, fresh = tmp_path / "1.part", tmp_path / "2.part"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    store = SignalStore(tmp_path, PLENTY)
    assert not old.exists()
    assert fresh.exists()
    assert store.paths() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": torch.zeros(5, dtype=torch.int64)},
        {"top_logs": torch.zeros(6, 3)},
        {"start": -1},
        {"accepted": 6},
    ],
    ids=["rows", "top", "start", "accepted"],
)
def test_a_signal_that_contradicts_itself_is_refused(wrong: dict[str, object]):
    with pytest.raises(SignalError):
        replace(signal(), **wrong)  # type: ignore[arg-type]


def test_the_writer_writes_behind_and_closes_with_everything_written(tmp_path: Path):
    store = SignalStore(tmp_path, PLENTY)
    writer = SignalWriter(store)
    assert all(writer.put(signal(seed=seed)) for seed in range(20))
    writer.close()
    assert len(store.paths()) == writer.counters.signals == 20
    assert writer.counters.positions == 120
    assert writer.counters.dropped == 0


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, held = SignalStore(tmp_path, PLENTY), threading.Event()
    add = store.add
    monkeypatch.setattr(store, "add", lambda one: (held.wait(30), add(one))[1])
    writer = SignalWriter(store, max_waiting=2)
    results = [writer.put(signal(seed=seed)) for seed in range(10)]
    assert results.count(False) == writer.counters.dropped >= 7
    held.set()
    writer.close()
    assert writer.counters.signals == results.count(True)


def test_a_signal_that_cannot_be_written_does_not_end_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = SignalStore(tmp_path / "store", PLENTY)
    writer = SignalWriter(store)
    with monkeypatch.context() as broken:
        broken.setattr(signals_module, "save", refuse)
        writer.put(signal())
        eventually(lambda: writer.counters.dropped == 1, description="it is counted")
    assert writer.counters.state == "failing: no such dtype"
    writer.put(signal())
    eventually(lambda: writer.counters.signals == 1, description="it continues")
    writer.close()


def refuse(*_: object, **__: object) -> None:
    raise ValueError("no such dtype")


def test_a_folder_that_vanishes_is_said_and_survived(tmp_path: Path):
    store = SignalStore(tmp_path / "store", PLENTY)
    writer = SignalWriter(store)
    store.folder.rmdir()
    writer.put(signal())
    eventually(lambda: writer.counters.dropped == 1, description="it is counted")
    assert writer.counters.state.startswith("failing")
    store.folder.mkdir()
    writer.put(signal())
    eventually(lambda: writer.counters.signals == 1, description="it continues")
    assert writer.counters.state == "ready"
    writer.close()
