"""The SD2 drafter on the real SGLang: the student's drafts, and no other token."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lab.cpu_engine.engine_command import SHALLOW
from lab.cpu_engine.models.targets import load_target
from lab.harness.scripted_sidecar import ScriptedSidecar, scripted_sidecar
from speculation.v1.engine_pb2 import DRAFTER_KIND_STANDALONE
from tests.support.engine import MODES, TARGET, EngineProcess, running_engine, started_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import (
    PLAYS_MAX,
    SINGLE_LENGTH,
    SINGLE_PROMPT,
    accepted_by_context,
    play,
    play_any_order,
)
from trainer.sd2 import greedy_chain, load_sd2

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

# As wide as its target, a Qwen3; and narrower ones: a Llama with a head of its own and stretched
# rotary positions, and a Qwen2.
DRAFTERS = (
    "sd2",
    pytest.param("sd2-llama", marks=pytest.mark.nightly),
    pytest.param("sd2-qwen2", marks=pytest.mark.nightly),
)
GAMMAS = (0, 1, 3, 5)
ARMS = ((5, False), (0, True), (3, False), (0, False), (1, False))


def options(folder: Path) -> tuple[str, ...]:
    return ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder))


@pytest.fixture(scope="module", params=DRAFTERS)
def steered(request: pytest.FixtureRequest) -> Path:
    folder: Path = SHALLOW / request.param
    return folder


@pytest.fixture(scope="module")
def sidecar(steered: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSidecar]:
    """One for each engine."""
    with scripted_sidecar(tmp_path_factory.mktemp(steered.name)) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def engine(
    steered: Path, sidecar: ScriptedSidecar, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    variables = {
        **sidecar.variables,
        **MODES["overlapped"],
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
    }
    with running_engine(tmp_path_factory.mktemp("steered"), options(steered), variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_it_introduces_itself_as_a_model_of_its_own(
    steered: Path, engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    (drafter,) = sidecar.introductions[0].drafters
    assert (drafter.kind, drafter.model) == (DRAFTER_KIND_STANDALONE, str(steered))
    assert tuple(drafter.gammas) == GAMMAS
    # Two layers, its steering, and its own head.
    expected = sum(part.numel() for part in load_sd2(steered).parameters())
    assert 0.5 * expected < drafter.shape.dense_params <= expected


def test_any_order_of_arms_gives_plain_decodings_tokens(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    play_any_order(engine, sidecar, ARMS, 3, plain["batch"])


@pytest.mark.parametrize("sleeps", [False, True])
def test_drafts_are_the_students_also_after_a_sleep(
    sleeps: bool,
    steered: Path,
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    plain: dict[str, list[list[int]]],
) -> None:
    tokens = [*SINGLE_PROMPT[0], *plain["alone"][0][:SINGLE_LENGTH]]

    def script(count: int) -> tuple[int, bool]:
        return (0, True) if sleeps and count % 9 > 4 else (5, False)

    live: dict[int, int] = {}
    # How long it sleeps depends on when plans come.
    for _ in range(PLAYS_MAX):
        answers, reports = play(engine, sidecar, script, SINGLE_PROMPT, [SINGLE_LENGTH])
        assert answers[0].tokens == plain["alone"][0]
        live |= accepted_by_context(reports, "eagle3", 5)
        if len(live) > 30:
            break
    student, target = load_sd2(steered), load_target(TARGET)
    row = torch.tensor([tokens])
    with torch.no_grad():
        _, features = target.logits_and_features(row, student.shape.feature_layers)
    known = torch.cat(features, dim=-1)
    compared = wrong = unsteered = 0
    for context, accepted in live.items():
        if context + 6 > len(tokens):
            continue
        truth = row[0, context + 1 : context + 6]

        def run(
            *, by_steering: bool, step_number: int = context, truth: torch.Tensor = truth
        ) -> int:
            chain = greedy_chain(
                student, known[:, :step_number], row[:, : step_number + 1], 5, steered=by_steering
            )[0]
            return int((chain == truth).int().cumprod(0).sum())

        wrong += accepted != run(by_steering=True)
        unsteered += accepted != run(by_steering=False)
        compared += 1
    assert compared > 20
    # Where two tokens are almost equally likely, rounding decides.
    assert wrong <= compared // 25
    # And it is the steering that makes them so.
    assert unsteered > wrong + compared // 10


def test_a_drafter_of_another_target_is_refused_at_the_start(tmp_path: Path) -> None:
    """It would otherwise fail with the first request."""
    config = json.loads((SHALLOW / "sd2-llama/config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 3, 5]
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(config))
    (drafter / "model.safetensors").symlink_to(SHALLOW / "sd2-llama/model.safetensors")
    with scripted_sidecar(tmp_path) as sidecar:
        variables = {**sidecar.variables, "SPECULATION_GAMMAS": "0,1,3"}
        with started_engine(tmp_path / "engine", options(drafter), variables) as engine:
            eventually(
                lambda: engine.process.poll() is not None,
                timeout_seconds=120,
                description="it ends",
            )
            assert "reads layer 5 of a target whose 4 is the last" in engine.log.read_text()
