"""The serving drafter as something that learns: sizes, parameters, what it borrows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.sglang.api.errors import UnsupportedEngineError
from engine_shim.training.checkpoint import dflash_shape, eagle3_shape, mtp_shape
from engine_shim.training.students import student_of

if TYPE_CHECKING:
    from engine_shim.training.students import DraftShape

EAGLE3: Final = "LlamaForCausalLMEagle3"
DFLASH: Final = "DFlashDraftModel"
MTP: Final = "MiMoMTP"
LEARN: Final = (EAGLE3, DFLASH, MTP)
# The target's, of which the live drafter has a reference: never trained, never copied.
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LiveDrafter:
    """Describes the serving drafter.

    parameters: by name.  embedding, head: the target's, as `student_of`.  groups: target layers
    whose hidden states it reads.  refresh: to be called once parameters were written, for what the
    engine has made of them.
    """

    shape: DraftShape
    parameters: dict[str, torch.Tensor]
    embedding: torch.Tensor
    groups: int
    head: torch.Tensor | None = None
    refresh: Callable[[], None] | None = None


def cannot_learn_reason(worker: Any, ranks: int) -> str | None:
    """Explains why the drafter of this `EAGLEWorkerV2` takes no other weights; None if it does."""
    model = worker.draft_worker.draft_runner.model
    kind = type(model).__name__
    if kind not in LEARN:
        return f"{kind} has no student: drafters of {', '.join(LEARN)} only"
    config = model.config
    obstacles = {
        f"{ranks} ranks share the drafter's weights: one is needed": ranks > 1,
        "its rotary positions are scaled": bool(getattr(config, "rope_scaling", None))
        and "factor" in config.rope_scaling,
    }
    if kind == EAGLE3:
        obstacles |= {
            "its vocabulary is smaller than the target's": model.hot_token_id is not None
            and not _is_identity(model.hot_token_id),
            f"it has {config.num_hidden_layers} layers: one is needed": config.num_hidden_layers
            != 1,
        }
    elif kind == DFLASH:
        types = set(getattr(config, "layer_types", None) or ())
        obstacles |= {
            "its layers do not see the whole context": bool(types - {"full_attention"}),
            "its blocks are causal": bool(getattr(config, "is_causal", False)),
        }
    return next((reason for reason, is_so in obstacles.items() if is_so), None)


def live_drafter(worker: Any) -> LiveDrafter:
    """Describes the drafter of a worker for which `cannot_learn_reason` is None.

    Raises UnsupportedEngineError where a student would not be this drafter.
    """
    draft = worker.draft_worker
    model = draft.draft_runner.model
    kind = type(model).__name__
    if kind == DFLASH:
        found = _dflash(model, draft)
    else:
        found = _eagle3(model) if kind == EAGLE3 else _mtp(model)
    _require_same(found)
    # SGLang pads both to a round number of rows.
    rows = found.shape.decoder.vocabulary
    head = None if found.head is None else found.head[:rows]
    return replace(found, embedding=found.embedding[:rows], head=head)


def _eagle3(model: Any) -> LiveDrafter:
    parameters = dict(model.named_parameters())
    embedding = parameters.pop(_EMBEDDING).detach()
    groups: int = model.model.num_aux_hidden_states
    return LiveDrafter(eagle3_shape(model.config.to_dict(), groups), parameters, embedding, groups)


def _mtp(model: Any) -> LiveDrafter:
    parameters = dict(model.named_parameters())
    embedding = parameters.pop(_EMBEDDING).detach()
    head = parameters.pop(_HEAD, None)
    shape = mtp_shape(model.config.to_dict())
    return LiveDrafter(shape, parameters, embedding, 1, _unless_same(head, embedding))


def _dflash(model: Any, draft: Any) -> LiveDrafter:
    """Describes a DFlash drafter.  draft: the `DFlashOnlyWorker` around it."""
    target, block = draft.target_worker.model_runner.model, draft.block
    groups: int = model.num_context_features
    config = model.config.to_dict()
    embedding = target.get_input_embeddings().weight.detach()
    head = target.lm_head.weight
    return LiveDrafter(
        dflash_shape(config, groups, block.block_size, block.mask_token),
        dict(model.named_parameters()),
        embedding,
        groups,
        _unless_same(head, embedding),
        block.refresh,
    )


def _unless_same(head: torch.Tensor | None, embedding: torch.Tensor) -> torch.Tensor | None:
    if head is None or head.data_ptr() == embedding.data_ptr():
        return None
    return head.detach()


def _require_same(found: LiveDrafter) -> None:
    """Raises UnsupportedEngineError unless a student has the drafter's very parameters."""
    live = {name: tuple(part.shape) for name, part in found.parameters.items()}
    with torch.device("meta"):
        decoder = found.shape.decoder
        student = student_of(found.shape, torch.empty(decoder.vocabulary, decoder.hidden))
    ours = {name: tuple(part.shape) for name, part in student.named_parameters()}
    for name in sorted(ours.keys() | live.keys()):
        if ours.get(name) != live.get(name):
            raise UnsupportedEngineError(
                f"the drafter cannot be updated while it serves: its {name} is "
                f"{live.get(name, 'missing')}, a student's {ours.get(name, 'missing')}"
            )


def _is_identity(tokens: torch.Tensor) -> bool:
    return bool((tokens.cpu() == torch.arange(tokens.shape[0])).all())
