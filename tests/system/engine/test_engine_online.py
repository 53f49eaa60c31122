"""A drafter that learns while the real SGLang serves."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine_shim.sglang.training.versions import FOLDER_NAME, Versions
from lab.cpu_engine.engine_command import SHALLOW
from lab.cpu_engine.models.targets import load_target
from lab.harness.scripted_sidecar import ScriptedSidecar, scripted_sidecar
from tests.support.engine import (
    CODE_ONLY,
    EAGLE3,
    ONLINE,
    TARGET,
    EngineProcess,
    Generated,
    running_engine,
)
from tests.support.eventually import eventually
from tests.support.learning_engine import run_until_heard
from tests.support.long_contexts import EVERYTHING, agreement, recorder
from tests.support.prompts_in_flight import PLAYS_MAX, WAVE_LENGTH, WAVES
from trainer.checkpoint import load_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def online(engine: EngineProcess) -> dict[str, Any]:
    online_status: dict[str, Any] = engine.internal_state()["speculation_controller"]["online"]
    return online_status


def wait_ready(engine: EngineProcess) -> None:
    """It is asked between steps."""

    def ready() -> bool:
        engine.generate(WAVES[0][:1], [4])
        return bool(online(engine)["state"] == "ready")

    eventually(ready, timeout_seconds=240.0, description="the trainer is ready")


def wave(engine: EngineProcess, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Tokens, and the mean acceptance length."""
    answers = engine.generate(prompts, [WAVE_LENGTH] * len(prompts))
    return [answer.tokens for answer in answers], acceptance_length(answers)


def acceptance_length(answers: list[Generated]) -> float:
    accepted: int = sum(answer.meta["spec_num_correct_drafts"] for answer in answers)
    steps: int = sum(answer.meta["spec_verify_ct"] for answer in answers)
    return 1 + accepted / steps


