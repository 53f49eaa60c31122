"""EAGLE and NEXTN on the real SGLang: the same plugin, the same exactness."""

import random
from pathlib import Path

import pytest

from tests.engine_shim.link.eventually import eventually
from tests.engine_shim.sglang.engine import Generated, serving
from tests.engine_shim.sglang.random_models import HIDDEN, VOCABULARY, eagle_draft, mtp_target
from tests.engine_shim.sglang.scripted import ScriptedSidecar, scripted_sidecar

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ARMS = ((2, False), (0, True), (0, True), (3, False), (0, False), (1, False), (0, True), (5, False))
LENGTHS = [160, 91, 128, 205]


def prompts() -> list[list[int]]:
    choose = random.Random(2)
    return [[choose.randrange(VOCABULARY) for _ in range(12 + 5 * i)] for i in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_target(tmp_path_factory.mktemp("random") / "target")


def options(target: Path, *speculation: str) -> list[str]:
    # No text goes in or out.
    common = ["--model-path", str(target), "--skip-tokenizer-init", "--disable-radix-cache"]
    return [*common, *speculation]


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with serving(tmp_path_factory.mktemp("plain"), options(target)) as engine:
        return [answer.tokens for answer in engine.generate(prompts(), LENGTHS)]


def steered(folder: Path, arguments: list[str]) -> tuple[list[Generated], ScriptedSidecar]:
    with scripted_sidecar(folder) as sidecar:
        sidecar.script = lambda count: ARMS[count % len(ARMS)]
        with serving(folder, arguments, {"SPECULATION_SIDECAR": sidecar.server.target}) as engine:
            eventually(lambda: sidecar.server.introductions, what="the engine introduces itself")
            answers = engine.generate(prompts(), LENGTHS)
            rows = sum(answer.meta["spec_verify_ct"] for answer in answers)
            sidecar.reports_since(0, rows)
            sleep = engine.internal_state()["speculation_controller"]["sleep"]
        assert sleep["passes"] > 0
        assert sleep["cold"] == 0
        return answers, sidecar


@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE"])
def test_every_token_is_plain_decodings(
    algorithm: str, target: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    draft = target if algorithm == "NEXTN" else eagle_draft(tmp_path / "draft")
    speculation = (
        "--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft),
    )  # fmt: skip
    answers, sidecar = steered(tmp_path, options(target, *speculation))
    assert [answer.tokens for answer in answers] == plain
    introduction = sidecar.server.introductions[0]
    assert introduction.drafters[0].name == algorithm.lower()
    assert introduction.HasField("shape")
    assert introduction.drafters[0].shape.dense_params > VOCABULARY * HIDDEN
    gammas = {report.gamma for report in sidecar.reports}
    assert 0 in gammas
    assert len(gammas) > 3
    accepted = sum(k * n for r in sidecar.reports for k, n in enumerate(r.accepted_counts))
    assert accepted == sum(answer.meta["spec_num_correct_drafts"] for answer in answers)
    assert accepted > 10
