"""Checks whether a drafter fits its target, by both configurations as SGLang reads them.

A drafter that SGLang cannot load or run stops the engine's start.  For a drafter that SGLang would
run without a gain, the engine starts and logs the reason.  Each case was observed on SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from engine_shim.common.checks import Check
from engine_shim.sglang.api import sglang_api
from engine_shim.sglang.drafters.dflash_checkpoint import layer_count
from engine_shim.sglang.training.blocks import SD2_FAMILIES
from engine_shim.sglang.training.drafter_config import (
    DEFAULT_FEATURE_COUNT,
    EAGLE_LAYERS,
    NO_EAGLE_LAYERS,
    Eagle3Config,
    read_eagle3,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    from engine_shim.sglang.api.settings import PluginSettings


# The most rows by which vocabularies of one tokenizer differ: they are padded to multiples of up to
# 512, and fine-tuning adds a few hundred tokens.  Different tokenizers differ by thousands.
SAME_TOKENIZER_MAX_ROWS: Final = 1024
# Fields of configs with the number of predictors.
_PREDICTOR_FIELDS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")

# How SGLang names classes that draft from the target's hidden states.
_DRAFT_NAMES: Final = ("Eagle", "NextN", "MTP")
_OWN_MODELS: Final = "sglang.srt.models."
# Algorithms by which SGLang drafts, in its order of flags; "" for a class that drafts by none.
EAGLE3, EAGLE, DFLASH, DSPARK, NO_ALGORITHM = "EAGLE3", "EAGLE", "DFLASH", "DSPARK", ""


class DrafterPair(NamedTuple):
    """A drafter's configuration and its target's.

    algorithm: EAGLE, EAGLE3 or DFLASH, as SGLang resolves it.
    """

    draft: ModelConfig
    target: ModelConfig
    algorithm: str

    @property
    def architectures(self) -> Sequence[str]:
        """Returns the names of the drafter's classes, as SGLang rewrites them for a drafter."""
        class_names: Sequence[str] = self.draft.hf_config.architectures or []
        return class_names

    @property
    def is_target_checkpoint(self) -> bool:
        """Whether the drafter is a part of the target's own checkpoint."""
        return bool(self.draft.model_path == self.target.model_path)

    @property
    def eagle3(self) -> Eagle3Config:
        """Returns the EAGLE3 part of the drafter's configuration.  Raises DrafterConfigError."""
        return read_eagle3(self.draft.hf_config.to_dict())


def fit_check(topic: str, pair: DrafterPair) -> Check:
    """Compares a drafter with its target."""
    checkpoint = f"{pair.draft.model_path} ({', '.join(pair.architectures) or 'no architecture'})"
    if SD2_FAMILIES.keys() & set(pair.architectures):
        # A class of this plugin, which is added to SGLang's registry when the engine starts.
        return Check(topic, checkpoint, next(_steered_obstacles(pair), ""))
    model = model_class(pair.architectures)
    if model is None:
        # A class that cannot be imported on this machine is checked when the engine starts.
        is_known_class = is_declared(pair.architectures)
        return Check(topic, checkpoint, "" if is_known_class else _missing_class_text(pair))
    find_obstacles = _block_obstacles if pair.algorithm == DFLASH else _head_obstacles
    for obstacles in (_class_obstacles(pair, model), find_obstacles(pair, model)):
        for obstacle in obstacles:
            return Check(topic, checkpoint, obstacle)
    no_gain_reason = next(_no_gain_reasons(pair, model), "")
    return Check(
        topic,
        checkpoint,
        no_gain_reason,
        engine_starts=no_gain_reason != "",
        advice=_advice(pair, model),
    )


