"""Data-parallel attention: two ranks of one real SGLang with batches of their own."""

import random
from collections.abc import Iterator

import pytest

from lab.harness.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar
from tests.support.engine import EAGER_NIGHTLY, EAGLE3, MODES, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import LENGTHS, PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
GAMMAS = (0, 1, 3, 7)
ARMS: list[Arm] = [(gamma, False) for gamma in GAMMAS]
# An odd number, of different lengths: the ranks' batches differ, and one rank is left over.
COUNT = 7
# What the rank with the link adds to its internal state.
KEY = "speculation_controller"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of plain decoding by two such ranks."""
    with running_engine(tmp_path_factory.mktemp("plain"), TWO_RANKS) as engine:
        answers = engine.generate(PROMPTS[:COUNT], LENGTHS[:COUNT])
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module", params=[EAGER_NIGHTLY, "overlapped"])
def steered(
    request: pytest.FixtureRequest,
    tokens: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[EngineProcess, ScriptedSidecar]]:
    """Every batch size has an arm of its own, so a rank that asked for its own would differ."""
    with scripted_sidecar(tmp_path_factory.mktemp("sidecar")) as sidecar:
        sidecar.bounds = (1, 2, 3, 4, 64)
        variables = {
            **sidecar.variables,
            **MODES[request.param],
            "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
            "SPECULATION_GRACE_SECONDS": "0.6",
        }
        folder = tmp_path_factory.mktemp("steered")
        with running_engine(folder, [*EAGLE3, *TWO_RANKS], variables) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            yield engine, sidecar


def test_it_says_that_its_ranks_have_batches_of_their_own(
    steered: tuple[EngineProcess, ScriptedSidecar],
) -> None:
    _, sidecar = steered
    assert len(sidecar.introductions) == 1
    spec = sidecar.introductions[0]
    sizes = spec.fingerprint.tensor_parallel_size, spec.fingerprint.data_parallel_size
    assert sizes == (2, 2)
    # A rank has its share of all requests, and is untested with a drafter that sleeps.
    assert spec.max_batch_size == 8
    assert not spec.capabilities.can_sleep


def test_ranks_with_different_batches_run_one_arm(
    steered: tuple[EngineProcess, ScriptedSidecar], tokens: list[list[int]]
) -> None:
    engine, sidecar = steered
    arms = random.Random(4).choices(ARMS, k=5000)
    before = sidecar.run(lambda count: arms[count % 5000])
    # On a busy machine a plan comes for every few steps only.
    for _ in range(20):
        answers = engine.generate(PROMPTS[:COUNT], LENGTHS[:COUNT])
        assert [answer.tokens for answer in answers] == tokens
        reports = sidecar.reports[before:]
        switches = sum(report.flags.switched for report in reports)
        every = {report.gamma for report in reports} == set(GAMMAS)
        if every and switches > 20 and len(reports) > 60:
            break
    assert {report.gamma for report in reports} == set(GAMMAS)
    assert switches > 20
    assert not any(report.flags.eager_fallback for report in reports)
    assert not any(report.flags.unsteered for report in reports)


def test_either_rank_may_be_idle(
    steered: tuple[EngineProcess, ScriptedSidecar], tokens: list[list[int]]
) -> None:
    engine, sidecar = steered
    arms = random.Random(9).choices(ARMS, k=500)
    sidecar.run(lambda count: arms[count % 500])

    def sent() -> int:
        # Asked twice: a step that was launched beside the last one may still be on its way.
        states = [engine.internal_states() for _ in range(2)][-1]
        (status,) = [state[KEY] for state in states if KEY in state]
        return int(status["reports_sent"])

    reported = []
    # The ranks take turns.
    for _ in range(4):
        before = sent()
        answers = engine.generate(PROMPTS[:1], LENGTHS[:1])
        assert answers[0].tokens == tokens[0]
        reported.append(sent() > before)
    # Only rank 0 reports, and only of its own requests.
    assert set(reported) == {False, True}
    eventually(lambda: len(sidecar.reports) == sent(), description="the reports have come")


def test_a_plan_runs_out_on_all_ranks_at_once(
    steered: tuple[EngineProcess, ScriptedSidecar], tokens: list[list[int]]
) -> None:
    engine, sidecar = steered
    answer, sidecar.answer = sidecar.answer, lambda _: None
    sidecar.lease_ms = 300

    def ran_out_of_the_plan() -> bool:
        answers = engine.generate(PROMPTS[:COUNT], [*LENGTHS[: COUNT - 2], 150, 150])
        pairs = zip(answers, tokens, strict=True)
        assert all(answer.tokens[: len(other)] == other for answer, other in pairs)
        later = sidecar.reports[before:]
        return {report.gamma for report in later if report.flags.unsteered} == {7, 3}

    try:
        before = sidecar.run(lambda _: (7, False))
        # On a busy machine the first step may come when the plan has long run out.
        eventually(ran_out_of_the_plan, description="the plan has run out, and the grace after it")
    finally:
        sidecar.lease_ms = 60_000
        sidecar.answer = answer
