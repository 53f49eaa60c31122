"""An engine that cannot be steered does not start, and one that can has every length prepared."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.common.errors import HookError, PluginError, UnsupportedEngineError
from engine_shim.vllm.configuration import (
    SteeredConfiguration,
    make_schedule,
    require_schedule,
    unsupported_gammas_reason,
)
from engine_shim.vllm.settings import VllmSettings
from engine_shim.vllm.steered_scheduler import start_hooks


def config(**changes: Any) -> SimpleNamespace:
    """A VllmConfig; changes: by "part.field"."""
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(),
        speculative_config=SimpleNamespace(
            method="eagle3", num_speculative_tokens=7, enable_adaptive_verification=False,
            num_speculative_tokens_per_batch_size=None,
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
    )  # fmt: skip
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(vllm_config, part) if field else vllm_config, field or part, value)
    return vllm_config


def prepare(vllm_config: Any) -> Any:
    SteeredConfiguration(VllmSettings.load()).prepare(vllm_config)
    return vllm_config.speculative_config.num_speculative_tokens_per_batch_size


def lookup(schedule: Any, largest: int) -> list[int]:
    """As vLLM expands a schedule."""
    dense = [0] * (largest + 1)
    for first, last, gamma in schedule:
        for size in range(first, last + 1):
            dense[size] = gamma
    return dense[1:]


@pytest.mark.parametrize("largest", [6, 7, 256])
def test_every_draft_length_is_named_by_the_schedule_and_at_a_large_batch(largest):
    gammas = (0, 1, 2, 3, 5, 7)
    dense = lookup(make_schedule(gammas, largest), largest)
    assert set(dense) == set(gammas)
    widest = {gamma: size for size, gamma in enumerate(dense, start=1)}
    assert min(widest.values()) == largest - len(gammas) + 1
    assert dense == sorted(dense, reverse=True)


def test_a_configuration_gets_the_schedule_and_a_copy_of_it_has_it_already():
    vllm_config = config()
    schedule = prepare(vllm_config)
    assert lookup(schedule, 16)[-6:] == [7, 5, 3, 2, 1, 0]
    assert prepare(vllm_config) == schedule
    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = [
        list(e) for e in schedule
    ]
    prepare(vllm_config)


def test_the_default_lengths_end_at_what_the_engine_can_draft(monkeypatch):
    assert VllmSettings.load().prepared_gammas(3) == (0, 1, 2, 3)
    assert VllmSettings.load().prepared_gammas(4) == (0, 1, 2, 3, 4)
    assert VllmSettings.load().prepared_gammas(9) == (0, 1, 2, 3, 5, 7, 9)
    monkeypatch.setenv("SPECULATION_GAMMAS", "0,3")
    assert VllmSettings.load().prepared_gammas(9) == (0, 3)


def test_what_vllm_makes_for_itself_is_left_alone():
    vllm_config = config(model_config=None, speculative_config=None)
    SteeredConfiguration(VllmSettings.load()).prepare(vllm_config)
    vllm_config = config(model_config=SimpleNamespace(runner_type="draft"), speculative_config=None)
    SteeredConfiguration(VllmSettings.load())._around_post_init(lambda _: None)(vllm_config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculative_config": None}, "there is no --speculative-config"),
        ({"speculative_config__method": "suffix"}, "the speculative method is 'suffix'"),
        ({"speculative_config__enable_adaptive_verification": True}, "enable_adaptive_verific"),
        ({"speculative_config__parallel_drafting": True}, "drafts all tokens in one pass"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"scheduler_config__max_num_seqs": 5}, "max_num_seqs is 5"),
        (
            {"speculative_config__num_speculative_tokens_per_batch_size": [(1, 16, 3)]},
            "exclude each other",
        ),
    ],
)
def test_an_engine_that_cannot_be_steered_is_refused_with_the_reason(changes, reason):
    with pytest.raises(UnsupportedEngineError, match=reason):
        prepare(config(**changes))


@pytest.mark.parametrize(
    ("gammas", "most", "reason"),
    [
        ((0,), 7, "no draft length above 0"),
        ((0, 3), 7, "has to be the largest"),
        ((0, 9), 7, "has to be the largest"),
        ((0, 7), 7, None),
    ],
)
def test_lengths_that_the_engine_cannot_prepare_are_refused(gammas, most, reason):
    refusal = unsupported_gammas_reason(gammas, most, 16)
    assert (refusal is None) if reason is None else (reason in (refusal or ""))


def test_a_schedule_that_vllm_has_removed_is_noticed():
    with pytest.raises(UnsupportedEngineError, match="its log has the"):
        require_schedule(config())


@pytest.mark.parametrize("lookup_table", [None, [0, 7, 7, 3], [0]])
def test_a_scheduler_without_the_prepared_lengths_does_not_start(lookup_table):
    scheduler = SimpleNamespace(vllm_config=config(), dynamic_sd_lookup=lookup_table)
    with pytest.raises(HookError, match="were not prepared"):
        start_hooks(scheduler, VllmSettings.load())


def test_a_bad_setting_is_an_error_of_the_plugin(monkeypatch):
    monkeypatch.setenv("SPECULATION_LOOKUP", "1")  # of SGLang's plugin
    with pytest.raises(PluginError, match="unknown setting SPECULATION_LOOKUP"):
        VllmSettings.load_or_raise()
