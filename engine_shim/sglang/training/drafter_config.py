"""Reads what only drafters have in their `config.json`, at every place where SGLang reads it.

A config is a `config.json` as it was published, or what transformers has made of it (`to_dict`).
The reading is that of SGLang's `parse_dflash_draft_config` for DFlash and of its class
`LlamaForCausalLMEagle3` and what chooses its target layers for EAGLE3; a test compares the two.
Whether a student computes the same is the part of :mod:`engine_shim.sglang.training.configs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

EAGLE3: Final = "LlamaForCausalLMEagle3"
DFLASH: Final = "DFlashDraftModel"
EAGLE_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
NO_EAGLE_LAYERS: Final = f"config.json has no {EAGLE_LAYERS} in its eagle_config"
# What SGLang takes where a DFlash config does not say.
DEFAULT_BLOCK: Final = 16
DEFAULT_MASK: Final = "<|MASK|>"
# Target layers that SGLang has an EAGLE3 drafter read whose config does not say how many.
DEFAULT_FEATURES: Final = 3
# DFlash drafters of several layers that name no target layers read some from the second to the
# fourth from last.
_FIRST_LAYER: Final = 1
_LAST_LAYERS: Final = 3


class DrafterConfigError(ValueError):
    """A config that SGLang could not read; the message names the field."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Holds what a DFlash drafter's config says of its blocks and of what they read.

    block: tokens of a block, the newest one included.  layers: of the drafter itself.
    target_layers: how many the target has that it was trained for.  named_layers: the target's
    layers that it reads, in the config's order; None where SGLang chooses them.  mask_token: the
    text of the token that stands for those to come.  mask_id: its id; None where SGLang asks the
    target's tokenizer.
    """

    block: int
    layers: int | None
    target_layers: int | None
    named_layers: tuple[int, ...] | None
    mask_token: str
    mask_id: int | None

    def feature_layers(self, target_layers: int) -> tuple[int, ...]:
        """Returns the layers that it reads of a target of so many.  Raises DrafterConfigError."""
        if self.named_layers is None:
            return self._chosen_layers(target_layers)
        for layer in self.named_layers:
            if not 0 <= layer < target_layers:
                raise DrafterConfigError(
                    f"its target_layer_ids name layer {layer}, and the target has {target_layers}"
                )
        return self.named_layers

    def _chosen_layers(self, target_layers: int) -> tuple[int, ...]:
        if self.layers is None:
            raise DrafterConfigError("its config has neither target_layer_ids nor layers")
        if target_layers < 1:
            raise DrafterConfigError(f"a target of {target_layers} layers has none to read")
        if self.layers == 1:
            return (target_layers // 2,)
        span = target_layers - _LAST_LAYERS - _FIRST_LAYER
        if span < 0:
            raise DrafterConfigError(
                f"its config names no target_layer_ids, and a target of {target_layers} layers has "
                "too few to choose from"
            )
        return tuple(
            round(_FIRST_LAYER + index * span / (self.layers - 1)) for index in range(self.layers)
        )


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Holds what an EAGLE3 drafter's config says of what it reads of the target.

    named_layers: the target's layers that it was trained for; None where its config names none.
    captured_layers: those that SGLang has the target emit, which reads them in `eagle_config` only;
    None where SGLang chooses three.  features: how many hidden states its `fc` reads.
    target_width: numbers of each; None where the config says null.  uses_features: whether it reads
    them at all, or the target's last hidden state.  norm_before_fc: whether one norm acts on all of
    them.  fc_norm: whether one acts on each.  norm_output: whether the next draft step gets the
    normed hidden state.
    """

    named_layers: tuple[int, ...] | None
    captured_layers: tuple[int, ...] | None
    features: int
    target_width: int | None
    uses_features: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def read_dflash(config: Mapping[str, Any]) -> DFlashConfig:
    """Reads a DFlash drafter's config; a field in `dflash_config` counts before one beside it.

    Raises DrafterConfigError.
    """
    _require_mapping(config, "config")
    own = dflash_section(config)

    def found(name: str) -> Any:
        return own[name] if name in own else config.get(name)

    mask_token = found("mask_token")
    mask_token = DEFAULT_MASK if mask_token is None else mask_token
    if not isinstance(mask_token, str) or not mask_token:
        raise DrafterConfigError(f"its mask_token is {mask_token!r}, no text")
    mask_id = found("mask_token_id")
    if mask_id is not None and not _is_count(mask_id):
        raise DrafterConfigError(f"its mask_token_id is {mask_id!r}, no id")
    block = _positive(found("block_size"), "block_size")
    return DFlashConfig(
        block=DEFAULT_BLOCK if block is None else block,
        layers=_positive(text_config(config).get("num_hidden_layers"), "num_hidden_layers"),
        target_layers=_positive(found("num_target_layers"), "num_target_layers"),
        named_layers=_target_layers(found("target_layer_ids")),
        mask_token=mask_token,
        mask_id=mask_id,
    )


