"""Models of the architectures that people serve, with their real structure at a small width.

`architectures.json` has what each config has beside its sizes; the weights are random.
docs/engines.md lists what is known about each architecture.  By default three
run, which between them have latent attention, experts and recurrent layers; the others:

    ARCHITECTURES=llama,gemma3,qwen3_moe,qwen3_next \\
        make test ARGS=tests/system/engine/test_engine_architectures.py
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.harness.scripted_sidecar import Arm, ScriptedSidecar, scripted_sidecar
from tests.support.engine import EngineProcess, install_plugin, running_engine
from tests.support.eventually import eventually
from tests.support.prompts_in_flight import PLAYS_MAX

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("architectures.json").read_text()
)
NAMES = os.environ.get("ARCHITECTURES", "deepseek_v3,glm4_moe,qwen3_5").split(",")
VOCABULARY = 96
LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
BLOCK_MODEL = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "tie_word_embeddings": False,
    "block_size": 8,
    # The last of four too, whose output most of these models do not emit by themselves.
    "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": VOCABULARY - 1},
}
EAGLE3_MODEL = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "draft_vocab_size": VOCABULARY,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
# Targets with layers that keep a recurrent state, for which SGLang caches no prefixes on a CPU.
HYBRID = {"qwen3_next", "qwen3_5"}
# Targets without a predictor of their own.
WITH_EAGLE3 = {"llama", "gemma3"}
GAMMAS = (0, 1, 3, 5, 7)
ARMS: list[Arm] = [
    *((gamma, False, which) for gamma in GAMMAS for which in (0, 1)),
    (0, True, 0),
    (0, True, 0),
]
LENGTHS = [64, 40, 80, 56]


def prompts() -> list[list[int]]:
    choose = random.Random(2)
    return [[choose.randrange(VOCABULARY) for _ in range(12 + 5 * i)] for i in range(len(LENGTHS))]


def written(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | config))
    return str(folder)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    architecture: str = request.param
    return architecture


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(name)


@pytest.fixture(scope="module")
def target(name: str, folder: Path) -> tuple[str, ...]:
    model = written(folder / "target", CONFIGS[name])
    options = ("--model-path", model, "--load-format", "dummy", "--skip-tokenizer-init")
    return (*options, "--disable-radix-cache") if name in HYBRID else options


@pytest.fixture(scope="module")
def plugins(folder: Path) -> dict[str, str]:
    plugin = "tests.system.engine.random_weights:replace_dummies"
    return {"PYTHONPATH": str(install_plugin(folder / "plugins", plugin, name="random_weights"))}


@pytest.fixture(scope="module")
def plain(folder: Path, target: tuple[str, ...], plugins: dict[str, str]) -> list[list[int]]:
    (folder / "plain").mkdir()
    with running_engine(folder / "plain", target, plugins) as engine:
        return [answer.tokens for answer in engine.generate(prompts(), LENGTHS)]


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[ScriptedSidecar]:
    with scripted_sidecar(folder) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def engine(
    name: str,
    folder: Path,
    target: tuple[str, ...],
    plugins: dict[str, str],
    sidecar: ScriptedSidecar,
) -> Iterator[EngineProcess]:
    chains = ("EAGLE3", written(folder / "eagle3", EAGLE3_MODEL))
    if name not in WITH_EAGLE3:
        chains = ("NEXTN", str(folder / "target"))
    variables = {
        **sidecar.variables,
        **plugins,
        "SPECULATION_DFLASH_MODEL_PATH": written(folder / "dflash", BLOCK_MODEL),
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
        "SPECULATION_SLEEP_POSITIONS": "12",
    }
    flags = ("--speculative-algorithm", chains[0], "--speculative-draft-model-path", chains[1])
    (folder / "steered").mkdir()
    with running_engine(folder / "steered", [*target, *flags], variables) as running:
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        yield running


def test_any_order_of_arms_of_both_drafters_is_exact(
    name: str, engine: EngineProcess, sidecar: ScriptedSidecar, plain: list[list[int]]
) -> None:
    assert len(sidecar.introductions[0].drafters) == 2
    choose = random.Random(7)
    before = sidecar.run(lambda _: choose.choice(ARMS))
    ran: set[tuple[str, int]] = set()
    accepted = 0
    wanted = 2 * (len(GAMMAS) - 1) + 1
    for _ in range(PLAYS_MAX):
        answers = engine.generate(prompts(), LENGTHS)
        assert [answer.tokens for answer in answers] == plain
        accepted += sum(answer.meta["spec_num_correct_drafts"] for answer in answers)
        reports = sidecar.reports[before:]
        ran = {(report.drafter if report.gamma else "", report.gamma) for report in reports}
        # A random EAGLE3 or DFlash drafter is right by chance only.
        drafts_well = accepted > 50 or name in WITH_EAGLE3
        if len(ran) == wanted and len(reports) >= 50 and drafts_well:
            break
    else:
        pytest.fail(f"of {wanted} arms only {sorted(ran)} ran, and {accepted} drafts were accepted")
    # Tokens that are all alike would show nothing.
    assert min(len(set(tokens)) for tokens in plain) > 3