@pytest.fixture(scope="module")
def plain_waves(plain: dict[str, list[list[int]]]) -> list[list[list[int]]]:
    waves = iter(plain["waves"])
    return [[next(waves) for _ in prompts] for prompts in WAVES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    return recorder(tmp_path_factory.mktemp("canvases"))


@pytest.fixture(scope="module")
def engine(
    plain_waves: list[list[list[int]]],
    recording: tuple[Path, dict[str, str]],
    sidecar: ScriptedSidecar,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    variables = ONLINE | sidecar.variables | recording[1]
    variables["SPECULATION_SIGNALS_FOLDER"] = str(folder)
    with running_engine(tmp_path_factory.mktemp("online"), CODE_ONLY, variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_in_long_contexts_a_student_of_the_whole_context_is_the_drafter(
    engine: EngineProcess, sidecar: ScriptedSidecar, recording: tuple[Path, dict[str, str]]
) -> None:
    """Before anything is learnt."""
    student = load_eagle3(SHALLOW / "draft-code", load_target(TARGET).model.embed_tokens.weight)
    acceptance_share = agreement(engine, sidecar, recording[0], student, (48, 256, 512))
    print(f"EAGLE3, first drafts that agree by window: {acceptance_share}")
    assert acceptance_share[EVERYTHING] > 0.97
    # A window sees less, and drafts otherwise occasionally: this is what the test can tell apart.
    assert acceptance_share[48] < acceptance_share[EVERYTHING]


def test_it_learns_what_it_serves_and_never_changes_a_token(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain_waves: list[list[list[int]]]
) -> None:
    assert sidecar.introductions[0].capabilities.can_update_online
    wait_ready(engine)
    sidecar.run(lambda _: (3, False))
    tokens, before = wave(engine, WAVES[0])
    assert tokens == plain_waves[0]
    assert online(engine)["rounds"] == 0
    sidecar.stride = 3
    sidecar.run(lambda _: (3, False))
    # The slower the machine, the fewer updates land in a wave.
    for number in range(1, PLAYS_MAX):
        which = number % len(WAVES)
        tokens, after = wave(engine, WAVES[which])
        assert tokens == plain_waves[which]
        online_status = online(engine)
        if number >= len(WAVES) - 1 and online_status["updates"] > 20 and after > before + 0.5:
            break
    print(
        f"acceptance length {before:.2f}, then {after:.2f} after {online_status['updates']} updates"
    )
    assert online_status["updates"] > 20
    assert online_status["refused"] == 0
    # The trainer may be busy with the last one.
    assert online_status["rounds"] - online_status["updates"] in {0, 1}
    assert 0 < online_status["seconds"] < 60
    assert before < 1.4
    assert after > before + 0.5


def test_arms_change_while_it_learns(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain_waves: list[list[list[int]]]
) -> None:
    arms = [(3, False), (0, True), (1, False), (0, False)]
    sidecar.run(lambda count: arms[count // 4 % 4])
    before = online(engine)["updates"]
    for number in range(PLAYS_MAX):
        which = number % len(WAVES)
        assert wave(engine, WAVES[which])[0] == plain_waves[which]
        if number and online(engine)["updates"] > before:
            break
    assert online(engine)["updates"] > before
    sidecar.run(lambda _: (3, False))


def test_without_a_stride_nothing_is_learnt(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain_waves: list[list[list[int]]]
) -> None:
    sidecar.stride = 0
    run_until_heard(engine, sidecar, lambda _: (3, False))
    wave(engine, WAVES[1])
    before = online(engine)["rounds"]
    tokens, learnt = wave(engine, WAVES[2])
    assert tokens == plain_waves[2]
    assert online(engine)["rounds"] == before
    # What was learnt stays.
    assert learnt > 1.5


def test_what_it_has_learnt_becomes_a_version_once_signals_are_collected(
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    folder: Path,
    plain_waves: list[list[list[int]]],
) -> None:
    def served(version: int, learnt_from: int | None) -> None:
        def it_is() -> bool:
            assert wave(engine, WAVES[3])[0] == plain_waves[3]
            last = sidecar.reports[-1]
            learnt = last.learnt_from if last.HasField("learnt_from") else None
            return (last.draft_version, learnt) == (version, learnt_from)

        eventually(
            it_is,
            timeout_seconds=90.0,
            description=f"version {version} serves, learnt from {learnt_from}",
        )

    sidecar.stride = 0
    sidecar.run(lambda _: (3, False))
    served(0, 0)
    sidecar.collect = True
    sidecar.run(lambda _: (3, False))
    served(1, 0)
    assert Versions(folder / FOLDER_NAME).read_origin(1).parent == 0
    sidecar.draft_version = 1
    sidecar.run(lambda _: (3, False))
    served(1, None)
    assert wave(engine, WAVES[2])[1] > 1.5
    # A version that fails goes back to it, and it can be left for the first one.
    sidecar.draft_version, sidecar.collect = 0, False
    sidecar.run(lambda _: (3, False))
    served(0, None)
    wave(engine, WAVES[1])
    assert wave(engine, WAVES[2])[1] < 1.4
    sidecar.draft_version = 1
    sidecar.run(lambda _: (3, False))
    served(1, None)
    wave(engine, WAVES[1])
    assert wave(engine, WAVES[2])[1] > 1.5


def test_a_trainer_that_is_killed_takes_nothing_with_it(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain_waves: list[list[list[int]]]
) -> None:
    sidecar.stride = 1
    sidecar.run(lambda _: (3, False))
    family = psutil.Process(engine.process.pid).children(recursive=True)
    (trainer,) = [p for p in family if "engine_shim.sglang.training.trainer" in p.cmdline()]
    wave(engine, WAVES[0])
    os.kill(trainer.pid, signal.SIGKILL)
    for number in (3, 4):
        tokens, learnt = wave(engine, WAVES[number])
        assert tokens == plain_waves[number]
        assert learnt > 1.5
    assert online(engine)["state"] == "the trainer has ended with status -9"
    assert "the drafter is no longer updated" in engine.log.read_text()


def test_updates_that_do_harm_are_taken_back(
    tmp_path: Path, plain_waves: list[list[list[int]]]
) -> None:
    """An aligned drafter, and a learning rate that ruins it."""
    variables = ONLINE | {"SPECULATION_ONLINE_LEARNING_RATE": "0.3"}
    with scripted_sidecar(tmp_path) as sidecar:
        variables |= sidecar.variables
        with running_engine(tmp_path / "engine", EAGLE3, variables) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            wait_ready(engine)
            sidecar.run(lambda _: (3, False))
            tokens, aligned = wave(engine, WAVES[0])
            sidecar.stride = 1
            sidecar.run(lambda _: (3, False))
            for number in range(1, PLAYS_MAX):
                which = number % len(WAVES)
                assert wave(engine, WAVES[which])[0] == plain_waves[which]
                if online(engine)["restored"]:
                    break
            assert online(engine)["restored"] > 0
            assert "the last good weights are restored" in engine.log.read_text()
            # And with what is good now, drafting is worth what it was.
            sidecar.stride = 0
            run_until_heard(engine, sidecar, lambda _: (3, False))
            wave(engine, WAVES[1])
            tokens, after = wave(engine, WAVES[0])
    assert tokens == plain_waves[0]
    assert after > aligned - 0.4
