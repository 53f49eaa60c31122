"""A target's multi-token predictor and a DFlash drafter in one real SGLang, with trained weights.

SGLang's MiMo does not emit hidden states for DFlash: the plugin has it do so.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.cpu_engine.engine_command import MIMO
from lab.cpu_engine.models.targets import load_predictor, load_target, save_predictor
from lab.harness.scripted_sidecar import Arm, Script, ScriptedSidecar, scripted_sidecar
from speculation.v1.engine_pb2 import DRAFTER_KIND_DFLASH, DRAFTER_KIND_MTP
from tests.support.engine import EAGER_NIGHTLY, MODES, MTP, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.mixture_rules import rules_of
from tests.support.prompts_in_flight import (
    LENGTHS,
    PLAYS_MAX,
    PROMPTS,
    SINGLE_PROMPT,
    accepted_by_context,
    check_against_student,
    play,
    play_any_order,
    play_arm,
    play_until,
)
from tests.support.rank_weights import check_served, load_trained, weights_variables
from trainer.checkpoint import load_dflash

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK_MODEL = MIMO / "dflash"
TWO_RANKS = ("--tp-size", "2")
GAMMAS = (0, 1, 3, 5, 7)
CHAIN: list[Arm] = [(gamma, False, 0) for gamma in GAMMAS]
BLOCK: list[Arm] = [(gamma, False, 1) for gamma in GAMMAS[1:]]
# A lookup, alone and in a mixture with each drafter.
LOOKUPS: list[Arm] = [(5, False, which) for which in (2, 3, 4)]
ARMS: list[Arm] = [*CHAIN, *BLOCK, *LOOKUPS, (0, True, 0)]
ALONE_LENGTH = 200
# Drafts of each drafter amid the other's, and amid steps without drafts.
MIXED: dict[str, Script] = {
    "always": lambda _: (3, False, 0),
    "amid blocks": lambda count: (3, False, 0) if count % 3 == 0 else (5, False, 1),
    "amid plain steps": lambda count: (3, False, 0) if count % 3 == 0 else (0, False, 0),
    "after sleep": lambda count: (3, False, 0) if count % 12 < 4 else (0, True, 0),
}


def blocks_amid_chains(count: int) -> Arm:
    return (7, False, 1) if count % 3 else (3, False, 0)


@pytest.fixture(scope="module", params=[EAGER_NIGHTLY, "overlapped"])
def mode(request: pytest.FixtureRequest) -> str:
    """How an engine runs its passes: the first of `MODES`, and the last."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    target = ("--model-path", str(MIMO / "target"))
    with running_engine(tmp_path_factory.mktemp("plain"), target) as engine:
        return {
            "batch": [answer.tokens for answer in engine.generate(PROMPTS, LENGTHS)],
            "alone": [answer.tokens for answer in engine.generate(SINGLE_PROMPT, [ALONE_LENGTH])],
        }


@pytest.fixture(scope="module")
def sidecar(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSidecar]:
    """One for each mode's engine."""
    with scripted_sidecar(tmp_path_factory.mktemp(f"sidecar-{mode}")) as scripted:
        scripted.rules = rules_of(("nextn+ngram", "dflash+ngram"), GAMMAS)
        yield scripted


def variables(mode: str, sidecar: ScriptedSidecar) -> dict[str, str]:
    return {
        **sidecar.variables,
        **MODES[mode],
        "SPECULATION_DFLASH_MODEL_PATH": str(BLOCK_MODEL),
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_LOOKUP": "1",
        "SPECULATION_SLEEP_POSITIONS": "12",
    }


