"""What tests of a drafter that learns ask an engine, between its steps."""

from pathlib import Path
from typing import Any

import torch

from engine_shim.sglang.training.signals import Signal
from lab.cpu_engine.models.targets import load_target
from lab.harness.scripted_sidecar import Script, ScriptedSidecar
from tests.support.engine import DFLASH, TARGET, EngineProcess
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import WAVE_LENGTH, WAVES
from trainer.checkpoint import load_dflash, save_dflash


def status(engine: EngineProcess, part: str) -> dict[str, Any]:
    part_status: dict[str, Any] = engine.internal_state()["speculation_controller"][part]
    return part_status


def wave(engine: EngineProcess, number: int, plain_waves: list[list[list[int]]]) -> float:
    """The acceptance length; tokens are plain decoding's."""
    answers = engine.generate(WAVES[number], [WAVE_LENGTH] * len(WAVES[number]))
    assert [answer.tokens for answer in answers] == plain_waves[number]
    accepted: int = sum(answer.meta["spec_num_correct_drafts"] for answer in answers)
    steps: int = sum(answer.meta["spec_verify_ct"] for answer in answers)
    return 1 + accepted / steps


def run_until_heard(engine: EngineProcess, sidecar: ScriptedSidecar, script: Script) -> None:
    """Begins a script, and returns once the engine runs under one of its plans."""
    first = len(sidecar.arms) + 1
    sidecar.run(script)

    def runs_script() -> bool:
        engine.generate(WAVES[0][:1], [4])
        return any(report.plan_epoch >= first for report in sidecar.reports[-1:])

    eventually(
        runs_script, timeout_seconds=90.0, description="the engine runs under a plan of the script"
    )


def wait_for_status(engine: EngineProcess, part: str, name: str, value: object) -> None:
    """Waits until the engine reports it; it is asked between steps."""

    def is_reached() -> bool:
        engine.generate(WAVES[0][:1], [4])
        return bool(status(engine, part)[name] == value)

    eventually(is_reached, timeout_seconds=240.0, description=f"{part}: {name} is {value}")


def save_damaged_dflash(folder: Path, embedding: torch.Tensor) -> dict[str, torch.Tensor]:
    """A damaged copy of the shipped drafter, which leaves something to learn; its parameters.

    embedding: of its target.
    """
    damaged = load_dflash(DFLASH, embedding)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        damaged.fc.weight.normal_(std=0.05, generator=generator)
    save_dflash(damaged, folder)
    return {name: part.detach() for name, part in damaged.named_parameters()}


def check_features(signal: Signal, layers: tuple[int, ...]) -> None:
    """They are the target's hidden states at these layers, whole.

    Without what came before the signal, its later positions see almost the same.
    """
    target = load_target(TARGET)
    assert signal.features.shape[1] == len(layers) * target.shape.hidden
    with torch.no_grad():
        _, features = target.logits_and_features(signal.tokens[None], layers)
    expected_features = torch.cat(features, dim=-1)[0]
    similarity = torch.nn.functional.cosine_similarity(
        expected_features[40:], signal.features[40:].float(), dim=-1
    )
    assert similarity.median() > 0.9, similarity
