"""Pages of several tokens in the cache."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.harness.scripted_sidecar import Arm, scripted_sidecar
from tests.support.engine import DFLASH, DFLASH_ONLY, EAGLE3, MODES, running_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import (
    SINGLE_PROMPT,
    accepted_by_context,
    check_against_student,
    play,
    play_any_order,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 2, 3, 5, 7)
ASLEEP: Arm = (0, True, 0)
OWN: list[Arm] = [*((gamma, False, 0) for gamma in GAMMAS), ASLEEP]
SECOND: list[Arm] = [(gamma, False, 1) for gamma in GAMMAS[1:]]


@pytest.mark.parametrize(
    ("drafters", "second", "arms"),
    [(EAGLE3, "", OWN), (DFLASH_ONLY, "", OWN), (EAGLE3, str(DFLASH), [*OWN, *SECOND])],
    ids=["EAGLE3", "DFlash", "both"],
)
def test_with_pages_any_order_of_arms_gives_plain_decodings_tokens(
    drafters: Sequence[str],
    second: str,
    arms: list[Arm],
    plain: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    order = [*arms, *[ASLEEP] * 3]
    with scripted_sidecar(tmp_path) as sidecar:
        variables = {
            **sidecar.variables,
            **MODES["overlapped"],
            "SPECULATION_DFLASH_MODEL_PATH": second,
            "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
            "SPECULATION_SLEEP_POSITIONS": "12",
        }
        options = [*drafters, "--page-size", "16"]
        with running_engine(tmp_path / "engine", options, variables) as engine:
            eventually(lambda: sidecar.introductions, description="the engine introduces itself")
            play_any_order(engine, sidecar, order, 8, plain["batch"], catches_up=True)
            answers, _ = play(engine, sidecar, lambda _: arms[-1])
            assert [answer.tokens for answer in answers] == plain["batch"]
            # What the first time has left in the cache.
            cached = [answer.meta["cached_tokens"] for answer in answers]
            status = engine.internal_state()["speculation_controller"]
            if second or drafters is DFLASH_ONLY:
                arm = (7, False, len(arms) > len(OWN))
                alone, reports = play(engine, sidecar, lambda _: arm, SINGLE_PROMPT, [200])
                assert alone[0].tokens == plain["alone"][0][:200]
                live = accepted_by_context(reports, "dflash", 7)
                check_against_student(live, [*SINGLE_PROMPT[0], *alone[0].tokens])
    assert min(cached) >= 16
    assert {tokens % 16 for tokens in cached} == {0}
    assert status["sleep"]["cold"] == 0
    assert status["lost"] == []
