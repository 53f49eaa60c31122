"""Passes without a captured graph in the real SGLang, steered by a scripted sidecar."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.harness.scripted_sidecar import Arm, ScriptedSidecar
from speculation.v1.engine_pb2 import StepReport
from tests.support.engine import (
    DFLASH,
    EAGLE3,
    MODES,
    EngineProcess,
    install_plugin,
    running_engine,
)
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import LENGTHS, PROMPTS, play, play_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 2, 7)
CHAIN: Arm = (2, False, 0)
BLOCK: Arm = (7, False, 1)
ARMS: list[Arm] = [(0, False, 0), CHAIN, (7, False, 0), BLOCK, (0, True, 0)]
LARGEST = 4


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that names the pass whose graphs are refused while it exists."""
    return tmp_path_factory.mktemp("refused") / "pass"


@pytest.fixture(scope="module")
def engine(
    plain: dict[str, list[list[int]]],
    sidecar: ScriptedSidecar,
    refused: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """With graphs for four sequences at most, and requests for eight."""
    target = "tests.system.engine.sabotage:refuse_graphs_on_demand"
    plugins = install_plugin(tmp_path_factory.mktemp("plugins"), target, name="zz_sabotage")
    variables = {
        **sidecar.variables,
        **MODES["overlapped"],
        "PYTHONPATH": str(plugins),
        "SABOTAGE_FILE": str(refused),
        "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_SLEEP_POSITIONS": "12",
    }
    sizes = ("--cuda-graph-bs-decode", "1", "2", str(LARGEST), "--speculative-num-steps", "2")
    topk = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3")
    folder = tmp_path_factory.mktemp("steered")
    with running_engine(folder, [*EAGLE3, *sizes, *topk], variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def both_sizes(reports: list[StepReport]) -> bool:
    return {report.batch_size > LARGEST for report in reports} == {False, True}


def test_it_introduces_what_it_captured(engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    assert list(sidecar.introductions[0].fingerprint.graph_batch_sizes) == [1, 2, LARGEST]


@pytest.mark.parametrize("arm", ARMS)
def test_a_batch_without_a_graph_is_exact_and_reported(
    arm: Arm, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    # Requests finish one after the other, so both kinds of batches are there, unless a busy machine
    # begins them one after the other, too.
    reports = play_until(engine, sidecar, lambda _: arm, both_sizes, plain["batch"])
    for report in reports:
        assert report.gamma == arm[0]
        assert report.flags.eager_fallback == (report.batch_size > LARGEST)


def test_batches_with_and_without_a_graph_take_any_order_of_arms(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    arms = random.Random(1).choices(ARMS, k=500)
    reports = play_until(
        engine, sidecar, lambda count: arms[count % 500], both_sizes, plain["batch"]
    )
    for report in reports:
        assert report.flags.eager_fallback == (report.batch_size > LARGEST)


@pytest.mark.parametrize(
    ("name", "arm", "eager"),
    [
        ("draft", CHAIN, True),
        ("draft_extend", CHAIN, True),
        ("block", BLOCK, True),
        # The first token of a chain comes out of the pass before.
        ("draft", (0, False, 0), False),
        ("draft_extend", (0, True, 0), False),
        ("block", CHAIN, False),
    ],
)
def test_a_drafters_pass_without_its_graph_is_exact_and_reported(
    name: str,
    arm: Arm,
    eager: bool,
    engine: EngineProcess,
    sidecar: ScriptedSidecar,
    plain: dict[str, list[list[int]]],
    refused: Path,
) -> None:
    few = slice(LARGEST)

    def counted() -> int:
        state = engine.internal_state()["speculation_controller"]["eager"]
        assert state["without_graphs"] == []
        return int(state["steps"][name])

    # The steps of the script before it are over.
    play(engine, sidecar, lambda _: arm, PROMPTS[few], LENGTHS[few])
    before = counted()
    refused.write_text(name)
    try:
        answers, reports = play(engine, sidecar, lambda _: arm, PROMPTS[few], LENGTHS[few])
    finally:
        refused.unlink()
    assert [answer.tokens for answer in answers] == plain["batch"][few]
    assert {report.flags.eager_fallback for report in reports} == {eager}
    # A step that was launched beside a request's last one is not reported if nothing else ran in
    # it; on a busy machine the requests may run one after the other.
    unreported = len(answers) + 1
    assert counted() - before in (
        range(len(reports), len(reports) + unreported + 1) if eager else [0]
    )
