"""Makes drafters in plain torch, of each kind that can learn here.

Whatever the kind, `unroll` gives the logits of each draft step from every row, frozen are the
target's embedding and head, and ``state_dict`` keys are the live model's parameter names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from torch import Tensor

from engine_shim.training.blocks import DecoderShape
from engine_shim.training.dflash import DFlashShape, DFlashStudent
from engine_shim.training.eagle3 import Eagle3Shape, Eagle3Student
from engine_shim.training.mtp import MtpShape, MtpStudent

DraftShape = Eagle3Shape | DFlashShape | MtpShape
DraftStudent = Eagle3Student | DFlashStudent | MtpStudent

_KINDS: Final[dict[str, type[DraftShape]]] = {
    "eagle3": Eagle3Shape,
    "dflash": DFlashShape,
    "mtp": MtpShape,
}


def student_of(shape: DraftShape, embedding: Tensor, head: Tensor | None = None) -> DraftStudent:
    """Makes an untrained student.

    embedding, head [vocabulary, hidden]: the target's; no head: the embedding serves as head.

    An EAGLE3 draft has a head of its own.
    """
    if isinstance(shape, Eagle3Shape):
        return Eagle3Student(shape, embedding)
    if isinstance(shape, MtpShape):
        return MtpStudent(shape, embedding, head)
    return DFlashStudent(shape, embedding, head)


def encoded(shape: DraftShape) -> dict[str, Any]:
    """Encodes a shape for JSON."""
    (kind,) = (name for name, made in _KINDS.items() if isinstance(shape, made))
    return {"kind": kind, **asdict(shape)}


def decoded(found: Mapping[str, Any]) -> DraftShape:
    """Decodes what `encoded` returned.  Raises KeyError, TypeError, ValueError."""
    sizes = dict(found)
    made = _KINDS[sizes.pop("kind")]
    sizes["decoder"] = DecoderShape(**sizes["decoder"])
    if "feature_layers" in sizes:
        sizes["feature_layers"] = tuple(sizes["feature_layers"])
    return made(**sizes)
