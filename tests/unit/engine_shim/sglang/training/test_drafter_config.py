"""What only drafters have in their configs is read as SGLang's own functions read it.

SGLang's functions run here from its source, each alone, so that no engine has to be imported.
"""

import __future__

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from transformers import AutoConfig

from engine_shim.sglang.api.versions import sglang_version
from engine_shim.sglang.training.drafter_config import (
    DEFAULT_MASK_TEXT,
    EAGLE_LAYERS,
    DFlashConfig,
    DrafterConfigError,
    architectures,
    read_dflash,
    read_eagle3,
)
from tests.support.installed_wheel import Wheel

UTILS = "sglang.srt.speculative.dflash_utils"
CAPTURE = "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state"
WIDTH = "sglang.srt.speculative.eagle_utils.get_draft_input_from_target_hidden_dim"
HIDDEN = 64
TARGET_LAYERS = 36


@cache
def sglang() -> Wheel:
    return Wheel(sglang_version())


def executed(nodes: list[ast.stmt], **names: Any) -> dict[str, Any]:
    """The names that definitions of SGLang's have, run beside nothing but ``names``."""
    code = compile(
        ast.Module(nodes, []), "<SGLang>", "exec", flags=__future__.annotations.compiler_flag
    )
    exec(code, names)
    return names


@cache
def parsed_by_sglang() -> Any:
    wanted = (
        "build_target_layer_ids",
        "_cfg_get",
        "_get_text_config",
        "_get_dflash_config",
        "_parse_optional_int",
        "DFlashDraftConfig",
        "parse_dflash_draft_config",
    )
    nodes: list[ast.stmt] = [sglang().definition(f"{UTILS}.{name}") for name in wanted]
    names = executed(
        nodes, dataclass=dataclass, Integral=Integral, DEFAULT_DFLASH_MASK_TOKEN=DEFAULT_MASK_TEXT
    )
    return names["parse_dflash_draft_config"]


class Form(NamedTuple):
    """A config as SGLang has it, and as the reader gets it."""

    theirs: Any
    ours: Mapping[str, Any]


def forms(config: dict[str, Any]) -> list[Form]:
    """A folder's config.json, and what transformers makes of it."""
    fields = {"model_type": "qwen3", **config}
    sglang_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return [Form(config, config), Form(sglang_config, sglang_config.to_dict())]


IDS = [1, 9, 17, 25, 33]
DFLASH: dict[str, dict[str, Any]] = {
    "as published": {
        "block_size": 16,
        "num_target_layers": 36,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": IDS},
    },
    "block inside": {"dflash_config": {"block_size": 8, "mask_token_id": 3}},
    "block at both places": {"block_size": 16, "dflash_config": {"block_size": 8}},
    "a null inside": {"block_size": 8, "dflash_config": {"block_size": None}},
    "all beside": {
        "block_size": 10,
        "num_target_layers": 36,
        "target_layer_ids": IDS,
        "mask_token_id": 7,
        "mask_token": "<mask>",
    },
    "all inside": {
        "dflash_config": {
            "block_size": 10,
            "num_target_layers": 36,
            "target_layer_ids": IDS,
            "mask_token_id": 7,
            "mask_token": "<mask>",
        }
    },
    "different ones": {
        "block_size": 4,
        "num_target_layers": 24,
        "target_layer_ids": [0, 1],
        "mask_token_id": 1,
        "dflash_config": {
            "block_size": 10,
            "num_target_layers": 36,
            "target_layer_ids": IDS,
            "mask_token_id": 7,
        },
    },
    "nothing": {},
    "null": {"dflash_config": None, "block_size": None, "target_layer_ids": None},
    "of another type": {"dflash_config": [], "block_size": 4},
    "of pairs": {"dflash_config": [["block_size", 4]]},
    "of a text": {"dflash_config": "abc"},
    "a block in text": {"block_size": "8"},
    "one layer": {"num_hidden_layers": 1},
    "many layers": {"num_hidden_layers": 12},
    "ids out of range": {"target_layer_ids": [1, 36]},
    "ids below": {"target_layer_ids": [-1, 3]},
    "ids that descend": {"target_layer_ids": [9, 1]},
    "ids as text": {"target_layer_ids": ["3", 4.0]},
    "no ids": {"target_layer_ids": []},
    "ids of another type": {"dflash_config": {"target_layer_ids": 3}},
    "ids that are not integers": {"dflash_config": {"target_layer_ids": [None]}},
    "no block": {"block_size": 0},
    "a block of words": {"block_size": "many"},
    "layers below": {"num_target_layers": 0},
    "a mask below": {"mask_token_id": -1},
    "a mask that is a flag": {"dflash_config": {"mask_token_id": True}},
    "a mask in text": {"dflash_config": {"mask_token_id": "7"}},
    "a mask without text": {"dflash_config": {"mask_token": ""}},
    "a mask of another type": {"mask_token": 7},
}


