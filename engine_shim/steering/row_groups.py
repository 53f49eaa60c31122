"""Counts the rows of a step in which not the same was verified.

A client says that its request must not be drafted for, in whatever way the engine hands extra
parameters on: `{"speculation": false}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine_shim.link.packets import NO_DRAFTER, ClassEntry, GroupEntry

# The most classes of a report that the contract allows; rows of further ones count as of no class.
# A class can outlive its place among those that are kept apart, in a request that runs for long.
CLASSES_MOST: Final = 64
# The parameter, of which False alone means something.
SPECULATION: Final = "speculation"


def groups_with(
    undrafted: Sequence[int],
    groups: Sequence[GroupEntry],
    main: int,
    accepted: Sequence[int],
    gamma: int,
) -> tuple[GroupEntry, ...]:
    """Returns a step's groups with one of the rows that must not be drafted for.

    groups: of the other rows, () where all of these have used the drafter `main`.  accepted: [B].
    """
    if not groups and len(undrafted) < len(accepted):
        left = set(undrafted)
        counts = [0] * (gamma + 1)
        for row, length in enumerate(accepted):
            if row not in left:
                counts[length] += 1
        groups = (GroupEntry(main, gamma, counts),)
    return (*groups, GroupEntry(NO_DRAFTER, 0, (len(undrafted),)))


def classes_of(
    labels: Sequence[str], accepted: Sequence[int], gamma: int
) -> tuple[ClassEntry, ...]:
    """Counts accepted drafts by class."""
    counts: dict[str, list[int]] = {}
    for label, length in zip(labels, accepted, strict=True):
        if label and (label in counts or len(counts) < CLASSES_MOST):
            counts.setdefault(label, [0] * (gamma + 1))[length] += 1
    return tuple(ClassEntry(label, found) for label, found in counts.items())
