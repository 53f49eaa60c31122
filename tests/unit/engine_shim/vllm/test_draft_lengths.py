"""What a draft length changes in an engine of vLLM, by version, model runner and method."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.vllm import vllm_api
from engine_shim.vllm.configuration import METHODS
from engine_shim.vllm.draft_lengths import (
    DRAFT_LENGTH_EFFECTS,
    MULTI_MODULE_MTP,
    DraftLengthEffect,
    ignored_length_warning,
    table_method,
    unread_layers_warning,
)


def config(method: str, runner: int, *, modules: int = 1, **drafter: Any) -> Any:
    """A finished VllmConfig.  drafter: fields of its model's configuration."""
    return SimpleNamespace(
        use_v2_model_runner=runner == 2,
        speculative_config=SimpleNamespace(
            method=method,
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**drafter)),
            use_multi_module_mtp=lambda: modules > 1,
        ),
    )


PAGE = Path(__file__).parents[4] / "docs" / "engines.md"
ROW = re.compile(
    r"^\| (?P<versions>0\.[0-9. to]+) \| (?P<runner>first|second) \| (?P<methods>[^|]+) "
    r"\| (?P<drafting>[^|]+) \| (?P<at_zero>[^|]+) \|$",
    re.MULTILINE,
)


def documented() -> dict[tuple[str, int, str], tuple[str, str]]:
    """What docs/engines.md says of each version, runner and method."""
    versions = list(DRAFT_LENGTH_EFFECTS)
    rows: dict[tuple[str, int, str], tuple[str, str]] = {}
    for row in ROW.finditer(PAGE.read_text(encoding="utf-8")):
        first, *rest = (f"{word}.0" for word in row["versions"].split(" to "))
        last = rest[0] if rest else first
        for version in versions[versions.index(first) : versions.index(last) + 1]:
            for method in re.findall(r"`([^`]+)`", row["methods"]):
                key = version, 1 if row["runner"] == "first" else 2, method
                assert key not in rows
                rows[key] = row["drafting"], row["at_zero"]
    return rows


def test_the_documented_table_is_this_one():
    def describe_row(draft_length: DraftLengthEffect) -> tuple[str, str]:
        return str(draft_length.drafting), str(draft_length.at_zero)

    assert documented() == {
        (version, runner, method): describe_row(draft_length)
        for version, runners in DRAFT_LENGTH_EFFECTS.items()
        for runner, methods in runners.items()
        for method, draft_length in methods.items()
    }


def test_every_version_and_method_is_in_the_table():
    assert sorted(DRAFT_LENGTH_EFFECTS) == sorted({*vllm_api.TESTED, *vllm_api.COMPATIBLE})
    for runners in DRAFT_LENGTH_EFFECTS.values():
        assert runners[1].keys() == {*METHODS, MULTI_MODULE_MTP}
        assert runners[2].keys() <= runners[1].keys()


@pytest.mark.parametrize("version", DRAFT_LENGTH_EFFECTS)
@pytest.mark.parametrize("method", METHODS)
def test_the_first_runner_follows_in_every_version(version, method):
    assert ignored_length_warning(version, config(method, 1, modules=3)) == ""


@pytest.mark.parametrize(
    ("version", "method", "modules", "says"),
    [
        ("0.26.0", "eagle3", 1, ("whatever the draft length is", "V2_MODEL_RUNNER=0", "0.32.0")),
        ("0.31.0", "mtp", 1, ("in every step", "or use vLLM 0.32.0")),
        ("0.31.0", "dflash", 1, ("a whole block with dflash", "or use vLLM 0.33.0")),
        ("0.32.0", "dflash", 1, ("a whole block with dflash", "or use vLLM 0.33.0")),
        ("0.32.0", "mtp", 3, (MULTI_MODULE_MTP, "VLLM_USE_V2_MODEL_RUNNER=0")),
        ("0.33.0", "draft_model", 1, ("draft_model in every step", "VLLM_USE_V2_MODEL_RUNNER=0")),
        ("0.33.0", "ngram", 1, ("ngram in every step",)),
        ("0.31.1", "eagle3", 1, ("vLLM 0.31.1 does", "it is not known")),
        ("0.26.0", "draft_model", 1, ("it is not known",)),
    ],
)
def test_where_drafting_does_not_follow_it_is_said_and_what_to_do(version, method, modules, says):
    advice = ignored_length_warning(version, config(method, 2, modules=modules))
    for words in says:
        assert words in advice


def test_no_newer_version_is_recommended_where_none_follows():
    assert "or take" not in ignored_length_warning("0.32.0", config("draft_model", 2))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_second_runner_follows_with_one_drafter_since_0_32(version, method):
    assert ignored_length_warning(version, config(method, 2)) == ""


def test_a_version_that_does_not_tell_modules_apart_has_one_name_for_both():
    vllm_config = config("mtp", 2, modules=3)
    assert table_method(vllm_config.speculative_config) == MULTI_MODULE_MTP
    del vllm_config.speculative_config.use_multi_module_mtp
    assert table_method(vllm_config.speculative_config) == "mtp"


LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("runner", "drafter", "is_said"),
    [
        (2, {"eagle_config": {LAYERS: [1, 17, 32]}}, True),
        (1, {"eagle_config": {LAYERS: [1, 17, 32]}}, False),
        (2, {"eagle_config": {LAYERS: [1, 17, 32]}, LAYERS: [1, 17, 32]}, False),
        (2, {"eagle_config": {LAYERS: [1, 17, 32], "layer_ids": [1, 17, 32]}}, False),
        (2, {"eagle_config": {}}, False),
        (2, {"eagle_config": None}, False),
        (2, {}, False),
    ],
)
def test_layers_that_the_second_runner_does_not_read_are_named(runner, drafter, is_said):
    unread_text = unread_layers_warning(config("eagle3", runner, **drafter))
    assert ("[1, 17, 32]" in unread_text) is is_said
    assert bool(unread_text) is is_said
