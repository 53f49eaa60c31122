"""Adds mixtures of two drafters to an engine, with what their steps cost."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from controller.core.engine_spec import DrafterSpec, Mixture
from controller.core.errors import InvalidEngineError
from controller.core.model_shapes import DrafterKind
from simulator.errors import InvalidInputError
from simulator.surface import CostSurface


@dataclass(frozen=True, slots=True)
class MixtureCost:
    """Describes a mixture: a step of it is one of its main drafter, and a lookup besides.

    once_seconds, share_of_step: what the lookup adds to the main drafter's step.
    """

    main: str
    free: str
    once_seconds: float = 0.0
    share_of_step: float = 0.0


def with_mixtures(surface: CostSurface, mixtures: Mapping[str, MixtureCost]) -> CostSurface:
    """Returns the surface with these mixtures behind its drafters, by name.

    They have the draft lengths of their main drafter but 0.

    Raises InvalidInputError for drafters that the surface lacks, and for one that has a model in
    the place of the lookup.
    """
    specs, seconds, kv_seconds = [*surface.drafters], [surface.seconds], [surface.kv_seconds]
    known = {d.name: d for d in surface.drafters}
    for name, cost in mixtures.items():
        _require_parts(surface, name, cost)
        rows = [i for i, arm in enumerate(surface.arms) if arm.drafter == cost.main and arm.gamma]
        gammas = tuple(gamma for gamma in known[cost.main].gammas if gamma)
        mixture = Mixture(cost.main, cost.free)
        try:
            specs.append(DrafterSpec(name, DrafterKind.MIXTURE, gammas, mixture=mixture))
        except InvalidEngineError as error:
            raise InvalidInputError(name[:64], 0, str(error)) from error
        share = 1 + cost.share_of_step
        seconds.append(share * surface.seconds[rows] + cost.once_seconds)
        kv_seconds.append(share * surface.kv_seconds[rows])
    return replace(
        surface,
        drafters=tuple(specs),
        seconds=np.vstack(seconds),
        kv_seconds=np.concatenate(kv_seconds),
    )


def _require_parts(surface: CostSurface, name: str, cost: MixtureCost) -> None:
    known = {d.name: d for d in surface.drafters}
    if name in known:
        raise InvalidInputError(surface.name, 0, f"{name!r} is a drafter already")
    for part in (cost.main, cost.free):
        if part not in known:
            raise InvalidInputError(surface.name, 0, f"{part!r} is not one of {list(known)}")
    if cost.main == cost.free or known[cost.free].kind is not DrafterKind.NGRAM:
        fault = f"{cost.free!r} is not a lookup (kind ngram) beside {cost.main!r}"
        raise InvalidInputError(surface.name, 0, fault)