def _steered_obstacles(pair: DrafterPair) -> Iterator[str]:
    """Yields why an SD2 drafter, a small steered language model, does not fit the target."""
    draft, target = pair.draft, pair.target
    if pair.algorithm != EAGLE3:
        yield f"{pair.algorithm} does not run an SD2 drafter: set --speculative-algorithm {EAGLE3}"
    width = pair.eagle3.target_width or draft.hidden_size
    for part, expected, actual in (
        ("hidden states as wide as", width, target.hidden_size),
        ("a vocabulary of", draft.vocab_size, target.vocab_size),
    ):
        if expected != actual:
            yield f"the SD2 drafter was made for {part} {expected}, the target has {actual}"
    # SGLang emits the output of a layer as the input of the next one.
    last_layer, read_layers = layer_count(target) - 2, pair.eagle3.captured_layers or ()
    if not read_layers:
        yield f"the SD2 drafter's {NO_EAGLE_LAYERS}"
    if any(layer > last_layer for layer in read_layers):
        yield (
            f"the SD2 drafter reads layer {max(read_layers)} of a target whose {last_layer} is the "
            "last that "
            "SGLang can hand over"
        )


def _missing_class_text(pair: DrafterPair) -> str:
    names = ", ".join(pair.architectures)
    subject = f"SGLang has no class {names}" if names else "its config.json names no architecture"
    return f"{subject}: {_usable_classes_text(pair.algorithm)}"


def _usable_classes_text(algorithm: str) -> str:
    names = drafter_classes(algorithm)
    if algorithm == EAGLE:
        names = [name for name in names if "Eagle" in name]
        return (
            f"--speculative-algorithm EAGLE needs a checkpoint of {', '.join(names)}, or a target "
            "with a predictor that SGLang knows"
        )
    return f"--speculative-algorithm {algorithm} needs a checkpoint of {', '.join(names)}"


def _class_obstacles(pair: DrafterPair, model: type) -> Iterator[str]:
    """Yields what the classes of the drafter or its target lack and SGLang would call."""
    class_algorithm, algorithm = draft_algorithm(model), pair.algorithm
    name = model.__name__
    if algorithm == DFLASH != class_algorithm and class_algorithm is not None:
        yield (
            f"{pair.draft.model_path} is not a DFlash checkpoint: its architectures are "
            f"{list(pair.architectures)}; {_usable_classes_text(DFLASH)}"
        )
    elif class_algorithm == DSPARK:
        yield f"DSPARK drafts with {name}, and cannot be steered: {_usable_classes_text(algorithm)}"
    elif (
        class_algorithm in {EAGLE3, DFLASH}
        and class_algorithm != algorithm
        and (class_algorithm, algorithm) != (EAGLE3, EAGLE)
    ):
        yield f"{class_algorithm} drafts with {name}: set --speculative-algorithm {class_algorithm}"
    elif class_algorithm == EAGLE and class_algorithm != algorithm:
        yield f"EAGLE drafts with {name}: set --speculative-algorithm EAGLE (or NEXTN)"
    elif class_algorithm == NO_ALGORITHM and (
        algorithm != EAGLE or not hasattr(model, "set_embed_and_head")
    ):
        yield _not_a_drafter_text(pair, model)
    if algorithm == DFLASH:
        return
    target_architectures = pair.target.hf_config.architectures or []
    target = model_class(target_architectures)
    if target is None or "__getattr__" in vars(target):
        return
    if (
        algorithm == EAGLE3
        and pair.eagle3.uses_features
        and not _has_method(target, "set_eagle3_layers_to_capture")
    ):
        yield (
            f"SGLang's {target_architectures[0]} does not emit the hidden states that EAGLE3 "
            "reads: use another "
            "algorithm with this target"
        )
    if not _has_method(target, "get_embed_and_head", "get_embed_and_head_for_draft"):
        yield (
            f"SGLang's {target_architectures[0]} does not share its embedding with a drafter: it "
            "cannot be the "
            f"target of {algorithm}"
        )


def _has_method(model: type, *methods: str) -> bool:
    return any(hasattr(model, method) for method in methods)


