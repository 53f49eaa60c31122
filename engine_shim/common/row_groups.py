"""Counts the rows of a step in which not the same was verified, and what rows show.

A client says that its request must not be drafted for, in whatever way the engine hands extra
parameters on: `{"speculation": false}`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from engine_shim.link.packets import NO_DRAFTER, ClassEntry, GroupEntry

# The most classes of a report that the contract allows; rows of further ones count as of no class.
# A class can outlive its place among those that are kept apart, in a request that runs for long.
CLASSES_MOST: Final = 64
# The parameter, of which False alone means something.
SPECULATION: Final = "speculation"


def groups_with(
    undrafted: Collection[int],
    ended: Collection[int],
    groups: Sequence[GroupEntry],
    main: int,
    accepted: Sequence[int],
    gamma: int,
) -> tuple[GroupEntry, ...]:
    """Returns a step's groups with those of rows that nothing was drafted for, or that had ended.

    undrafted, ended: rows, none in both.  groups: of the other rows, () where all of these have
    used the drafter `main`.  accepted: [B].
    """
    if not groups and len(undrafted) + len(ended) < len(accepted):
        left = {*undrafted, *ended}
        counts = [0] * (gamma + 1)
        for row, length in enumerate(accepted):
            if row not in left:
                counts[length] += 1
        groups = (GroupEntry(main, gamma, counts),)
    found = list(groups)
    if undrafted:
        found.append(GroupEntry(NO_DRAFTER, 0, (len(undrafted),)))
    if ended:
        found.append(GroupEntry(main, 0, (len(ended),), ended=True))
    return tuple(found)


class Evidence:
    """Counts what the rows of a step show about their drafter.

    exact: gamma + 1 counts, censored: gamma counts, as in proto ProposalCounts.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.exact = [0] * (gamma + 1)
        self.censored = [0] * gamma

    def add(self, accepted: int, shown: int) -> None:
        """Adds a row.

        shown: how many of its drafts were compared with tokens of the answer: gamma, or fewer
        where fewer were verified, or where the answer ended before.
        """
        if accepted < shown or shown >= self.gamma:
            self.exact[accepted] += 1
        elif shown:
            self.censored[shown] += 1


def classes_of(
    labels: Sequence[str], accepted: Sequence[int], kept: Mapping[int, int], gamma: int
) -> tuple[ClassEntry, ...]:
    """Counts accepted drafts by class.

    kept: tokens that the answers took of rows that were cut at their end.
    """
    found: dict[str, Evidence] = {}
    for row, (label, length) in enumerate(zip(labels, accepted, strict=True)):
        if label and (label in found or len(found) < CLASSES_MOST):
            shown = kept.get(row, gamma)
            found.setdefault(label, Evidence(gamma)).add(min(length, shown), shown)
    return tuple(
        ClassEntry(label, shows.exact, shows.censored if any(shows.censored) else ())
        for label, shows in found.items()
        if any(shows.exact) or any(shows.censored)
    )
