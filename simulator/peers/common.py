"""Helpers of the peers: find an arm by its draft length, relative costs, counts of a step."""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np

from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm
from simulator.errors import InvalidInputError
from simulator.policy import ArmChoice


def first_drafter(arms: Sequence[Arm]) -> str:
    """Returns the drafter of a peer that cannot switch between drafters."""
    return arms[0].drafter


def arms_by_gamma(arms: Sequence[Arm], drafter: str) -> dict[int, int]:
    """Maps gamma to the index in `arms`, for one drafter, gammas ascending."""
    return dict(sorted((arm.gamma, i) for i, arm in enumerate(arms) if arm.drafter == drafter))


def nearest_gamma(gammas: Sequence[int], target: int) -> int:
    """Returns the closest of the gammas, the shorter one of two that are equally close."""
    return min(gammas, key=lambda gamma: (abs(gamma - target), gamma))


def speculating_arm(arms: Sequence[Arm], drafter: str, target: int) -> int:
    """Finds the drafter's arm closest to a draft length; gamma = 0 only if it has no other arm."""
    index = arms_by_gamma(arms, drafter)
    positive = [gamma for gamma in index if gamma > 0]
    return index[nearest_gamma(positive or list(index), target)]


def off_arm(arms: Sequence[Arm], drafter: str) -> int | None:
    """Finds plain decoding, the drafter's own if it lists it; None when no arm decodes plainly."""
    plain = {arm.drafter: i for i, arm in reversed([*enumerate(arms)]) if arm.gamma == 0}
    return plain.get(drafter, min(plain.values(), default=None))


def on_and_off_choices(
    arms: Sequence[Arm], gamma: int, drafter: str | None
) -> tuple[ArmChoice, ArmChoice | None]:
    """Chooses one drafting arm and plain decoding (None if no arm decodes plainly).

    gamma: the draft length, or the nearest available one.  drafter: None means the first one.
    """
    drafter = drafter or first_drafter(arms)
    off = off_arm(arms, drafter)
    on = ArmChoice(speculating_arm(arms, drafter, gamma))
    return on, None if off is None else ArmChoice(off)


def octave(batch_size: int) -> int:
    """Numbers octaves of the batch size: 2^(o-1)+1 .. 2^o have octave o (1, 2, 3-4, 5-8, ...)."""
    return (batch_size - 1).bit_length()


def octave_range(index: int) -> tuple[int, int]:
    """Returns the (first, last) batch size of an octave."""
    return (1 << (index - 1)) + 1 if index else 1, 1 << index


def accepted_tokens(counts: Sequence[int]) -> int:
    """Sums the accepted draft tokens (without bonus tokens) of a step from its gamma + 1 counts."""
    return sum(map(mul, counts, range(len(counts))))


class RelativeCosts:
    """Tells what a step costs relative to another arm's at the same batch: C(arm, b) / C(base, b).

    The ratios are the profile's where both arms were measured, linear in log b in between, constant
    outside; the context is the profile's.  base is usually plain decoding, which is the target
    alone and so has one price, whoever would not draft.

    Raises InvalidInputError if no batch size is measured at an arm and at `base`.
    """

    def __init__(self, profile: Profile, arms: Sequence[Arm], base: Arm) -> None:
        by_size: dict[Arm, dict[int, float]] = {}
        for cell in profile.cells:
            by_size.setdefault(cell.arm, {})[cell.batch_size] = cell.step_seconds
        self._curves = [_cost_ratios(by_size, arm, base) for arm in arms]
        self._ratios_by_size: dict[int, list[float]] = {}

    def ratios_at(self, batch_size: int) -> list[float]:
        """Returns [arms] ratios at this batch size."""
        cost_ratios = self._ratios_by_size.get(batch_size)
        if cost_ratios is None:
            x = math.log(batch_size)
            cost_ratios = [float(np.interp(x, sizes, ratios)) for sizes, ratios in self._curves]
            self._ratios_by_size[batch_size] = cost_ratios
        return cost_ratios


def _cost_ratios(
    by_size: dict[Arm, dict[int, float]], arm: Arm, base: Arm
) -> tuple[list[float], list[float]]:
    """(log b, C(arm, b) / C(base, b)) at the batch sizes where both were measured, ascending."""
    if arm.gamma == 0 == base.gamma:
        return [0.0], [1.0]
    arm_seconds, base_seconds = by_size.get(arm, {}), by_size.get(base, {})
    sizes = sorted(arm_seconds.keys() & base_seconds.keys())
    if not sizes:
        raise InvalidInputError(
            "profile", 0, f"no batch size is measured at both {arm} and {base}, which are compared"
        )
    return [math.log(size) for size in sizes], [
        arm_seconds[size] / base_seconds[size] for size in sizes
    ]
