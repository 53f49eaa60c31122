"""What tests of a drafter that learns ask an engine, between its steps."""

from typing import Any

from tests.support.engine import EngineProcess
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import WAVE_LENGTH, WAVES
from tests.support.scripted_sidecar import Script, ScriptedSidecar


def status(engine: EngineProcess, part: str) -> dict[str, Any]:
    found: dict[str, Any] = engine.internal_state()["speculation_controller"][part]
    return found


def wave(engine: EngineProcess, number: int, plain_waves: list[list[list[int]]]) -> float:
    """The acceptance length; tokens are plain decoding's."""
    answers = engine.generate(WAVES[number], [WAVE_LENGTH] * len(WAVES[number]))
    assert [answer.tokens for answer in answers] == plain_waves[number]
    accepted: int = sum(answer.meta["spec_num_correct_drafts"] for answer in answers)
    steps: int = sum(answer.meta["spec_verify_ct"] for answer in answers)
    return 1 + accepted / steps


def run_heard(engine: EngineProcess, sidecar: ScriptedSidecar, script: Script) -> None:
    """Begins a script, and returns once the engine runs under one of its plans."""
    first = len(sidecar.arms) + 1
    sidecar.run(script)

    def heard() -> bool:
        engine.generate(WAVES[0][:1], [4])
        return any(report.plan_epoch >= first for report in sidecar.reports[-1:])

    eventually(heard, within=90.0, what="the engine runs under a plan of the script")


def between_steps(engine: EngineProcess, part: str, name: str, value: object) -> None:
    """Waits until the engine says so; it is asked between steps."""

    def so() -> bool:
        engine.generate(WAVES[0][:1], [4])
        return bool(status(engine, part)[name] == value)

    eventually(so, within=240.0, what=f"{part}: {name} is {value}")
