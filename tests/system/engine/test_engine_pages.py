"""Pages of several tokens, with the one drafter that can be steered with them."""

import random
from pathlib import Path

import pytest

from tests.support.engine import EAGLE3, MODES, serving
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import PROMPTS, play
from tests.support.scripted_sidecar import Arm, scripted_sidecar

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 2, 3, 5, 7)
ARMS: list[Arm] = [*((gamma, False) for gamma in GAMMAS), (0, True)]


def test_with_pages_any_order_of_arms_gives_plain_decodings_tokens(
    plain: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    arms = random.Random(8).choices(ARMS, k=997)
    with scripted_sidecar(tmp_path) as sidecar:
        variables = {
            **sidecar.variables,
            **MODES["overlapped"],
            "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
            "SPECULATION_SLEEP_POSITIONS": "12",
        }
        options = [*EAGLE3, "--page-size", "16"]
        with serving(tmp_path / "engine", options, variables) as engine:
            eventually(lambda: sidecar.server.introductions, what="the engine introduces itself")
            for _ in range(3):
                answers, reports = play(engine, sidecar, lambda count: arms[count % 997])
                assert [answer.tokens for answer in answers] == plain["batch"]
            # The prompts of the first time are whole pages by now.
            assert {answer.meta["cached_tokens"] % 16 for answer in answers} == {0}
            assert min(answer.meta["cached_tokens"] for answer in answers) >= 16
            status = engine.internal_state()["speculation_controller"]
        assert {report.gamma for report in reports} == set(GAMMAS)
        assert status["sleep"]["caught_up"] > 0
    assert PROMPTS
