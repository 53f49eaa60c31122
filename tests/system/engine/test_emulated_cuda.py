"""SGLang's CUDA paths on an emulated GPU: graphs, overlap, and tokens under changing arms."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.gpu_check import plugins, small_engines
from lab.gpu_check.float32_rmsnorm import VARIABLE as FLOAT32
from lab.harness.scripted_sidecar import Arm, ScriptedSidecar
from tests.support.engine import (
    DFLASH,
    DRAFT,
    EMULATED_SERVE,
    EngineProcess,
    running_engine,
    started_engine,
)  # fmt: skip
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import PLAYS_MAX, PROMPTS, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = [24, 16]
CHAIN, BLOCK, ASLEEP, LOOKUP = (3, False, 0), (7, False, 1), (0, True, 0), (7, False, 2)
ARMS: list[Arm] = [CHAIN, ASLEEP, BLOCK, (7, False, 0), LOOKUP]
# As for a GPU.
OPTIONS = (
    "--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "2",
    "--max-total-tokens", "2048", "--mem-fraction-static", "0.2",
    "--attention-backend", "triton", "--sampling-backend", "pytorch",
    "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "1", "2",
    "--skip-server-warmup",
)  # fmt: skip
SPECULATION = (
    "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(DRAFT),
    "--speculative-num-steps", "3", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "4",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(
    sidecar: ScriptedSidecar, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("steered")
    variables = {
        **sidecar.variables,
        **plugins.environment(tmp_path_factory.mktemp("plugins")),
        **small_engines.NO_TF32,
        FLOAT32: "1",
        "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
        "SPECULATION_GAMMAS": "0,3,7",
        "SPECULATION_LOOKUP": "1",
        "SPECULATION_SLEEP_POSITIONS": "3",
    }
    with running_engine(folder, [*OPTIONS, *SPECULATION], variables, EMULATED_SERVE) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_the_engine_takes_the_paths_of_cuda_and_says_that_its_gpu_is_emulated(
    engine: EngineProcess, sidecar: ScriptedSidecar
) -> None:
    fingerprint = sidecar.introductions[0].fingerprint
    assert "emulated" in fingerprint.device
    assert fingerprint.attention_backend == "triton"
    assert list(fingerprint.graph_batch_sizes) == [1, 2]
    state = engine.internal_state()["speculation_controller"]
    assert state["lost"] == []
    # Memory of the device changes, and is counted.
    assert state["prepared"]["7"]["device_bytes"] > 0
    log = engine.log.read_text()
    assert "disable_overlap_schedule': False" in log
    assert "Capture target verify CUDA graph end" in log


def test_any_order_of_arms_gives_plain_decodings_tokens_by_replays_alone(
    engine: EngineProcess, sidecar: ScriptedSidecar, plain: dict[str, list[list[int]]]
) -> None:
    expected = [tokens[:length] for tokens, length in zip(plain["batch"][:2], LENGTHS, strict=True)]
    ran = set[tuple[str, int]]()
    wanted = {("eagle3", 3), ("eagle3", 0), ("dflash", 7), ("eagle3", 7), ("ngram", 7)}
    # On a busy machine a plan comes for every few steps only.
    for _ in range(PLAYS_MAX):
        answers, reports = play(
            engine, sidecar, lambda count: ARMS[count % len(ARMS)], PROMPTS[:2], LENGTHS
        )
        assert [answer.tokens for answer in answers] == expected
        assert not any(report.flags.eager_fallback for report in reports)
        ran |= {(report.drafter, report.gamma) for report in reports}
        if ran >= wanted:
            break
    assert ran >= wanted
    assert engine.internal_state()["speculation_controller"]["lost"] == []


def test_float32_does_not_run_without_the_checks_plugin(tmp_path: Path) -> None:
    # A GPU's library has no such norm.
    with started_engine(tmp_path, OPTIONS, {}, EMULATED_SERVE) as running:
        eventually(
            lambda: running.process.poll() is not None, timeout_seconds=240, description="it ends"
        )
        assert "rmsnorm failed to dispatch data type Float" in running.log.read_text()
