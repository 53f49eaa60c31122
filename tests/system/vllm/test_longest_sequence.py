"""Up to the longest sequence vLLM verifies no more drafts than the plan says.

There its first model runner drafts no more, and hands on zeros instead.
"""

from pathlib import Path
from typing import Any

import pytest

from lab.harness.scripted_sidecar import scripted_sidecar
from speculation.v1.engine_pb2 import StepReport
from tests.support.engine import TARGET
from tests.support.vllm_engine import eagle3, run_job

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 5, 7)
CHOSEN = 1
PROMPT_TOKENS = 48
NEW_TOKENS = 16
METHODS = ("eagle3", "eagle3, overlapped")


@pytest.fixture(scope="module")
def played(
    prompts: list[list[int]], draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[StepReport]]:
    folder = tmp_path_factory.mktemp("longest")
    assert {len(prompt) for prompt in prompts} == {PROMPT_TOKENS}
    engines = [
        {
            "name": name,
            "overlap": "overlapped" in name,
            "arguments": {
                "model": str(TARGET),
                "max_model_len": PROMPT_TOKENS + NEW_TOKENS,
                "speculative_config": eagle3(draft),
            },
        }
        for name in METHODS
    ]
    with scripted_sidecar(folder) as sidecar:
        sidecar.plans_once = True
        sidecar.script = lambda _: (CHOSEN, False)
        variables = sidecar.variables | {"SPECULATION_GAMMAS": ",".join(map(str, GAMMAS))}
        requests = [{"prompt": prompt, "new_tokens": NEW_TOKENS} for prompt in prompts]
        results = run_job(folder, engines, requests, variables)
        return results, sidecar.reports


@pytest.mark.parametrize("name", METHODS)
def test_no_more_drafts_are_verified_than_the_plan_says(
    played: tuple[dict[str, Any], list[StepReport]], plain: list[list[int]], name: str
) -> None:
    answers, _ = played
    assert answers[name]["tokens"] == [tokens[:NEW_TOKENS] for tokens in plain]
    metrics = answers[name]["metrics"]
    assert metrics["vllm:spec_decode_num_drafts"] > 0
    assert (
        metrics["vllm:spec_decode_num_draft_tokens"]
        == CHOSEN * metrics["vllm:spec_decode_num_drafts"]
    )


def test_every_report_is_of_an_arm(played: tuple[dict[str, Any], list[StepReport]]) -> None:
    _, reports = played
    assert {report.gamma for report in reports} <= {0, CHOSEN}
