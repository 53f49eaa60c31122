"""Makes drafters in plain torch, of each kind that can learn here.

Whatever the kind, `unroll` gives the logits of each draft step from every row, what is `Borrowed`
is never trained, and ``state_dict`` keys are the live model's parameter names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from engine_shim.sglang.training.blocks import Borrowed, DecoderShape
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from engine_shim.sglang.training.eagle3 import Eagle3Shape, Eagle3Student
from engine_shim.sglang.training.mtp import MtpShape, MtpStudent

DraftShape = Eagle3Shape | DFlashShape | MtpShape
DraftStudent = Eagle3Student | DFlashStudent | MtpStudent

_KINDS: Final[dict[str, type[DraftShape]]] = {
    "eagle3": Eagle3Shape,
    "dflash": DFlashShape,
    "mtp": MtpShape,
}


def student_of(shape: DraftShape, borrowed: Borrowed) -> DraftStudent:
    """Makes an untrained student."""
    if isinstance(shape, Eagle3Shape):
        return Eagle3Student(shape, *borrowed)
    if isinstance(shape, MtpShape):
        return MtpStudent(shape, borrowed.embedding, borrowed.head)
    return DFlashStudent(shape, borrowed.embedding, borrowed.head)


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
