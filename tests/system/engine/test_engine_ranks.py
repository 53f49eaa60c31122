"""One real SGLang over two ranks, with two drafters, steered by one scripted sidecar."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.cpu_engine.serve import with_cpu_defaults
from tests.support.engine import (
    DFLASH,
    EAGLE3,
    MODES,
    EngineProcess,
    install_plugin,
    launched,
    serving,
)
from tests.support.eventually import eventually
from tests.support.mixture_rules import rules_of
from tests.support.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = ("--tp-size", "2")
GAMMAS = (0, 1, 3, 7)
ARMS: list[Arm] = [
    *((gamma, False, 0) for gamma in GAMMAS),
    *((gamma, False, 1) for gamma in GAMMAS[1:]),
    *((gamma, False, which) for which in (2, 3, 4) for gamma in (3, 7)),
    (0, True, 0),
]
# A lookup, alone and in a mixture with each drafter.
LOOKUPS = ("ngram", "eagle3+ngram", "dflash+ngram")
PROMPTS = [
    prompt
    for domain in DOMAINS
    for prompt in held_out_prompts(domain, count=1, length_tokens=40, seed=3)
]
LENGTHS = [25, 45, 35, 30][: len(PROMPTS)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of two ranks as well: a sum over two rounds otherwise than one over all."""
    with serving(tmp_path_factory.mktemp("plain"), TWO_RANKS) as engine:
        return [answer.tokens for answer in engine.generate(PROMPTS, LENGTHS)]


@pytest.fixture(scope="module", params=["eager", "overlapped"])
def way(request: pytest.FixtureRequest) -> str:
    """How an engine runs its passes: the first of `MODES`, and the last."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def sidecar(way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSidecar]:
    """One for each way's engine."""
    with scripted_sidecar(tmp_path_factory.mktemp(f"sidecar-{way}")) as scripted:
        scripted.rules = rules_of(LOOKUPS[1:], GAMMAS)
        yield scripted


@pytest.fixture(scope="module")
def engine(
    way: str,
    plain: list[list[int]],
    sidecar: ScriptedSidecar,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """Every second broadcast of SGLang is left out."""
    variables = {
        **sidecar.variables,
        **MODES[way],
        "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_LOOKUP": "1",
        "SPECULATION_SLEEP_POSITIONS": "8",
        "SPECULATION_GRACE_SECONDS": "0.6",
    }
    arguments = [*EAGLE3, *TWO_RANKS, "--scheduler-recv-interval", "2"]
    with serving(tmp_path_factory.mktemp("steered"), arguments, variables) as running:
        eventually(lambda: sidecar.server.introductions, what="the engine introduces itself")
        yield running


def test_it_introduces_itself_once(
    way: str, engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    assert len(sidecar.server.introductions) == 1
    spec = sidecar.server.introductions[0]
    assert spec.fingerprint.tensor_parallel_size == 2
    assert list(spec.fingerprint.graph_batch_sizes) == ([] if way == "eager" else [1, 2, 4, 8])
    # The whole model, not one rank's share of it.
    full = spec.shape.attention[0].grouped_query
    assert (full.query_heads, full.kv_heads) == (4, 2)
    assert engine.log.read_text().count("steered by") == 1


def test_ranks_run_the_same_arm_in_every_step(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: list[list[int]]
) -> None:
    """Two ranks that ran different arms would hang, or sum what does not belong together."""
    order = random.Random(5)
    arms = order.choices(ARMS, k=5000)
    before = sidecar.run(lambda count: arms[count % 5000])
    every = {("eagle3", gamma) for gamma in GAMMAS} | {("dflash", gamma) for gamma in GAMMAS[1:]}
    every |= {(name, gamma) for name in LOOKUPS for gamma in (3, 7)}
    rows = 0
    # On a busy machine a plan comes for every few steps only.
    for _ in range(20):
        answers = engine.generate(PROMPTS, LENGTHS)
        assert [answer.tokens for answer in answers] == plain
        rows += sum(answer.meta["spec_verify_ct"] for answer in answers)
        reports = sidecar.reports_since(before, rows)
        ran = {(report.drafter, report.gamma) for report in reports}
        if ran >= every and sum(report.flags.switched for report in reports) > 30:
            break
    assert ran >= every
    assert sum(report.flags.switched for report in reports) > 30
    assert not any(report.flags.eager_fallback for report in reports)
    assert engine.internal_state()["speculation_controller"]["sleep"]["slept"] > 0


@pytest.mark.parametrize("way", ["eager"], indirect=True)
def test_a_plan_runs_out_on_all_ranks_at_once(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: list[list[int]]
) -> None:
    answer, sidecar.server.answer = sidecar.server.answer, lambda _: None
    sidecar.lease_ms = 300
    try:
        before = sidecar.run(lambda _: (7, False, 1))
        answers = engine.generate(PROMPTS[:1], [150])
        rows = sum(answer.meta["spec_verify_ct"] for answer in answers)
        reports = sidecar.reports_since(before, rows, or_lost=True)
    finally:
        sidecar.lease_ms = 60_000
        sidecar.server.answer = answer
    assert answers[0].tokens[: LENGTHS[0]] == plain[0]
    # The last plan goes on for the grace, and then the engine flies alone; until the agent, which
    # hears nothing, begins a new session, with a plan, and so on.
    ran = [(report.drafter, report.gamma) for report in reports if report.flags.unsteered]
    assert ran[0] == ("dflash", 7)
    assert set(ran) == {("dflash", 7), ("eagle3", 3)}


def test_ranks_that_were_set_up_differently_do_not_start(tmp_path: Path) -> None:
    target = "tests.system.engine.sabotage:let_one_rank_differ"
    plugins = install_plugin(tmp_path / "sabotage", target, name="zz_sabotage")
    variables = {
        "SPECULATION_SIDECAR": "unix:/nowhere",
        "SPECULATION_GAMMAS": "0,1,2,3,5,7",
        "FIRST_RANK": str(tmp_path / "first"),
        "PYTHONPATH": str(plugins),
    }
    arguments = with_cpu_defaults([*EAGLE3, *TWO_RANKS])
    # Its ranks are spawned, as on a GPU: a forked one could not have other variables.
    with launched(tmp_path / "engine", arguments, variables, "sglang.launch_server") as engine:
        eventually(lambda: engine.process.poll() is not None, within=500.0, what="it gives up")
        log = engine.log.read_text()
    assert re.search(r"the ranks disagree: SPECULATION_GAMMAS is \(0, 1, .*7\) on rank 0", log)
