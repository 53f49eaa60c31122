"""Introduces an engine to a sidecar of an earlier version, which knows fewer kinds of drafters.

An earlier sidecar refuses an introduction with a mixture, since it does not know the kind, and the
engine would run its safe default until the sidecar is upgraded.  It is introduced without its
mixtures instead.  All that it can do besides is steered.
"""

from __future__ import annotations

from typing import NamedTuple

import grpc

from speculation.v1.engine_pb2 import DRAFTER_KIND_MIXTURE, EngineSpec


class Reduced(NamedTuple):
    """An introduction without some drafters, and their names."""

    engine: EngineSpec
    left_out: tuple[str, ...]


def reduced(engine: EngineSpec, code: grpc.StatusCode, detail: str) -> Reduced | None:
    """Returns what a sidecar that has refused `engine` may take; None where that is not known.

    detail: the sidecar's words.  Since the first version they name the drafter and its kind
    (`controller/wire/engines.py`).
    """
    mixtures = [d.name for d in engine.drafters if d.kind == DRAFTER_KIND_MIXTURE]
    unknown = (f"drafter {name!r}: kind {DRAFTER_KIND_MIXTURE} is unsp" for name in mixtures)
    if code is not grpc.StatusCode.INVALID_ARGUMENT or not any(word in detail for word in unknown):
        return None
    less = EngineSpec()
    less.CopyFrom(engine)
    del less.drafters[:], less.lost[:]
    less.drafters.extend(d for d in engine.drafters if d.name not in mixtures)
    less.lost.extend(loss for loss in engine.lost if loss.drafter not in mixtures)
    return Reduced(less, tuple(mixtures))