@pytest.fixture(scope="module")
def engine(
    mode: str,
    plain: dict[str, list[list[int]]],
    sidecar: ScriptedSidecar,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    learning = {"SPECULATION_ONLINE_UPDATES": "1"}
    with running_engine(
        tmp_path_factory.mktemp("steered"), MTP, variables(mode, sidecar) | learning
    ) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_it_introduces_both(mode: str, engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    first, second, *_ = sidecar.introductions[0].drafters
    assert (first.name, first.kind) == ("nextn", DRAFTER_KIND_MTP)
    assert (second.name, second.kind) == ("dflash", DRAFTER_KIND_DFLASH)
    assert tuple(first.gammas) == GAMMAS
    assert tuple(second.gammas) == GAMMAS[1:]
    assert second.shape.block_size == 8


@pytest.mark.parametrize("arm", [(3, False, 0), (7, False, 1)])
def test_both_draft_what_is_accepted(
    arm: Arm, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    name = "nextn" if arm[2:] == (0,) else "dflash"
    reports = play_arm(engine, sidecar, (name, arm), plain["batch"])
    assert not any(report.flags.eager_fallback for report in reports)
    answers, reports = play(engine, sidecar, lambda _: arm, SINGLE_PROMPT, [ALONE_LENGTH])
    assert [answer.tokens for answer in answers] == plain["alone"]
    accepted = accepted_by_context(reports, name, arm[0])
    assert sum(accepted.values()) / len(accepted) > 0.5 * arm[0]


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_arms_gives_plain_decodings_tokens(
    seed: int, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    play_any_order(engine, sidecar, ARMS, seed, plain["batch"])


@pytest.mark.parametrize("script", MIXED)
def test_the_predictor_drafts_what_its_student_would_whoever_drafted_before(
    script: str, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    live: dict[int, int] = {}
    for prompt_end in range(2):
        prompt = [*SINGLE_PROMPT[0], *plain["alone"][0][:prompt_end]]
        length = ALONE_LENGTH - prompt_end
        answers, reports = play(engine, sidecar, MIXED[script], [prompt], [length])
        assert answers[0].tokens == plain["alone"][0][prompt_end:]
        live |= accepted_by_context(reports, "nextn", 3)
    tokens = torch.tensor([[*SINGLE_PROMPT[0], *plain["alone"][0]]])
    target = load_target(MIMO / "target")
    student = load_predictor(MIMO / "target", target.model.embed_tokens.weight)
    with torch.no_grad():
        hidden, _ = target.hidden_and_features(tokens, ())
    contexts = [context for context in live if context + 4 <= tokens.shape[1]]
    wrong = 0
    for context in contexts:
        chain = student.greedy_chain(hidden[:, :context], tokens[:, : context + 1], 3)[0]
        truth = tokens[0, context + 1 : context + 4]
        wrong += live[context] != int((chain == truth).int().cumprod(0).sum())
    assert len(contexts) > 10
    # Where two tokens are almost equally likely, rounding decides.
    assert wrong <= len(contexts) // 30


def test_the_blocks_are_those_that_the_trained_student_would_draft(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    live: dict[int, int] = {}
    for prompt_end in range(2):
        prompt = [*SINGLE_PROMPT[0], *plain["alone"][0][:prompt_end]]
        _, reports = play(
            engine, sidecar, blocks_amid_chains, [prompt], [ALONE_LENGTH - prompt_end]
        )
        live |= accepted_by_context(reports, "dflash", 7)
    target = load_target(MIMO / "target")
    student = load_dflash(BLOCK_MODEL, target.model.embed_tokens.weight)
    check_against_student(live, [*SINGLE_PROMPT[0], *plain["alone"][0]], target, student)


def test_the_predictor_learns_beside_the_block_drafter(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    def online() -> dict[str, Any]:
        online_status: dict[str, Any] = engine.internal_state()["speculation_controller"]["online"]
        return online_status

    arms = [(3, False, 0), (3, False, 1), (0, False, 0)]
    sidecar.stride = 2

    def ready() -> bool:
        play(engine, sidecar, lambda _: (3, False, 0), SINGLE_PROMPT, [8])
        return bool(online()["state"] == "ready")

    eventually(ready, timeout_seconds=240.0, description="the trainer is ready")
    before = online()["updates"]
    # An update may take longer than a play.
    for _ in range(PLAYS_MAX):
        answers, _ = play(engine, sidecar, lambda count: arms[count // 5 % 3])
        assert [answer.tokens for answer in answers] == plain["batch"]
        if online()["updates"] > before:
            break
    sidecar.stride = 0
    online_state = online()
    assert (online_state["state"], online_state["refused"]) == ("ready", 0)
    assert online_state["updates"] > before


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The target with a damaged predictor, so that there is something to learn."""
    folder = Path(shutil.copytree(MIMO / "target", tmp_path / "damaged"))
    predictor = load_predictor(folder, load_target(folder).model.embed_tokens.weight)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        predictor.model.input_proj.weight.normal_(std=0.05, generator=generator)
    save_predictor(predictor, folder)
    return folder


@pytest.mark.nightly
def test_two_ranks_run_both_and_the_predictor_learns(damaged: Path, tmp_path: Path) -> None:
    target = ("--model-path", str(MIMO / "target"))
    with running_engine(tmp_path / "plain", [*target, *TWO_RANKS]) as engine:
        expected = [answer.tokens for answer in engine.generate(PROMPTS, LENGTHS)]
    choose = random.Random(3)
    # The ranks must be given one order.
    order = choose.choices(ARMS, k=5000)
    with scripted_sidecar(tmp_path) as sidecar:
        environment = variables("overlapped", sidecar) | weights_variables(tmp_path)
        environment |= {"SPECULATION_SLEEP_POSITIONS": "8", "SPECULATION_ONLINE_UPDATES": "1"}
        models = [str(damaged) if part == str(MIMO / "target") else part for part in MTP]
        with running_engine(tmp_path / "steered", [*models, *TWO_RANKS], environment) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            asked = {("nextn", gamma) for gamma in GAMMAS}
            asked |= {("dflash", gamma) for gamma in GAMMAS[1:]}
            play_until(
                engine,
                sidecar,
                lambda count: order[count % 5000],
                lambda reports: {(report.drafter, report.gamma) for report in reports} >= asked,
                expected,
            )
            check_learning(engine, sidecar, expected)
            check_served(tmp_path, load_trained(tmp_path))


def check_learning(engine: EngineProcess, sidecar: ScriptedSidecar, plain: list[list[int]]) -> None:
    """The predictor accepts more and more; in the end no update is under way."""

    def online() -> dict[str, Any]:
        online_status: dict[str, Any] = engine.internal_state()["speculation_controller"]["online"]
        return online_status

    def acceptance_length() -> float:
        reports = play_arm(engine, sidecar, ("nextn", (3, False, 0)), plain)
        drafted = [report for report in reports if (report.drafter, report.gamma) == ("nextn", 3)]
        counts = [(k, n) for report in drafted for k, n in enumerate(report.accepted_counts)]
        return 1 + sum(k * n for k, n in counts) / sum(n for _, n in counts)

    assert sidecar.introductions[0].capabilities.can_update_online
    before = acceptance_length()
    sidecar.stride = 2
    for _ in range(PLAYS_MAX):
        after = acceptance_length()
        updates = online()["updates"]
        if updates > 20 and after > before + 0.2:
            break
    print(f"acceptance length {before:.2f}, then {after:.2f} after {updates} updates")
    assert updates > 20
    assert after > before + 0.2
    sidecar.stride = 0

    def rests() -> bool:
        play_arm(engine, sidecar, ("nextn", (3, False, 0)), plain)
        return bool(online()["updates"] == online()["rounds"])

    eventually(rests, description="the last update has landed")
    assert (online()["refused"], online()["replaced"]) == (0, 0)


def test_dflash_may_be_the_only_drafter(plain: dict[str, list[list[int]]], tmp_path: Path) -> None:
    alone = ("--model-path", str(MIMO / "target"), "--speculative-algorithm", "DFLASH")
    with scripted_sidecar(tmp_path) as sidecar:
        environment = variables("overlapped", sidecar)
        del environment["SPECULATION_DFLASH_MODEL_PATH"]
        arguments = [*alone, "--speculative-draft-model-path", str(BLOCK_MODEL)]
        with running_engine(tmp_path / "engine", arguments, environment) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            arms: list[Arm] = [(gamma, False) for gamma in GAMMAS]
            play_any_order(engine, sidecar, arms, 1, plain["batch"])
            _, reports = play(engine, sidecar, lambda _: (7, False), SINGLE_PROMPT, [ALONE_LENGTH])
            accepted = accepted_by_context(reports, "dflash", 7)
            assert sum(accepted.values()) / len(accepted) > 3.5
