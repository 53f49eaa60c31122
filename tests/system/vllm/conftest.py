"""Tests of the real vLLM, which are skipped where it is not installed, and say so."""

from pathlib import Path

import pytest

from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.vllm_engine.convert import convert_eagle3
from lab.vllm_engine.environment import is_made
from tests.support.engine import DRAFT, TARGET
from tests.support.vllm_engine import run_job

WHY_NOT = "VLLM IS NOT TESTED HERE: there is no .venv-vllm (make setup-vllm makes it)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips everything below this folder without the virtual environment."""
    if not is_made():
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
def plain(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Their tokens by plain decoding, 64 of each."""
    folder = tmp_path_factory.mktemp("plain")
    engines = [{"name": "plain", "arguments": {"model": str(TARGET)}}]
    requests = [{"prompt": prompt, "new_tokens": 64} for prompt in prompts]
    found = run_job(folder, engines, requests)["plain"]
    assert found["scheduler"] == "Scheduler"
    assert found["metrics"] == {}
    tokens: list[list[int]] = found["tokens"]
    return tokens
