"""Tests of the real vLLM, which are skipped where it is not installed, with that reason."""

from pathlib import Path

import pytest

from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.vllm_engine.convert import convert_eagle3
from lab.vllm_engine.environment import has_environment
from tests.support.engine import DRAFT, TARGET
from tests.support.vllm_engine import MTP_TARGET, run_job

WHY_NOT = "VLLM IS NOT TESTED HERE: there is no .venv-vllm (make setup-vllm makes it)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips everything below this folder without the virtual environment."""
    if not has_environment():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small target's EAGLE3 drafter, as vLLM loads it."""
    folder = tmp_path_factory.mktemp("draft")
    convert_eagle3(DRAFT, folder)
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Two of each domain: regular text is copied and drafted well, prose is not."""
    return [prompt for domain in DOMAINS for prompt in held_out_prompts(domain, 2, 48, seed=1)]


@pytest.fixture(scope="session")
def decoded_plainly(
    prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[int]]]:
    """The prompts' tokens by plain decoding, 64 of each, by the folder of the target."""
    engines = [
        {"name": str(target), "arguments": {"model": str(target)}}
        for target in (TARGET, MTP_TARGET)
    ]
    requests = [{"prompt": prompt, "new_tokens": 64} for prompt in prompts]
    results = run_job(tmp_path_factory.mktemp("plain"), engines, requests)
    for answer in results.values():
        assert answer["scheduler"] == "Scheduler"
        assert not any("spec_decode" in name for name in answer["metrics"])
    return {target: answer["tokens"] for target, answer in results.items()}


@pytest.fixture(scope="session")
def plain(decoded_plainly: dict[str, list[list[int]]]) -> list[list[int]]:
    """Those of the small target that most engines serve."""
    return decoded_plainly[str(TARGET)]
