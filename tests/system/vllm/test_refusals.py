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
    "several at once": "the drafter drafts all tokens in one pass (parallel_drafting with 'draft_m",
    "hybrid, older": "the target has recurrent layers, and vLLM 0.31.0 reads the wrong recurrent",
    "attention-free, older": "the target has recurrent layers, and vLLM 0.31.0 reads the wrong rec",
    "mamba-1": "the target has layers of Mamba-1",
    "mamba-1, older": "the target has layers of Mamba-1, and vLLM 0.31.0 does not tell them",
}
OLDER = "0.31.0"
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "max_position_embeddings": 2048, "torch_dtype": "float32",
}  # fmt: skip
HYBRID: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
ATTENTION_FREE: dict[str, object] = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "state_size": 8,
    "conv_kernel": 4, "num_heads": 4, "head_dim": 32, "n_groups": 1, "chunk_size": 256,
}  # fmt: skip
MAMBA_1: dict[str, object] = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 8,
    "conv_kernel": 4, "time_step_rank": 4,
}  # fmt: skip


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    all_variables: Mapping[str, str] = {"SPECULATION_SIDECAR": "unix:/nowhere", **variables}
    return subprocess.run(
        [str(PYTHON), *command],
        env=environment(all_variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations of small targets with recurrent layers, by name."""
    folder = tmp_path_factory.mktemp("recurrent")
    targets = {"hybrid": HYBRID, "attention-free": ATTENTION_FREE, "mamba-1": MAMBA_1}
    for name, config in targets.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(SIZES | config))
    return folder


@pytest.fixture(scope="module")
def outcomes(draft: Path, recurrent: Path) -> dict[str, str]:
    """What each configuration came to."""
    script = Path(__file__).with_name("refused_engines.py")
    folders = str(TARGET), str(draft), str(recurrent)
    done = run(str(script), *folders, OLDER, SPECULATION_GAMMAS=GAMMAS)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SAID "))
    outcome_by_case: dict[str, str] = json.loads(line.removeprefix("SAID "))
    return outcome_by_case


@pytest.mark.parametrize("case", REASONS)
def test_an_engine_that_cannot_be_steered_is_refused_with_the_reason(
    outcomes: dict[str, str], case: str
) -> None:
    assert REASONS[case] in outcomes[case]


@pytest.mark.parametrize("case", ["steered", "hybrid", "attention-free"])
def test_another_one_has_every_length_prepared(outcomes: dict[str, str], case: str) -> None:
    assert json.loads(outcomes[case]) == [[1, 13, 7], [14, 14, 3], [15, 15, 1], [16, 16, 0]]


# vLLM logs an error of a plugin's import and continues; this one's import cannot fail, and the rest
# of it is imported where an error counts.
BROKEN = """
import sys
sys.modules["engine_shim.vllm.steered_scheduler"] = None
sys.modules["engine_shim.vllm.configuration"] = None
from vllm.plugins import load_general_plugins
load_general_plugins()
print("it continues")
"""


def test_an_import_error_inside_the_plugin_ends_the_start() -> None:
    done = run("-c", BROKEN)
    assert done.returncode != 0
    assert "it continues" not in done.stdout
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
print("it continues")
"""


def test_a_process_may_load_the_plugin_twice() -> None:
    done = run("-c", TWICE)
    assert done.stdout.strip().endswith("it continues"), done.stderr[-2000:]


def test_without_a_sidecar_nothing_is_hooked() -> None:
    done = run("-c", BROKEN, SPECULATION_SIDECAR="")
    assert done.stdout.strip().endswith("it continues"), done.stderr[-2000:]
