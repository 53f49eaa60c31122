"""Finds the arm for a draft length, for peers that know draft lengths only."""

from collections.abc import Sequence

from controller.core.engine_spec import Arm


def first_drafter(arms: Sequence[Arm]) -> str:
    """The drafter that a peer uses which cannot switch."""
    return arms[0].drafter


def by_gamma(arms: Sequence[Arm], drafter: str) -> dict[int, int]:
    """Index in `arms` by gamma, of one drafter, gammas ascending."""
    found = {arm.gamma: i for i, arm in enumerate(arms) if arm.drafter == drafter}
    return dict(sorted(found.items()))


def nearest(gammas: Sequence[int], wanted: int) -> int:
    """The closest of the gammas; the shorter one when two are as close."""
    return min(gammas, key=lambda gamma: (abs(gamma - wanted), gamma))


def speculating_arm(arms: Sequence[Arm], drafter: str, wanted: int) -> int:
    """Index of the drafter's arm closest to a draft length, gamma = 0 only if it has no other."""
    index = by_gamma(arms, drafter)
    positive = [gamma for gamma in index if gamma > 0]
    return index[nearest(positive or list(index), wanted)]


def off_arm(arms: Sequence[Arm], drafter: str) -> int | None:
    """Index of plain decoding, the drafter's own if it lists it; None when there is none."""
    own = by_gamma(arms, drafter).get(0)
    if own is not None:
        return own
    return next((i for i, arm in enumerate(arms) if arm.gamma == 0), None)