def _not_a_drafter_text(pair: DrafterPair, model: type) -> str:
    """Explains that a checkpoint is a language model and not a drafter."""
    if pair.is_target_checkpoint:
        return (
            f"the target has no predictor that SGLang knows, so {model.__name__} itself would "
            "draft, at the target's own price: name an EAGLE, EAGLE3 or DFlash checkpoint with "
            "--speculative-draft-model-path, and its --speculative-algorithm"
        )
    if _is_eagle3_head(pair):
        return (
            "its config.json has a draft_vocab_size, as EAGLE3 drafters have, and names "
            f"{model.__name__}, which does not read the target: write LlamaForCausalLMEagle3 "
            "into its architectures, and set --speculative-algorithm EAGLE3"
        )
    return (
        f"{model.__name__} is a language model, which does not read the target: "
        f"{_usable_classes_text(pair.algorithm)}"
    )


def _is_eagle3_head(pair: DrafterPair) -> bool:
    """Whether it looks like an EAGLE3 drafter whose config.json names a language model."""
    return getattr(pair.draft.hf_config, "draft_vocab_size", None) is not None


def _head_obstacles(pair: DrafterPair, _: type) -> Iterator[str]:
    """Yields why SGLang cannot load or run an EAGLE, EAGLE3 or MTP drafter."""
    draft, target, config = pair.draft, pair.target, pair.draft.hf_text_config
    width = draft.hidden_size
    if pair.algorithm == EAGLE3:
        width = pair.eagle3.target_width or width
    if width != target.hidden_size:
        yield _width_mismatch_text(width, target)
    if pair.algorithm != EAGLE3:
        return
    draft_vocabulary = getattr(config, "draft_vocab_size", None)
    if draft_vocabulary is not None and draft_vocabulary > max(draft.vocab_size, target.vocab_size):
        yield (
            f"it drafts {draft_vocabulary} tokens (draft_vocab_size), and the target has "
            f"{target.vocab_size}: the drafter does not fit this target"
        )
    if (
        pair.architectures[0] == "LlamaForCausalLMEagle3"
        and not hasattr(config, "draft_vocab_size")
        and not config.tie_word_embeddings
    ):
        yield (
            "its config.json has no draft_vocab_size, which SGLang needs: write the rows of its "
            "lm_head there (null if it has none)"
        )
    if pair.eagle3.uses_features:
        yield from _layer_obstacles(pair)


def _width_mismatch_text(width: int, target: ModelConfig) -> str:
    return (
        f"it reads hidden states of {width} numbers, and the target's have {target.hidden_size}: "
        "the drafter does not fit this target"
    )


def _layer_obstacles(pair: DrafterPair) -> Iterator[str]:
    """Compares the layers that an EAGLE3 drafter reads with those that the target has."""
    layers, features = pair.eagle3.captured_layers, pair.eagle3.features
    layer_total = pair.target.hf_text_config.num_hidden_layers
    if layers and not all(-1 <= layer <= layer_total for layer in layers):
        yield (
            f"it reads the target's layers {list(layers)} ({EAGLE_LAYERS}), "
            f"and it has {layer_total}"
        )
    emitted_count = len(layers or ()) or DEFAULT_FEATURE_COUNT
    if features != emitted_count:
        yield (
            f"it reads {features} hidden states (num_aux_hidden_states), and {emitted_count} are "
            f"emitted ({EAGLE_LAYERS})"
        )


