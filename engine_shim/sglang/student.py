"""The serving EAGLE3 drafter as something that learns: sizes, parameters, what it borrows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.sglang.errors import UnsupportedEngineError
from engine_shim.training.checkpoint import eagle3_shape
from engine_shim.training.eagle3 import Eagle3Student

if TYPE_CHECKING:
    from engine_shim.training.eagle3 import Eagle3Shape

# The target's, of which the live drafter has a reference: never trained, never copied.
_EMBEDDING: Final = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class LiveDrafter:
    """parameters: of the serving model, by name.  embedding: the target's.

    groups: target layers whose hidden states it reads.
    """

    shape: Eagle3Shape
    parameters: dict[str, torch.Tensor]
    embedding: torch.Tensor
    groups: int


def cannot_learn_reason(worker: Any, ranks: int) -> str | None:
    """Why the drafter of this `EAGLEWorkerV2` cannot be given other weights; None when it can."""
    model = worker.draft_worker.draft_runner.model
    if type(model).__name__ != "LlamaForCausalLMEagle3":
        return f"{type(model).__name__} has no student: EAGLE3 drafters only"
    config = model.config
    obstacles = {
        f"{ranks} ranks share the drafter's weights: one is needed": ranks > 1,
        "its vocabulary is smaller than the target's": model.hot_token_id is not None
        and not _is_identity(model.hot_token_id),
        "its rotary positions are scaled": bool(getattr(config, "rope_scaling", None))
        and "factor" in config.rope_scaling,
        f"it has {config.num_hidden_layers} layers: one is needed": config.num_hidden_layers != 1,
    }
    return next((reason for reason, is_so in obstacles.items() if is_so), None)


def live_drafter(worker: Any) -> LiveDrafter:
    """Of a worker for which `cannot_learn_reason` is None.

    Raises UnsupportedEngineError where a student would not be this drafter.
    """
    model = worker.draft_worker.draft_runner.model
    parameters = dict(model.named_parameters())
    embedding = parameters.pop(_EMBEDDING).detach()
    groups: int = model.model.num_aux_hidden_states
    shape = eagle3_shape(model.config.to_dict(), groups)
    _require_same(shape, {name: tuple(live.shape) for name, live in parameters.items()})
    return LiveDrafter(shape, parameters, embedding, groups)


def _require_same(shape: Eagle3Shape, live: dict[str, tuple[int, ...]]) -> None:
    """Raises UnsupportedEngineError unless a student has the drafter's very parameters."""
    with torch.device("meta"):
        size = shape.decoder.vocabulary, shape.decoder.hidden
        student = Eagle3Student(shape, torch.empty(size))
    ours = {name: tuple(part.shape) for name, part in student.named_parameters()}
    for name in sorted(ours.keys() | live.keys()):
        if ours.get(name) != live.get(name):
            raise UnsupportedEngineError(
                f"the drafter cannot be updated while it serves: its {name} is "
                f"{live.get(name, 'missing')}, a student's {ours.get(name, 'missing')}"
            )


def _is_identity(tokens: torch.Tensor) -> bool:
    return bool((tokens.cpu() == torch.arange(tokens.shape[0])).all())
