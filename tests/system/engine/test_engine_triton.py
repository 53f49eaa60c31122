"""SGLang's attention backend of Triton, interpreted: its metadata, its masks, and its graphs."""

from collections.abc import Iterator

import pytest

from lab.harness.scripted_sidecar import Arm, ScriptedSidecar
from tests.support.engine import EAGLE3, MODES, EngineProcess, running_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import PLAYS_MAX, PROMPTS, play

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

# Few and short, because an interpreted kernel takes a few hundredths of a second.
ARMS: list[Arm] = [(2, False), (0, False), (2, False), (0, True)]
LENGTHS = [13, 8]
ARGUMENTS = (
    "--attention-backend", "triton",
    "--triton-attention-num-kv-splits", "2",
    # One graph for both: where one sequence is left, SGLang pads the batch.
    "--cuda-graph-bs-decode", "2",
    "--speculative-num-steps", "2",
    "--max-total-tokens", "1024",
    "--max-running-requests", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(
    plain: dict[str, list[list[int]]],
    sidecar: ScriptedSidecar,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    variables = {
        **sidecar.variables,
        **MODES["overlapped"],
        "SPECULATION_GAMMAS": "0,2",
        "SPECULATION_SLEEP_POSITIONS": "3",
    }
    folder = tmp_path_factory.mktemp("steered")
    with running_engine(folder, [*EAGLE3, *ARGUMENTS], variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_any_order_of_arms_gives_the_tokens_of_another_backends_plain_decoding(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    assert sidecar.introductions[0].fingerprint.attention_backend == "triton"
    expected = [tokens[:length] for tokens, length in zip(plain["batch"][:2], LENGTHS, strict=True)]
    slept, ran = 0, set[tuple[int, int]]()
    # On a busy machine a plan comes for every few steps only.
    for _ in range(PLAYS_MAX):
        answers, reports = play(
            engine, sidecar, lambda count: ARMS[count % len(ARMS)], PROMPTS[:2], LENGTHS
        )
        assert [answer.tokens for answer in answers] == expected
        assert not any(report.flags.eager_fallback for report in reports)
        ran |= {(report.gamma, report.batch_size) for report in reports}
        slept = engine.internal_state()["speculation_controller"]["sleep"]["slept"]
        gammas, sizes = map(set, zip(*ran, strict=True))
        if gammas == {0, 2} and sizes == {1, 2} and slept:
            break
    assert gammas == {0, 2}
    assert sizes == {1, 2}
    assert slept > 0
