"""Finds the batch sizes at which a draft length can win at all.

Where no position is accepted with a probability above a, a longer draft is never worth more than
when all are accepted with a: for g < gamma the ratio E[tokens | gamma] / E[tokens | g] rises with
each of them, to e(gamma) / e(g) with e(n) = (1 - a^(n + 1)) / (1 - a).  So where e(gamma) / C(B,
gamma) stays below e(g) / C(B, g) for a shorter g of the same drafter, no plan reaches gamma, and
graphs for it would be captured for nothing.
"""

from controller.core.cost.profile import Profile

# A cell may have been measured as too expensive by this share.
_SLACK = 0.02


def batch_limits(profile: Profile, acceptance: float = 0.9) -> dict[int, int]:
    """Returns the draft lengths that win in small batches only: gamma -> the largest such batch.

    acceptance: in (0, 1], the highest expected of any position.  Between two measured sizes the
    longer draft gets the benefit of the doubt.  A draft length with which any drafter could win at
    the largest measured size is left out.
    """
    sizes = sorted({cell.batch_size for cell in profile.cells})
    gammas = sorted({cell.gamma for cell in profile.cells if cell.gamma > 0})
    limits = {}
    for gamma in gammas:
        wins = [size for size in sizes if _can_win(profile, gamma, size, acceptance)]
        if not wins:
            limits[gamma] = 0
        elif wins[-1] < sizes[-1]:
            limits[gamma] = sizes[sizes.index(wins[-1]) + 1] - 1
    return limits


def _can_win(profile: Profile, gamma: int, size: int, acceptance: float) -> bool:
    cells = [cell for cell in profile.cells if cell.batch_size == size]
    rate = {
        (cell.drafter, cell.gamma): sum(acceptance**k for k in range(cell.gamma + 1))
        / cell.step_seconds
        for cell in cells
    }
    mine = [(drafter, value) for (drafter, g), value in rate.items() if g == gamma]
    for drafter, value in mine:
        shorter = [r for (d, g), r in rate.items() if g < gamma and (g == 0 or d == drafter)]
        if all(value * (1 + _SLACK) >= r for r in shorter):
            return True
    # A draft length that was not measured here may win.
    return not mine
