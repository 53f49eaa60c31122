"""Which layers of a target a DFlash checkpoint reads, beside SGLang's own answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.drafter_configurations import write_configurations
from tests.support.engine import fork_engine

pytestmark = [pytest.mark.slow]

PROBE = "tests.unit.engine_shim.sglang.drafters.layers_probe"
PATIENCE_SECONDS = 120.0
# A target of 32 layers that run twice, and one of 36 that run once.
PAIRS = {
    ("looped", "dflash-unnamed-layers"): (64, [1, 16, 31, 46, 61]),
    ("looped", "dflash-second-loop"): (64, [1, 20, 40]),
    ("qwen3", "dflash-unnamed-layers"): (36, [1, 9, 17, 25, 33]),
}
REFUSED = ("looped", "dflash-third-loop")


@pytest.fixture(scope="module")
def layer_results(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("layers")
    write_configurations(folder)
    pairs = [*PAIRS, REFUSED]
    asked = [[str(folder / name) for name in pair] for pair in pairs]
    folder.joinpath("asked.json").write_text(json.dumps(asked))
    probe = fork_engine(PROBE, ["asked.json", "found.json"], folder, {}, folder / "log")
    assert probe.wait(PATIENCE_SECONDS) == 0, folder.joinpath("log").read_text()[-4000:]
    results = json.loads(folder.joinpath("found.json").read_text())
    return dict(zip(pairs, results, strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_target_emits_the_layers_that_sglang_would_have_it_emit(
    layer_results: dict[tuple[str, str], dict[str, Any]], pair: tuple[str, str]
) -> None:
    count, layers = PAIRS[pair]
    assert layer_results[pair] == {"count": count, "plugin": layers, "sglang": layers}


def test_a_layer_behind_the_last_loop_is_refused(
    layer_results: dict[tuple[str, str], dict[str, Any]],
) -> None:
    refusals = layer_results[REFUSED]
    assert refusals["sglang"].startswith("ValueError: ")
    assert refusals["plugin"].startswith("UnsupportedEngineError: ")
    assert refusals["plugin"].endswith("target_layer_ids name layer 64, and the target has 64")