def read_or_refused(read: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return read(*arguments, **named)
    except (TypeError, ValueError):
        return None


def as_ours(sglang_config: Any) -> DFlashConfig | None:
    if sglang_config is None:
        return None
    ids = sglang_config.target_layer_ids
    return DFlashConfig(
        block=sglang_config.resolve_block_size(default=16),
        layers=sglang_config.num_hidden_layers,
        target_layers=sglang_config.num_target_layers,
        named_layers=None if ids is None else tuple(ids),
        mask_token=sglang_config.mask_token,
        mask_id=sglang_config.mask_token_id,
    )


@pytest.mark.parametrize("name", sorted(DFLASH))
def test_a_block_drafters_config_is_read_as_sglang_reads_it(name: str) -> None:
    for theirs, ours in forms({"num_hidden_layers": 5} | DFLASH[name]):
        expected = read_or_refused(parsed_by_sglang(), draft_hf_config=theirs)
        dflash_config = read_or_refused(read_dflash, ours)
        assert dflash_config == as_ours(expected)
        if expected is None:
            continue
        for layers in (TARGET_LAYERS, 24, 4, 3):
            resolved = read_or_refused(expected.resolve_target_layer_ids, target_num_layers=layers)
            chosen = read_or_refused(dflash_config.feature_layers, layers)
            assert chosen == (None if resolved is None else tuple(resolved)), layers


def test_the_table_has_configs_of_both_kinds() -> None:
    block_configs = [
        read_or_refused(read_dflash, {"num_hidden_layers": 5} | one) for one in DFLASH.values()
    ]
    assert sum(one is None for one in block_configs) == 11
    assert {one.block for one in block_configs if one} == {4, 8, 10, 16}


def test_the_layers_of_a_text_model_are_read() -> None:
    config = {"block_size": 8, "num_hidden_layers": 9, "text_config": {"num_hidden_layers": 3}}
    expected = parsed_by_sglang()(draft_hf_config=config)
    assert read_dflash(config) == as_ours(expected)
    assert expected.num_hidden_layers == 3


EAGLE3: dict[str, dict[str, Any]] = {
    "nothing": {},
    "null": {"eagle_config": None, "num_aux_hidden_states": None},
    "inside": {"eagle_config": {EAGLE_LAYERS: [1, 17, 32]}},
    "inside, of two": {"eagle_config": {EAGLE_LAYERS: [1, 17]}},
    "beside": {EAGLE_LAYERS: [1, 17, 32]},
    "at both places": {EAGLE_LAYERS: [0, 1, 2], "eagle_config": {EAGLE_LAYERS: [1, 17, 32]}},
    "empty inside": {"eagle_config": {EAGLE_LAYERS: []}},
    "other fields inside": {"eagle_config": {"use_aux_hidden_state": True}},
    "the last hidden state": {"eagle_config": {"use_aux_hidden_state": False}},
    "a number of them": {"num_aux_hidden_states": 4},
    "a number beside layers": {
        "num_aux_hidden_states": 2,
        "eagle_config": {EAGLE_LAYERS: [1, 17, 32]},
    },
    "another width": {"target_hidden_size": 32},
    "norms": {"norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "norms inside": {"eagle_config": {"norm_before_fc": True}, "use_aux_norm": True},
    "a norm off inside": {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
}


def captured_by_sglang(config: Any) -> tuple[bool, Any]:
    """Whether a target emits hidden states for this drafter, and those of which layers."""
    draft = SimpleNamespace(
        hf_config=config,
        num_nextn_predict_layers=None,
        num_hidden_layers=1,
        num_attention_layers=1,
        is_hybrid_swa=False,
    )
    spec = SimpleNamespace(
        speculative_draft_model_path="draft", speculative_draft_model_revision=None
    )
    names = executed(
        [sglang().definition(f"{CAPTURE}._resolve_eagle_aux_hidden_state")],
        get_spec=lambda: spec,
        ModelConfig=SimpleNamespace(from_server_args=lambda *_, **__: draft),
    )
    aux_config = SimpleNamespace(draft_kv_num_layers=None)
    names["_resolve_eagle_aux_hidden_state"](
        config=aux_config,
        server_args=None,
        model_config=None,
        spec_algorithm=SimpleNamespace(is_eagle=lambda: True, is_eagle3=lambda: True),
        is_draft_worker=False,
    )
    return aux_config.eagle_use_aux_hidden_state, aux_config.eagle_aux_hidden_state_layer_ids


def made_by_sglang(config: Any) -> Any:
    """What the constructor of SGLang's `LlamaModel` reads of it: sizes of `fc`, and norms."""
    whole = sglang().definition("sglang.srt.models.llama_eagle3.LlamaModel.__init__")
    wanted = ("hidden_size_in", "num_aux_hidden_states", "norm_before_fc", "norm_output")
    locals_ = ("eagle_config", "use_fc_norm")

    def is_wanted(node: ast.stmt) -> bool:
        targets = [one for child in ast.walk(node) if isinstance(child, ast.Assign)
                   for one in child.targets]  # fmt: skip
        names = {one.attr for one in targets if isinstance(one, ast.Attribute)}
        names |= {one.id for one in targets if isinstance(one, ast.Name)}
        return bool(names) and names <= {*wanted, *locals_, "layer_ids"}

    llama_model = SimpleNamespace()
    names = executed(
        [node for node in whole.body if is_wanted(node)], self=llama_model, config=config
    )
    llama_model.fc_norm = bool(names["use_fc_norm"])
    return llama_model


@pytest.mark.parametrize("name", sorted(EAGLE3))
def test_an_eagle3_drafters_config_is_read_as_sglang_reads_it(name: str) -> None:
    config = {"model_type": "llama", "hidden_size": HIDDEN} | EAGLE3[name]
    ((_, raw), (theirs, ours)) = forms(config)
    eagle3_config = read_eagle3(ours)
    assert read_eagle3(raw) == eagle3_config
    uses, layers = captured_by_sglang(theirs)
    assert (eagle3_config.uses_features, eagle3_config.captured_layers) == (
        uses,
        None if layers is None else tuple(layers),
    )
    sglang_model = made_by_sglang(theirs)
    assert (eagle3_config.target_width, eagle3_config.features) == (
        sglang_model.hidden_size_in,
        sglang_model.num_aux_hidden_states,
    )
    assert (eagle3_config.norm_before_fc, eagle3_config.fc_norm, eagle3_config.norm_output) == (
        sglang_model.norm_before_fc,
        sglang_model.fc_norm,
        sglang_model.norm_output,
    )


def test_layers_beside_eagle_config_are_read_as_what_it_was_trained_for() -> None:
    """SGLang sizes the buffer of hidden states by them, and captures its own choice."""
    eagle3_config = read_eagle3({"hidden_size": HIDDEN} | EAGLE3["beside"])
    assert (eagle3_config.named_layers, eagle3_config.captured_layers) == ((1, 17, 32), None)
    both = read_eagle3({"hidden_size": HIDDEN} | EAGLE3["at both places"])
    assert both.named_layers == both.captured_layers == (1, 17, 32)
    width = executed([sglang().definition(WIDTH)])["get_draft_input_from_target_hidden_dim"]
    algorithm = SimpleNamespace(is_eagle3=lambda: True)
    for config in (EAGLE3["beside"], EAGLE3["inside, of two"], EAGLE3["nothing"]):
        read = read_eagle3({"hidden_size": HIDDEN} | config)
        assert read.target_width == HIDDEN
        layers = read.named_layers
        runner = SimpleNamespace(
            spec_algorithm=algorithm,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(**config), hidden_size=HIDDEN),
        )
        assert width(runner) == HIDDEN * (3 if layers is None else len(layers))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ([], "its config is"),
        ({"eagle_config": [1]}, "its eagle_config is"),
        ({"eagle_config": {EAGLE_LAYERS: 3}}, f"its eagle_config.{EAGLE_LAYERS} is 3"),
        ({EAGLE_LAYERS: ["x"]}, f"its {EAGLE_LAYERS} is"),
        ({"num_aux_hidden_states": "x"}, "its num_aux_hidden_states is 'x'"),
        ({"target_hidden_size": {}}, "its target_hidden_size is {}, not an integer"),
    ],
)
def test_what_is_no_config_is_named(config: Any, reason: str) -> None:
    with pytest.raises(DrafterConfigError, match=reason):
        read_eagle3(config)


def test_architectures_are_names() -> None:
    assert architectures({}) == architectures({"architectures": None}) == ()
    assert architectures({"architectures": ["A", "B"]}) == ("A", "B")
    for wrong in ("A", [1], 3):
        with pytest.raises(DrafterConfigError, match="not a list of names"):
            architectures({"architectures": wrong})