def read_eagle3(config: Mapping[str, Any]) -> Eagle3Config:
    """Reads an EAGLE3 drafter's config.  Raises DrafterConfigError."""
    _require_mapping(config, "config")
    own = eagle_section(config)
    captured = _layers(own.get(EAGLE_LAYERS), f"eagle_config.{EAGLE_LAYERS}")
    beside = _layers(config.get(EAGLE_LAYERS), EAGLE_LAYERS)
    features = config.get("num_aux_hidden_states")
    if features is None:
        features = len(captured) if captured else DEFAULT_FEATURES
    elif not _is_count(features) or not features:
        raise DrafterConfigError(f"its num_aux_hidden_states is {features!r}, no number")
    width = config.get("target_hidden_size", config.get("hidden_size"))
    return Eagle3Config(
        named_layers=beside if captured is None else captured,
        captured_layers=captured,
        features=features,
        target_width=_positive(width, "target_hidden_size"),
        uses_features=bool(own.get("use_aux_hidden_state", True)),
        norm_before_fc=bool(own.get("norm_before_fc", config.get("norm_before_fc"))),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        norm_output=bool(config.get("norm_output")),
    )


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the classes that a config asks for.  Raises DrafterConfigError."""
    found = config.get("architectures") or ()
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise DrafterConfigError(f"its architectures are {found!r}, no list of names")
    return tuple(found)


def dflash_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `dflash_config`, empty if it is missing; SGLang passes over one of another type."""
    try:
        return dict(config.get("dflash_config") or {})
    except (TypeError, ValueError):
        return {}


def eagle_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `eagle_config`, empty if it is missing.  Raises DrafterConfigError."""
    return _require_mapping(config.get("eagle_config") or {}, "eagle_config")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part that describes the layers: `text_config` where there is one.

    Raises DrafterConfigError.
    """
    found = config.get("text_config")
    return config if found is None else _require_mapping(found, "text_config")


def _require_mapping(found: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise DrafterConfigError(f"its {name} is {found!r:.80}, no object")
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _positive(value: Any, name: str) -> int | None:
    """Reads a number above 0, which may be written as SGLang's `int` takes it."""
    if value is None:
        return None
    try:
        parsed = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DrafterConfigError(f"its {name} is {value!r:.80}, no number") from error
    if parsed < 1:
        raise DrafterConfigError(f"its {name} is {parsed}, and must be 1 or more")
    return parsed


def _target_layers(found: Any) -> tuple[int, ...] | None:
    layers = _layers(found, "target_layer_ids")
    if layers == ():
        raise DrafterConfigError("its target_layer_ids are empty")
    return layers


def _layers(found: Any, name: str) -> tuple[int, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list | tuple):
        raise DrafterConfigError(f"its {name} is {found!r:.80}, no list of layers")
    try:
        return tuple(int(layer) for layer in found)
    except (TypeError, ValueError, OverflowError) as error:
        raise DrafterConfigError(f"its {name} is {found!r:.80}, no list of layers") from error
