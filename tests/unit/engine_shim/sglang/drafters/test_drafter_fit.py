"""The pre-flight check of drafters, on SGLang's own reading of configurations as people have them.

What SGLang does with each of the refused ones was tried on engines with small models.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from engine_shim.sglang.training.drafter_config import EAGLE_LAYERS
from lab.cpu_engine.engine_command import SHALLOW
from tests.support.drafter_configurations import write_configurations
from tests.support.engine import fork_engine
from tests.system.engine.test_engine_architectures import CONFIGS as ARCHITECTURES
from tests.system.engine.test_engine_architectures import SIZES

pytestmark = [pytest.mark.slow]

PROBE = "tests.unit.engine_shim.sglang.drafters.fit_probe"
PATIENCE_SECONDS = 240.0
# Target, algorithm, drafter, DFlash drafter beside that.
Engine = tuple[str, ...]
# Targets with a predictor of their own.
PREDICTING = ("deepseek_v3", "glm4_moe")

ACCEPTED: list[Engine] = [
    ("qwen3", "EAGLE3", "eagle3"),
    ("qwen3", "EAGLE3", "eagle3-layers"),
    ("qwen3", "EAGLE3", "eagle3-no-layers-named"),
    ("qwen3", "EAGLE3", "eagle3-last-state"),
    ("qwen3", "EAGLE", "eagle3-last-state"),
    ("qwen3", "EAGLE3", "eagle3-padded"),
    ("qwen3", "EAGLE3", "eagle3-narrower"),
    ("llama", "EAGLE3", "eagle3-llama"),
    ("llama", "EAGLE", "eagle"),
    ("qwen3", "EAGLE", "eagle-qwen2"),
    ("mimo", "NEXTN", ""),
    ("mimo", "EAGLE", "mimo"),
    ("qwen3", "DFLASH", "dflash"),
    ("qwen3", "DFLASH", "dflash-nested"),
    ("looped", "DFLASH", "dflash-second-loop"),
    ("qwen3", "DFLASH", "dflash-window"),
    ("qwen3", "DFLASH", "dflash-domino"),
    ("qwen3", "DFLASH", "dflash2"),
    ("qwen3", "DFLASH", "dflash-muse"),
    *((name, "NEXTN", "") for name in PREDICTING),
    ("shallow-target", "EAGLE3", "shallow-sd2"),
    ("shallow-target", "EAGLE3", "shallow-sd2-llama"),
]
# An engine with it starts and serves, and gains nothing.
GAINS_NOTHING: list[tuple[Engine, str]] = [
    (("qwen3", "EAGLE", "eagle3"), "which under EAGLE reads the wrong hidden states"),
    (("qwen3", "NEXTN", ""), "the target has no predictor that SGLang knows"),
    (("qwen3", "NEXTN", "qwen3"), "the target has no predictor that SGLang knows"),
    (("mimo-without-predictor", "NEXTN", ""), "says that it has no predictor"),
    (("qwen3", "EAGLE3", "eagle3-other-vocabulary"), "128256 tokens, and the target's 151936"),
    (("llama", "EAGLE", "eagle3-as-published"), "write LlamaForCausalLMEagle3"),
    (("qwen3", "EAGLE3", "eagle3-deep"), "names 36 layers, and the target has 36"),
    (("qwen3", "DFLASH", "dflash-other-vocabulary"), "128256 tokens, and the target's 151936"),
]
REFUSED: list[tuple[Engine, str]] = [
    (("llama", "EAGLE3", "eagle"), "EAGLE drafts with LlamaForCausalLMEagle: set"),
    (("llama", "EAGLE3", "eagle-as-published"), "LlamaForCausalLM is a language model"),
    (("qwen3", "EAGLE3", ""), "Qwen3ForCausalLM itself would draft"),
    (("mimo", "EAGLE3", "eagle3"), "MiMoForCausalLM does not emit the hidden states"),
    (("mixtral", "EAGLE", "eagle"), "MixtralForCausalLM does not share its embedding"),
    (("qwen3", "EAGLE3", "eagle3-other-width"), "of 8192 numbers, and the target's have 4096"),
    (("llama", "EAGLE", "eagle-wide"), "of 8192 numbers, and the target's have 4096"),
    (("qwen3", "EAGLE3", "eagle3-many-drafts"), "it drafts 200000 tokens"),
    (("qwen3", "EAGLE3", "eagle3-no-draft-vocabulary"), "has no draft_vocab_size"),
    (("qwen3", "EAGLE3", "eagle3-absent-layers"), "layers [1, 17, 40]"),
    (("qwen3", "EAGLE3", "eagle3-two-layers"), "it reads 3 hidden states"),
    (("qwen3", "EAGLE3", "eagle3-short"), "shorter than the target's 40960 tokens"),
    (("qwen3", "EAGLE3", "unknown-class"), "SGLang has no class LlamaForCausalLMEagle4"),
    (("qwen3", "EAGLE3", "dflash"), "DFLASH drafts with DFlashDraftModel: set"),
    (("qwen3", "EAGLE3", "eagle3", "no-model-type"), "cannot be read: ValueError: Unrecognized"),
    (("qwen3", "EAGLE3", "eagle3", "empty"), "cannot be read: ValueError: Unrecognized"),
    (("shallow-target", "EAGLE", "shallow-sd2"), "EAGLE does not run an SD2 drafter"),
    (("shallow-target", "EAGLE3", "sd2-unnamed"), f"has no {EAGLE_LAYERS} in its eagle_config"),
    (("shallow-target", "EAGLE3", "sd2-none"), f"has no {EAGLE_LAYERS} in its eagle_config"),
    (("llama", "EAGLE3", "eagle3-as-published"), "write LlamaForCausalLMEagle3"),
    (("qwen3", "EAGLE3", "peagle-inside"), "it is a P-EAGLE drafter: use"),
    (("qwen3", "EAGLE3", "peagle"), "it is a P-EAGLE drafter: use"),
    (("qwen3", "EAGLE3", "medusa"), "it is a set of Medusa heads: use"),
    (("qwen3", "EAGLE3", "speculators"), "which SGLang does not read: use the same"),
    (("qwen3", "EAGLE", "pard"), "it is a PARD drafter: use"),
    (("qwen3", "STANDALONE", "pard"), "it is a PARD drafter: use"),
    (("qwen3", "DFLASH", "dspark"), "dspark is not a DFlash checkpoint"),
    (("qwen3", "DFLASH", "eagle3"), "eagle3 is not a DFlash checkpoint"),
    (("qwen3", "DFLASH", "dflash-unknown"), "SGLang has no class DFlash9DraftModel"),
    (("qwen3", "DFLASH", "dflash-other-width"), "of 2048 numbers, and the target's have 4096"),
    (("qwen3", "DFLASH", "dflash-absent-layers"), "target_layer_ids[4]=40"),
    (("looped", "DFLASH", "dflash-third-loop"), "target_layer_ids[2]=64"),
    (("qwen3", "DFLASH", "dflash-absent-mask"), "its mask_token_id is 151936"),
    (("qwen3", "DFLASH", "dflash-lilicorr"), "a LiLiCorr head is untested"),
    (("qwen3", "DFLASH", "dflash2-small-vocabulary"), "which its selector has no rows for"),
]
UNREADABLE: list[tuple[Engine, str]] = [
    (("qwen3", "EAGLE3", "a-list"), "a-list/config.json is not a JSON object"),
    (("qwen3", "EAGLE3", "a-number"), "a-number/config.json is not a JSON object"),
    (("qwen3", "EAGLE3", "no-json"), "no-json/config.json cannot be read"),
    (("qwen3", "EAGLE3", "not-text"), "not-text/config.json cannot be read"),
    (("qwen3", "EAGLE3", "empty"), "SGLang refuses these flags itself"),
    (("qwen3", "EAGLE3", "missing"), "SGLang refuses these flags itself"),
    (("qwen3", "EAGLE3", "text-for-a-number"), "hidden_size"),
    (("a-list", "EAGLE3", "eagle3"), "SGLang refuses these flags itself"),
    (("no-json", "EAGLE3", "eagle3"), "SGLang refuses these flags itself"),
]


def _engines() -> list[Engine]:
    listed = [engine for cases in (GAINS_NOTHING, REFUSED, UNREADABLE) for engine, _ in cases]
    return list(dict.fromkeys([*ACCEPTED, ("llama", "EAGLE", "eagle-as-published"), *listed]))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[Engine, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("drafters")
    write_configurations(folder)
    for name in PREDICTING:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(SIZES | ARCHITECTURES[name]))
    config = json.loads(SHALLOW.joinpath("sd2", "config.json").read_text())
    unnamed: dict[str, dict[str, list[int]]] = {"sd2-unnamed": {}, "sd2-none": {EAGLE_LAYERS: []}}
    for name, own in unnamed.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | {"eagle_config": own}))
    for name in ("target", "sd2", "sd2-llama"):
        (folder / f"shallow-{name}").symlink_to(SHALLOW / name)
    asked = []
    for target, algorithm, drafter, *dflash_drafters in _engines():
        flags = ["--model-path", str(folder / target), "--speculative-algorithm", algorithm]
        if drafter:
            flags += ["--speculative-draft-model-path", str(folder / drafter)]
        second = {}
        if dflash_drafters:
            second["SPECULATION_DFLASH_MODEL_PATH"] = str(folder / dflash_drafters[0])
        asked.append([second, [*flags, "--device", "cpu"]])
    folder.joinpath("asked.json").write_text(json.dumps(asked))
    variables = {"SPECULATION_SIDECAR": "unix:/nowhere", "SPECULATION_GAMMAS": "0,1,3,7,15"}
    log = folder / "log"
    probe = fork_engine(PROBE, ["asked.json", "found.json"], folder, variables, log)
    assert probe.wait(PATIENCE_SECONDS) == 0, log.read_text()[-4000:]
    results = json.loads(folder.joinpath("found.json").read_text())
    return dict(zip(_engines(), results, strict=True))


def _obstacles(document: dict[str, Any]) -> list[dict[str, Any]]:
    assert "error" not in document, document
    return [check for check in document["checks"] if check["obstacle"]]


@pytest.mark.parametrize("engine", ACCEPTED, ids="-".join)
def test_what_works_is_accepted(verdicts: dict[Engine, dict[str, Any]], engine: Engine) -> None:
    assert _obstacles(verdicts[engine]) == []
    assert not any(check["advice"] for check in verdicts[engine]["checks"])


@pytest.mark.parametrize(("engine", "says"), GAINS_NOTHING, ids=str)
def test_what_runs_without_a_gain_is_refused_here_and_starts(
    verdicts: dict[Engine, dict[str, Any]], engine: Engine, says: str
) -> None:
    (check,) = _obstacles(verdicts[engine])
    assert says in check["obstacle"]
    assert check["starts"]


@pytest.mark.parametrize(("engine", "says"), REFUSED, ids=str)
def test_what_cannot_be_loaded_or_steered_is_refused(
    verdicts: dict[Engine, dict[str, Any]], engine: Engine, says: str
) -> None:
    obstacles = _obstacles(verdicts[engine])
    assert says in obstacles[-1]["obstacle"]
    assert not obstacles[-1]["starts"]
    # STANDALONE is refused as well.
    assert len(obstacles) == 1 + (engine[1] == "STANDALONE")


@pytest.mark.parametrize(("engine", "says"), UNREADABLE, ids=str)
def test_what_cannot_be_read_is_bad_input(
    verdicts: dict[Engine, dict[str, Any]], engine: Engine, says: str
) -> None:
    assert says in verdicts[engine].get("error", "it was read")


def test_an_eagle_checkpoint_under_another_name_is_pointed_out(
    verdicts: dict[Engine, dict[str, Any]],
) -> None:
    document = verdicts[("llama", "EAGLE", "eagle-as-published")]
    assert document["would_be_steered"]
    (advice,) = [check["advice"] for check in document["checks"] if check["advice"]]
    assert "write LlamaForCausalLMEagle into the architectures" in advice