def _block_obstacles(pair: DrafterPair, model: type) -> Iterator[str]:
    """Yields why SGLang cannot load or run a DFlash drafter, or why it cannot be steered."""
    from sglang.srt.models.dflash import DFlash2DraftModel
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    draft, target = pair.draft, pair.target
    if draft.hidden_size != target.hidden_size:
        yield _width_mismatch_text(draft.hidden_size, target)
    try:
        config = parse_dflash_draft_config(draft_hf_config=draft.hf_config)
        config.resolve_target_layer_ids(
            target_num_layers=layer_count(target), draft_num_layers=config.require_num_layers()
        )
    except (ValueError, TypeError) as error:
        yield f"SGLang refuses its config.json: {error}"
        return
    if config.mask_token_id is not None and config.mask_token_id >= target.vocab_size:
        yield (
            f"its mask_token_id is {config.mask_token_id}, and the target has {target.vocab_size} "
            "tokens: the drafter does not fit this target"
        )
    settings = getattr(draft.hf_config, "dflash_config", None) or {}
    if any(name.startswith("lilicorr_") for name in settings) and settings.get(
        "lilicorr_enabled", True
    ):
        yield (
            "a LiLiCorr head is untested where the draft length is steered: use a DFlash "
            "checkpoint without one"
        )
    if issubclass(model, DFlash2DraftModel) and draft.vocab_size < target.vocab_size:
        yield f"{_vocabulary_mismatch_text(pair)}, which its selector has no rows for"


def _vocabulary_mismatch_text(pair: DrafterPair) -> str:
    return (
        f"its vocabulary has {pair.draft.vocab_size} tokens, and the target's "
        f"{pair.target.vocab_size}"
    )


def _no_gain_reasons(pair: DrafterPair, model: type) -> Iterator[str]:
    """Yields why SGLang would run the drafter without a gain."""
    class_algorithm, draft, target = draft_algorithm(model), pair.draft, pair.target
    if (class_algorithm, pair.algorithm) == (EAGLE3, EAGLE) and pair.eagle3.uses_features:
        yield (
            f"{model.__name__} is an EAGLE3 drafter, which under EAGLE reads the wrong hidden "
            "states, so that almost nothing is accepted: set --speculative-algorithm EAGLE3"
        )
    predictors = [getattr(target.hf_text_config, name, None) for name in _PREDICTOR_FIELDS]
    if pair.is_target_checkpoint and 0 in predictors:
        yield "the target's config.json says that it has no predictor: " + _usable_classes_text(
            EAGLE
        )
    if class_algorithm == NO_ALGORITHM and not _may_be_eagle(pair):
        yield _not_a_drafter_text(pair, model)
    if abs(draft.vocab_size - target.vocab_size) > SAME_TOKENIZER_MAX_ROWS:
        mismatch = _vocabulary_mismatch_text(pair)
        yield f"{mismatch}: it was made for another tokenizer, or another model"
    is_eagle_head = any("Eagle" in name for name in pair.architectures)
    if is_eagle_head and draft.num_hidden_layers >= target.num_hidden_layers:
        yield (
            f"its config.json names {draft.num_hidden_layers} layers, and the target has "
            f"{target.num_hidden_layers}: write there how many it has"
        )


def _may_be_eagle(pair: DrafterPair) -> bool:
    """Whether it looks like a published first-generation EAGLE checkpoint."""
    is_short = pair.draft.num_hidden_layers < pair.target.num_hidden_layers
    return is_short and not pair.is_target_checkpoint and not _is_eagle3_head(pair)


def _advice(pair: DrafterPair, model: type) -> str:
    if draft_algorithm(model) != NO_ALGORITHM:
        return ""
    eagle_class = f"{model.__name__}Eagle"
    subject = f"SGLang loads it as a {model.__name__}, in which an EAGLE head drafts nothing of use"
    if model_class([eagle_class]) is None:
        return f"{subject}: {_usable_classes_text(EAGLE)}"
    return f"{subject}: if it is one, write {eagle_class} into the architectures of its config.json"


