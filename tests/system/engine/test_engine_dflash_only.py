"""DFlash as the only drafter of the real SGLang, steered by a scripted sidecar."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.harness.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar
from speculation.v1.engine_pb2 import DRAFTER_KIND_DFLASH
from tests.support.engine import (
    DFLASH,
    DFLASH_ONLY,
    MODES,
    EngineProcess,
    install_plugin,
    running_engine,
)
from tests.support.eventually import eventually
from tests.support.mixture_rules import rules_of
from tests.support.prompts_in_flight import (
    SINGLE_PROMPT,
    accepted_by_context,
    check_against_student,
    play,
    play_any_order,
    play_arm,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

# The last is longer than a block, and no arm of this drafter's.
GAMMAS = (0, 1, 2, 3, 5, 7, 9)
BLOCK: list[Arm] = [*((gamma, False) for gamma in GAMMAS[:-1]), (0, True)]
# A lookup, alone and in a mixture with the block.
ARMS: list[Arm] = [*BLOCK, (3, False, 1), (3, False, 2), (7, False, 2)]
ALONE_LENGTH = 200


@pytest.fixture(scope="module")
def sidecar(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSidecar]:
    """One for each mode's engine."""
    with scripted_sidecar(tmp_path_factory.mktemp(f"sidecar-{mode}")) as scripted:
        scripted.rules = rules_of(("dflash+ngram",), GAMMAS[:-1])
        yield scripted


@pytest.fixture(scope="module")
def engine(
    mode: str,
    plain: dict[str, list[list[int]]],
    sidecar: ScriptedSidecar,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    """With the prefix cache on."""
    variables = {
        **sidecar.variables,
        **MODES[mode],
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_SLEEP_POSITIONS": "12",
        "SPECULATION_GRAPH_LIMITS": "7:8",
        "SPECULATION_LOOKUP": "1",
    }
    with running_engine(tmp_path_factory.mktemp("steered"), DFLASH_ONLY, variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_it_introduces_itself(mode: str, engine: EngineProcess, sidecar: ScriptedSidecar) -> None:
    spec = sidecar.introductions[0]
    assert [drafter.name for drafter in spec.drafters] == ["dflash", "ngram", "dflash+ngram"]
    drafter = spec.drafters[0]
    assert (drafter.kind, drafter.model) == (DRAFTER_KIND_DFLASH, str(DFLASH))
    assert tuple(drafter.gammas) == GAMMAS[:-1]
    assert drafter.shape.block_size == 8
    assert spec.capabilities.can_sleep
    assert spec.capabilities.can_switch_drafter
    # With graphs up to 8 the limit limits nothing.
    limits = [(limit.gamma, limit.max_batch_size) for limit in drafter.batch_limits]
    assert limits == ([(7, 8)] if mode == "eager" else [])
    graph_states = engine.internal_state()["speculation_controller"]["prepared"]
    # It starts with 3.
    assert set(graph_states) == {str(gamma) for gamma in GAMMAS} - {"3"}
    assert all(state["seconds"] > 0 for state in graph_states.values())


@pytest.mark.parametrize("arm", BLOCK)
def test_every_arm_gives_plain_decodings_tokens(
    arm: Arm, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    play_arm(engine, sidecar, ("dflash", arm), plain["batch"])


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_arms_gives_plain_decodings_tokens(
    seed: int, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    play_any_order(engine, sidecar, ARMS, seed, plain["batch"])


@pytest.mark.parametrize("asleep", [False, True])
def test_blocks_are_the_students_also_after_a_pause(
    asleep: bool, engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    def pauses(count: int) -> Arm:
        return (7, False) if count % 9 < 4 else (0, asleep)

    sequence = [*SINGLE_PROMPT[0], *plain["alone"][0][:ALONE_LENGTH]]
    live: dict[int, int] = {}
    for script in (lambda _: (7, False), pauses):
        answers, reports = play(engine, sidecar, script, SINGLE_PROMPT, [ALONE_LENGTH])
        assert answers[0].tokens == plain["alone"][0][:ALONE_LENGTH]
        live |= accepted_by_context(reports, "dflash", 7)
    check_against_student(live, sequence)
    assert sum(live.values()) > len(live)
    sleep = engine.internal_state()["speculation_controller"]["sleep"]
    # Its sleep ends within a play, and not with the request.
    assert (sleep["slept"] > 0 and sleep["caught_up"] > 0) >= asleep
    assert sleep["cold"] == 0


def test_when_the_block_fails_the_engine_goes_on(
    plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    target = "tests.system.engine.sabotage:break_block_drafter_on_demand"
    plugins = install_plugin(tmp_path / "sabotage", target, name="zz_sabotage")
    with scripted_sidecar(tmp_path) as sidecar:
        variables = {
            **sidecar.variables,
            "PYTHONPATH": str(plugins),
            "SABOTAGE_FILE": str(tmp_path / "broken"),
        }
        with running_engine(tmp_path / "engine", DFLASH_ONLY, variables) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            (tmp_path / "broken").touch()
            answer = engine.generate(SINGLE_PROMPT, [ALONE_LENGTH])[0]
            assert answer.tokens == plain["alone"][0][:ALONE_LENGTH]
            reports = sidecar.reports_since(0, answer.meta["spec_verify_ct"])
            log = engine.log.read_text()
            eventually(
                lambda: any(r.lost for r in sidecar.requests), description="the loss is reported"
            )
    assert log.count("DFlash no longer drafts") == 1
    [loss] = next(request.lost for request in sidecar.requests if request.lost)
    assert (loss.drafter, loss.reason) == ("dflash", "MemoryError: sabotaged")
    assert "sabotaged" in log
    # Until another plan comes, nothing that is drafted is accepted.
    assert sum(report.accepted_counts[0] for report in reports) > 0.9 * len(reports)
