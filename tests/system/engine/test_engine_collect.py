"""Training signals of what the real SGLang serves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_shim.sglang.learning.signal_runs import PROMPT_POSITIONS
from engine_shim.sglang.training.chain import Eagle3Student
from engine_shim.sglang.training.signals import Signal, SignalStore
from engine_shim.sglang.training.versions import FOLDER_NAME, Versions
from lab.cpu_engine.models.prompts import held_out_prompts
from lab.cpu_engine.models.targets import load_target
from lab.harness.scripted_sidecar import Script, ScriptedSidecar
from tests.support.engine import EAGLE3, TARGET, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.learning_engine import run_until_heard
from tests.support.prompts_in_flight import WAVE_LENGTH, WAVES

MODEL = load_target(TARGET).requires_grad_(requires_grad=False)
HEAD = MODEL.model.embed_tokens.weight.detach()
# Longer than the part of a prompt that is kept, than a chunk of a prefill, and shorter than both.
LENGTHS = (300, 100, 20)
CHUNK = 128

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals") / "store"


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine lists what would wait for a device."""
    return tmp_path_factory.mktemp("waits") / "waits.json"


@pytest.fixture(scope="module")
def engine(
    folder: Path, waits: Path, sidecar: ScriptedSidecar, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    variables = {
        **sidecar.variables,
        "CPU_ENGINE_SYNCHRONISATIONS": str(waits),
        "SPECULATION_SIGNALS_FOLDER": str(folder),
        "SPECULATION_SIGNALS_MEGABYTES": "1",
        "SPECULATION_SIGNALS_FINAL_STATES": "1",
        "SPECULATION_GAMMAS": "0,1,3",
    }
    flags = (*EAGLE3, "--chunked-prefill-size", str(CHUNK))
    with running_engine(tmp_path_factory.mktemp("collect"), flags, variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def status(engine: EngineProcess) -> dict[str, Any]:
    signal_status: dict[str, Any] = engine.internal_state()["speculation_controller"]["signals"]
    return signal_status


def found_in(folder: Path) -> list[Signal]:
    return list(SignalStore(folder, 1 << 20).read())


def collect(engine: EngineProcess, sidecar: ScriptedSidecar, script: Script) -> None:
    """Collecting begins, and the engine has heard of it."""
    sidecar.collect = True
    run_until_heard(engine, sidecar, script)


def settled(engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    """Collecting has ended, and everything is on disk: the engine is asked between steps."""
    sidecar.collect = False
    sidecar.run(sidecar.script)

    def all_written() -> bool:
        engine.generate(WAVES[3][:1], [4])
        now = status(engine)
        return bool(not now["open"] and now["waiting"] == 0)

    eventually(all_written, description="everything is with the writer, and written")


def test_without_the_regime_nothing_is_kept(
    engine: EngineProcess, sidecar: ScriptedSidecar, folder: Path
) -> None:
    assert sidecar.introductions[0].capabilities.can_collect
    sidecar.run(lambda _: (3, False))
    engine.generate(WAVES[0], [WAVE_LENGTH] * len(WAVES[0]))
    assert status(engine) == {
        "signals": 0,
        "positions": 0,
        "dropped": 0,
        "state": "ready",
        "waiting": 0,
        "open": False,
        "unread": 0,
        "too_large": 0,
        "device_bytes": 0,
    }
    assert found_in(folder) == []


# gamma 0 asleep and awake among the others: what is served is collected whatever drafts.
@pytest.mark.parametrize("arms", [[(3, False)], [(0, True), (1, False), (0, False), (3, False)]])
def test_what_is_served_is_kept_position_by_position(
    arms: list[tuple[int, bool]],
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    folder: Path,
    plain: dict[str, list[list[int]]],
) -> None:
    for path in SignalStore(folder, 1 << 20).paths():
        path.unlink()
    collect(engine, sidecar, lambda count: arms[count // 5 % len(arms)])
    answers = engine.generate(WAVES[0], [WAVE_LENGTH] * len(WAVES[0]))
    assert [answer.tokens for answer in answers] == plain["waves"][: len(WAVES[0])]
    settled(engine, sidecar)
    signals = found_in(folder)
    served = [[*prompt, *answer.tokens] for prompt, answer in zip(WAVES[0], answers, strict=True)]
    covered = 0
    for signal in signals:
        tokens, end = signal.tokens.tolist(), signal.start + len(signal.tokens)
        # A request's last step may have verified more than was asked for.
        (whole,) = [
            text
            for text in served
            if text[signal.start : end] == tokens[: max(1, len(text) - signal.start)]
        ]
        # Greedy: the target's likeliest token of each position is the next one.
        following = whole[signal.start + signal.context + 1 : end + 1]
        assert signal.top_tokens[: len(following), 0].tolist() == following
        assert (signal.top_logs.diff(dim=1) <= 0).all()
        assert torch.isfinite(signal.features.float()).all()
        # The head on the last hidden states says the same (the embedding is the head here).
        assert signal.final is not None
        logits = signal.final[signal.context :][: len(following)].float() @ HEAD.T
        agree = (logits.argmax(-1) == torch.tensor(following)).float().mean()
        assert agree > 0.95, agree
        assert signal.features.float().abs().amax(dim=1).min() > 0
        covered += len(signal.top_tokens)
    assert covered >= 0.9 * WAVE_LENGTH * len(WAVES[0])
    tried = sum(signal.tried for signal in signals)
    accepted = sum(signal.accepted for signal in signals)
    assert 0 < accepted < tried
    assert status(engine)["dropped"] == 0


@pytest.mark.parametrize("is_cached", [False, True])
def test_what_was_verified_follows_the_end_of_its_prompt(
    engine: EngineProcess, sidecar: ScriptedSidecar, folder: Path, *, is_cached: bool
) -> None:
    """Prompts of several chunks, together; then again, where the prefix cache has most of them."""
    prompts = [held_out_prompts("prose", 1, length, seed=7)[0] for length in LENGTHS]
    for path in SignalStore(folder, 1 << 20).paths():
        path.unlink()
    collect(engine, sidecar, lambda _: (3, False))
    answers = engine.generate(prompts, [60] * len(prompts))
    settled(engine, sidecar)
    student = Versions(folder / FOLDER_NAME).load_student(0)
    assert isinstance(student, Eagle3Student)
    layers = student.shape.feature_layers
    signals = {signal.start + signal.context: signal for signal in found_in(folder)}
    for prompt, answer in zip(prompts, answers, strict=True):
        signal = signals[len(prompt)]
        cached = answer.meta["cached_tokens"]
        assert cached > len(prompt) / 2 if is_cached else cached < 5
        assert signal.context == min(len(prompt) - cached, PROMPT_POSITIONS)
        served = [*prompt, *answer.tokens]
        # The last step may have verified more than was asked for.
        rows = min(len(signal.tokens), len(served) - signal.start)
        assert signal.tokens[:rows].tolist() == served[signal.start : signal.start + rows]
        final, features = MODEL.hidden_and_features(torch.tensor([served]), layers)
        verified_rows = slice(signal.start, signal.start + rows)
        assert signal.final is not None
        for kept, computed in (
            (signal.features[:rows], torch.cat(features, dim=-1)[0, verified_rows]),
            (signal.final[:rows], final[0, verified_rows]),
        ):
            apart = (kept.float() - computed).norm(dim=-1) / computed.norm(dim=-1)
            assert float(apart.max()) < 0.02
    assert status(engine)["unread"] == 0


def test_the_store_keeps_to_its_size(
    engine: EngineProcess, sidecar: ScriptedSidecar, folder: Path
) -> None:
    collect(engine, sidecar, lambda _: (3, False))
    before = SignalStore(folder, 1 << 20).paths()
    engine.generate(WAVES[1], [400] * len(WAVES[1]))
    settled(engine, sidecar)
    paths = SignalStore(folder, 1 << 20).paths()
    assert not set(before) & set(paths)
    assert 1 << 19 < sum(path.stat().st_size for path in paths) <= 1 << 20


def test_a_store_that_cannot_be_written_is_said_and_serving_goes_on(
    engine: EngineProcess, sidecar: ScriptedSidecar, folder: Path, plain: dict[str, list[list[int]]]
) -> None:
    moved = folder.with_name("moved")
    folder.rename(moved)
    collect(engine, sidecar, lambda _: (3, False))
    answers = engine.generate(WAVES[0], [WAVE_LENGTH] * len(WAVES[0]))
    assert [answer.tokens for answer in answers] == plain["waves"][: len(WAVES[0])]
    settled(engine, sidecar)
    signal_status = status(engine)
    assert signal_status["dropped"] > 0
    assert signal_status["state"].startswith("failing")
    moved.rename(folder)


def test_collecting_does_not_wait_for_the_device(engine: EngineProcess, waits: Path) -> None:
    """After all other tests of this engine."""
    assert status(engine)["positions"] > 0
    assert json.loads(waits.read_text()) == {}
