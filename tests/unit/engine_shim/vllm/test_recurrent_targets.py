"""A target with recurrent layers is refused where vLLM reads the wrong state of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.vllm import vllm_api
from engine_shim.vllm.configuration import SteeredConfiguration, configuration_checks
from engine_shim.vllm.recurrent_targets import corrupts_state, is_recurrent, require_correct_state
from engine_shim.vllm.settings import VllmSettings
from tests.unit.engine_shim.vllm.test_configuration import config


def model(**changes: Any) -> SimpleNamespace:
    """A ModelConfig of a target with attention layers alone, but for the changes."""
    fields = {
        "is_hybrid": False, "is_attention_free": False, "has_inner_state": False,
        "hf_config": SimpleNamespace(),
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


GRANITE_MICRO = SimpleNamespace(layer_types=["attention"] * 4)
OTHER_ATTENTION = ["sliding_attention", "chunked_attention", "indexed_attention", "moe"]
JAMBA = SimpleNamespace(layer_types=["mamba", "attention"])
RECURRENT = [
    model(is_hybrid=True, has_inner_state=True),
    model(is_attention_free=True, has_inner_state=True),
    model(has_inner_state=True),
    model(has_inner_state=True, hf_config=JAMBA),
    # Run by Transformers, whose class in vLLM tells nothing.
    model(hf_config=SimpleNamespace(layer_types=["linear_attention", "full_attention"])),
    model(hf_config=SimpleNamespace(layers_block_type=["recurrent", "recurrent", "attention"])),
    model(hf_text_config=SimpleNamespace(layer_types=["conv", "full_attention"])),
]


@pytest.mark.parametrize("target", RECURRENT)
@pytest.mark.parametrize("gammas", ["0,1,3,7", "1,3,7"])
@pytest.mark.parametrize("version", ["0.26.0", "0.31.0", "0.31.2", "0.32.0rc1", ""])
def test_a_recurrent_target_is_refused_before_0_32(monkeypatch, version, gammas, target):
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: version)
    monkeypatch.setenv("SPECULATION_GAMMAS", gammas)
    with pytest.raises(UnsupportedEngineError, match="39273") as raised:
        SteeredConfiguration(VllmSettings.load()).prepare(config(model_config=target))
    for words in ("silently wrong", version or "unknown version", "Use vLLM 0.32", "unset"):
        assert words in str(raised.value)


@pytest.mark.parametrize("model_type", ["jamba", "mamba", "falcon_mamba"])
@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0"])
def test_a_target_of_mamba_1_is_refused_in_every_version(monkeypatch, version, model_type):
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: version)
    target = model(is_hybrid=True, hf_config=SimpleNamespace(model_type=model_type))
    with pytest.raises(UnsupportedEngineError, match="Mamba-1") as raised:
        SteeredConfiguration(VllmSettings.load()).prepare(config(model_config=target))
    assert "without --speculative-config" in str(raised.value)
    # No version would help.
    assert "or newer" not in str(raised.value)


@pytest.mark.parametrize(
    ("version", "target"),
    [
        ("0.32.0", model(is_hybrid=True, hf_config=SimpleNamespace(model_type="mamba2"))),
        ("0.32.0", RECURRENT[0]),
        ("0.33.0", RECURRENT[1]),
        ("0.31.0", model()),
        ("0.31.0", model(has_inner_state=True, hf_config=GRANITE_MICRO)),
        ("0.31.0", model(hf_text_config=SimpleNamespace(layer_types=OTHER_ATTENTION))),
        ("0.31.0", model(hf_config=SimpleNamespace(layer_types=None))),
    ],
)
def test_another_one_is_not(monkeypatch, version, target):
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: version)
    vllm_config = config(model_config=target)
    assert not [
        check for check in configuration_checks(vllm_config, VllmSettings.load()) if check.obstacle
    ]


def test_the_check_names_what_it_has_found(monkeypatch):
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: "0.32.0")
    topics = {
        check.topic: check.actual
        for check in configuration_checks(config(model_config=RECURRENT[0]), VllmSettings.load())
    }
    assert topics["layers of the target"] == "recurrent"
    assert not is_recurrent(model())


@pytest.mark.parametrize(
    ("version", "loses"),
    [
        ("0.31.9", True), ("0.32.0.dev7", True), ("0.32.0rc2", True), ("0.1.dev1", True),
        ("dev", True), ("0.32.0", False), ("0.32.0.post1", False), ("0.32", False),
        ("0.32.1", False), ("0.100.0", False), ("1.0.0", False),
    ],
)  # fmt: skip
def test_what_comes_before_the_release_that_mends_it_counts_as_older(version, loses):
    assert corrupts_state(version) is loses


class MambaSpec:
    """Named as vLLM's, whose subclasses are the caches of recurrent layers."""


class ShortConvSpec(MambaSpec): ...


class Mamba1Spec(MambaSpec):
    mamba_type = SimpleNamespace(name="MAMBA1")


def caches(*specs: Any) -> SimpleNamespace:
    """A KVCacheConfig with a group for each."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


ATTENTION = SimpleNamespace()
SEVERAL_SIZES = SimpleNamespace(kv_cache_specs={"a": ATTENTION, "b": MambaSpec()})


@pytest.mark.parametrize("spec", [MambaSpec(), ShortConvSpec(), SEVERAL_SIZES])
def test_caches_tell_what_a_configuration_does_not(monkeypatch, spec):
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: "0.31.0")
    with pytest.raises(UnsupportedEngineError, match="recurrent layers"):
        require_correct_state(caches(ATTENTION, spec))
    require_correct_state(caches(ATTENTION))
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: "0.32.0")
    require_correct_state(caches(ATTENTION, spec))


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_caches_tell_layers_of_mamba_1(monkeypatch, version):
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: version)
    with pytest.raises(UnsupportedEngineError, match="Mamba-1"):
        require_correct_state(caches(ATTENTION, Mamba1Spec()))
