"""Batches without a captured graph in the real SGLang, steered by a scripted sidecar."""

import random
from collections.abc import Iterator

import pytest

from tests.support.engine import EAGLE3, MODES, EngineProcess, serving
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import play
from tests.support.scripted_sidecar import Arm, ScriptedSidecar

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 2, 5)
ARMS: list[Arm] = [*((gamma, False) for gamma in GAMMAS), (0, True)]
LARGEST = 4


@pytest.fixture(scope="module")
def engine(
    plain: dict[str, list[list[int]]],
    sidecar: ScriptedSidecar,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """With graphs for four sequences at most, and requests for eight."""
    variables = {
        **sidecar.variables,
        **MODES["overlapped"],
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_SLEEP_POSITIONS": "12",
    }
    sizes = ("--cuda-graph-bs-decode", "1", "2", str(LARGEST), "--speculative-num-steps", "2")
    topk = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3")
    folder = tmp_path_factory.mktemp("steered")
    with serving(folder, [*EAGLE3, *sizes, *topk], variables) as running:
        eventually(lambda: sidecar.server.introductions, what="the engine introduces itself")
        yield running


def test_it_introduces_what_it_captured(engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    assert list(sidecar.server.introductions[0].fingerprint.graph_batch_sizes) == [1, 2, LARGEST]


@pytest.mark.parametrize("arm", ARMS)
def test_a_batch_without_a_graph_is_exact_and_reported(
    arm: Arm, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    answers, reports = play(engine, sidecar, lambda _: arm)
    assert [answer.tokens for answer in answers] == plain["batch"]
    # Requests finish one after the other, so both kinds of batches are there.
    assert {report.batch_size > LARGEST for report in reports} == {False, True}
    for report in reports:
        assert report.flags.eager_fallback == (report.batch_size > LARGEST)


def test_batches_with_and_without_a_graph_take_any_order_of_arms(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    arms = random.Random(1).choices(ARMS, k=500)
    answers, reports = play(engine, sidecar, lambda count: arms[count % 500])
    assert [answer.tokens for answer in answers] == plain["batch"]
    assert {report.flags.eager_fallback for report in reports} == {False, True}
