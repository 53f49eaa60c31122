"""What a user may not ask for together with a steered draft length, and what SGLang receives."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.common.checks import require_no_obstacle
from engine_shim.common.errors import PluginError, UnsupportedEngineError
from engine_shim.sglang.api.settings import PluginSettings, load_settings
from engine_shim.sglang.server_args import SteeredConfiguration, requested_flag_checks


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")


def config(**changes: Any) -> Any:
    asked: dict[str, Any] = {
        "speculative_algorithm": "EAGLE3",
        "speculative_adaptive_config": None,
        "speculative_eagle_topk": None,
        "speculative_num_steps": None,
        "speculative_draft_model_path": "draft",
        "speculative_dflash_block_size": None,
        "speculative_draft_window_size": None,
        "enable_custom_logit_processor": False,
    }
    return SimpleNamespace(**asked | changes)


def refuse(asked: Any) -> None:
    require_no_obstacle(requested_flag_checks(asked, load_settings()))


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN", "eagle3", "DFLASH"])
def test_an_ordinary_configuration_is_accepted(algorithm: str) -> None:
    refuse(config(speculative_algorithm=algorithm, speculative_num_steps=3))
    refuse(config(speculative_algorithm=algorithm, speculative_eagle_topk=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_algorithm": None}, "--speculative-algorithm is None"),
        (
            {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": None},
            "DFLASH needs --speculative-draft-model-path",
        ),
        (
            {"speculative_algorithm": "dflash", "speculative_dflash_block_size": 4},
            "--speculative-dflash-block-size is untested",
        ),
        (
            {"speculative_algorithm": "DFLASH", "enable_custom_logit_processor": True},
            "--enable-custom-logit-processor: SGLang applies",
        ),
        ({"speculative_algorithm": "STANDALONE"}, "EAGLE, EAGLE3, NEXTN, DFLASH is needed"),
        ({"speculative_adaptive_config": "a.json"}, "exclude each other"),
        ({"speculative_eagle_topk": 4}, "chains"),
        ({"speculative_num_steps": 4}, "4 is not among SPECULATION_GAMMAS 0,1,2,3,5,7"),
    ],
)
def test_a_conflict_is_refused_and_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=message):
        refuse(config(**changes))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SPECULATION_GAMMAS", "0", "no draft length above 0"),
        ("SPECULATION_SAFE_GAMMA", "4", "SPECULATION_SAFE_GAMMA=4 is not among"),
        ("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "1", "stale"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UnsupportedEngineError, match=message):
        refuse(config())


def test_candidates_do_not_come_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATION_GAMMAS", "0,1,4")
    configuration = SteeredConfiguration(load_settings())
    assert configuration.candidate_steps() == [0, 1, 4]
    assert configuration.candidate_steps(cfg_path="/no/such/file") == [0, 1, 4]


def test_the_plugins_own_settings_are_read_beside_the_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECULATION_SLEEP_POSITIONS", "7")
    monkeypatch.setenv("SPECULATION_ALLOW_UNKNOWN_VERSION", "1")
    settings = load_settings()
    assert isinstance(settings, PluginSettings)
    assert (settings.sleep_positions, settings.allow_unknown_version) == (7, True)


def test_a_misspelt_setting_is_a_plugin_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATION_SLEEP_POSITION", "7")
    with pytest.raises(PluginError, match="SPECULATION_SLEEP_POSITIONS"):
        load_settings()


def test_two_blocks_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATION_DFLASH_MODEL_PATH", "second")
    with pytest.raises(UnsupportedEngineError, match="unset one of them"):
        refuse(config(speculative_algorithm="DFLASH"))
