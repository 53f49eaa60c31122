"""vLLM's shim keeps the contract, as `python -m lab.conformance shim` checks it."""

import subprocess
import sys
from pathlib import Path

import pytest

from lab.cpu_engine.models.prompts import held_out_prompts
from tests.support.engine import TARGET
from tests.support.service_harness import ENVIRONMENT
from tests.support.vllm_engine import eagle3, job

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_shim_keeps_the_contract(draft: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'check.sock'}"
    command = [
        sys.executable, "-m", "lab.conformance", "shim", address, "--wait-seconds", "300",
    ]  # fmt: skip
    # More than the check needs: it ends while they are answered.
    requests = [
        {"prompt": prompt, "new_tokens": 400}
        for domain in ("json", "csv", "prose", "code")
        for prompt in held_out_prompts(domain, 100, 32, seed=2)
    ]
    engine = {
        "name": "checked",
        "arguments": {"model": str(TARGET), "speculative_config": eagle3(draft)},
    }
    variables = {"SPECULATION_SIDECAR": address, "SPECULATION_GRACE_SECONDS": "1"}
    with (
        subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as check,
        job(tmp_path / "engine", [engine], requests, variables),
    ):
        check_output, _ = check.communicate(timeout=500)
    assert check.returncode == 0, check_output
    assert "the contract is kept" in check_output
    assert "eagle3 at 0" in check_output
    assert "a lease that runs out" in check_output