def drafter_checks(args: ServerArgs, settings: PluginSettings) -> tuple[Check, ...]:
    """Checks each drafter of an engine against its target.

    args: SGLang's arguments, with their speculation resolved.  If SGLang can read a configuration
    and it cannot be compared here, the engine starts nevertheless.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of

    view = sglang_api.resolving_args(args)
    target = model_config_of(args)
    path, revision = view.speculative_draft_model_path, view.speculative_draft_model_revision
    if sglang_api.is_dflash_only(args):
        return (_check_drafter(args, target, "DFlash checkpoint", path, revision, DFLASH),)
    checks = []
    if view.speculative_algorithm in {EAGLE, EAGLE3}:
        topic = "drafter's checkpoint"
        checks.append(
            _check_drafter(args, target, topic, path, revision, view.speculative_algorithm)
        )
    if settings.dflash_model_path:
        path, revision = settings.dflash_model_path, settings.dflash_revision or None
        checks.append(_check_drafter(args, target, "DFlash checkpoint", path, revision, DFLASH))
    return tuple(checks)


def _check_drafter(
    args: ServerArgs, target: ModelConfig, check_name: str, path: str | None, revision: str | None,
    algorithm: str,
) -> Check:  # fmt: skip
    """Reads a drafter's configuration like SGLang's start, and compares it with the target's."""
    from sglang.srt.configs.model_config import ModelConfig

    checkpoint = path or target.model_path
    try:
        draft = ModelConfig.from_server_args(
            args, model_path=path, model_revision=revision, is_draft_model=True,
            context_length=target.context_len,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - a foreign file, which may contain anything
        message = " ".join(str(error).split())
        if isinstance(error, ValueError) and "context_length" in message:
            obstacle = (
                f"its context is shorter than the target's {target.context_len} tokens: set "
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, or lower --context-length "
                f"({message})"
            )
            return Check(check_name, checkpoint, obstacle)
        # SGLang reads it in the same way and would end with the same error.
        return Check(check_name, checkpoint, _unreadable_text(error))
    try:
        return fit_check(check_name, DrafterPair(draft, target, algorithm))
    except Exception as error:  # noqa: BLE001 - as above
        return Check(check_name, checkpoint, _unreadable_text(error), engine_starts=True)


def _unreadable_text(error: Exception) -> str:
    message = " ".join(str(error).split())
    return f"its configuration cannot be read: {type(error).__name__}: {message}"


def model_class(architectures: Sequence[str]) -> type | None:
    """Returns the class that SGLang's registry has for the first known architecture."""
    from sglang.srt.models.registry import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    registered: Any = next(
        (ModelRegistry.models[name] for name in architectures if name in supported), None
    )
    return registered if isinstance(registered, type) else None


def is_declared(architectures: Sequence[str]) -> bool:
    """Whether SGLang's source has one of these classes, even if it cannot be imported here."""
    from sglang.srt import models

    declarations = tuple(f"class {name}(" for name in architectures)
    return any(
        declaration in file.read_text(encoding="utf-8")
        for folder in models.__path__
        for file in Path(folder).rglob("*.py")
        for declaration in declarations
    )


def draft_algorithm(model: type) -> str | None:
    """Returns the algorithm by which SGLang drafts with a class, NONE for a language model.

    Returns None for an external class (SGLANG_EXTERNAL_MODEL_PACKAGE), whose algorithm is unknown.
    """
    from sglang.srt.models.dflash import DFlashDraftModel

    # DSpark's classes derive from DFlash's, so they are checked first.
    if "DSpark" in model.__name__:
        return DSPARK
    if issubclass(model, DFlashDraftModel):
        return DFLASH
    if hasattr(model, "get_hot_token_id"):
        return EAGLE3
    if not model.__module__.startswith(_OWN_MODELS):
        return None
    return EAGLE if any(part in model.__name__ for part in _DRAFT_NAMES) else NO_ALGORITHM


def drafter_classes(algorithm: str) -> list[str]:
    """Returns the names of SGLang's drafter classes for an algorithm."""
    from sglang.srt.models.registry import ModelRegistry

    return sorted(
        name
        for name in ModelRegistry.get_supported_archs()
        if isinstance(registered := ModelRegistry.models[name], type)
        and draft_algorithm(registered) == algorithm
    )
