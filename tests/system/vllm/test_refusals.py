"""The real vLLM does not start half steered: it says why, or has every draft length prepared."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.vllm_engine.environment import PYTHON
from tests.support.engine import TARGET
from tests.support.vllm_engine import environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = "0,1,3,7"
REASONS = {
    "plain": "UnsupportedEngineError: SPECULATION_SIDECAR is set, but there is no --speculative-c",
    "data parallel": "data_parallel_size is 2",
    "suffix": "suffix",
    "shorter": "num_speculative_tokens is 5",
    "own schedule": "exclude each other",
    "few sequences": "max_num_seqs is 2",
}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given: Mapping[str, str] = {"SPECULATION_SIDECAR": "unix:/nowhere", **variables}
    return subprocess.run(
        [str(PYTHON), *command],
        env=environment(given),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def said(draft: Path) -> dict[str, str]:
    """What each configuration came to."""
    script = Path(__file__).with_name("refused_engines.py")
    done = run(str(script), str(TARGET), str(draft), SPECULATION_GAMMAS=GAMMAS)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SAID "))
    found: dict[str, str] = json.loads(line.removeprefix("SAID "))
    return found


@pytest.mark.parametrize("case", REASONS)
def test_an_engine_that_cannot_be_steered_is_refused_with_the_reason(
    said: dict[str, str], case: str
) -> None:
    assert REASONS[case] in said[case]


def test_another_one_has_every_length_prepared(said: dict[str, str]) -> None:
    assert json.loads(said["steered"]) == [[1, 13, 7], [14, 14, 3], [15, 15, 1], [16, 16, 0]]


# vLLM logs an error of a plugin's import and goes on; this one's import cannot fail, and the rest
# of it is imported where an error counts.
BROKEN = """
import sys
sys.modules["engine_shim.vllm.steered_scheduler"] = None
sys.modules["engine_shim.vllm.configuration"] = None
from vllm.plugins import load_general_plugins
load_general_plugins()
print("it goes on")
"""


def test_an_import_error_inside_the_plugin_ends_the_start() -> None:
    done = run("-c", BROKEN)
    assert done.returncode != 0
    assert "it goes on" not in done.stdout
    assert "speculation-controller: the engine does not start: ModuleNotFoundError" in done.stderr


TWICE = """
from engine_shim.vllm.plugin import register
import vllm.v1.spec_decode.dflash
import vllm.v1.spec_decode.ngram_proposer
register()
from vllm.config import VllmConfig
hooked = VllmConfig.__post_init__
register()
assert VllmConfig.__post_init__ is hooked
print("it goes on")
"""


def test_a_process_may_load_the_plugin_twice() -> None:
    done = run("-c", TWICE)
    assert done.stdout.strip().endswith("it goes on"), done.stderr[-2000:]


def test_without_a_sidecar_nothing_is_hooked() -> None:
    done = run("-c", BROKEN, SPECULATION_SIDECAR="")
    assert done.stdout.strip().endswith("it goes on"), done.stderr[-2000:]
