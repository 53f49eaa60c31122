"""Counts, in a step's report, the rows in which not the same was verified, and what rows show.

A client says that its request must not be drafted for, in whatever way the engine hands extra
parameters on: `{"speculation": false}`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from speculation.v1.engine_pb2 import StepReport

# The most classes of a report that the contract allows; rows of further ones count as of no class.
# A class can outlive its place among those that are kept apart, in a request that runs for long.
CLASSES_MOST: Final = 64
# The parameter, of which False alone means something.
SPECULATION: Final = "speculation"


def add_group(
    report: StepReport, drafter: str, gamma: int, counts: Sequence[int], *, ended: bool = False
) -> None:
    """Adds rows that were drafted alike.  The arguments are the fields of proto `RowGroup`."""
    group = report.groups.add()
    if drafter:
        group.drafter = drafter
    group.gamma = gamma
    group.accepted_counts.extend(counts)
    if ended:
        group.ended = True


def add_left(
    report: StepReport,
    undrafted: Collection[int],
    ended: Collection[int],
    main: str,
    accepted: Sequence[int],
    gamma: int,
) -> None:
    """Adds to a step's groups those of rows that nothing was drafted for, or that had ended.

    undrafted, ended: rows, none in both.  main: the drafter that all others have used, if the
    report has no groups of these yet.  accepted: [B].
    """
    if not report.groups and len(undrafted) + len(ended) < len(accepted):
        left = {*undrafted, *ended}
        counts = [0] * (gamma + 1)
        for row, length in enumerate(accepted):
            if row not in left:
                counts[length] += 1
        add_group(report, main, gamma, counts)
    if undrafted:
        add_group(report, "", 0, (len(undrafted),))
    if ended:
        add_group(report, main, 0, (len(ended),), ended=True)


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

    @property
    def is_empty(self) -> bool:
        """Whether no row has shown anything."""
        return not any(self.exact) and not any(self.censored)

    def add_to(self, report: StepReport, drafter: str) -> None:
        """Adds it to the proposals of a report."""
        add_proposals(report, drafter, 0, self.exact, self.censored)


def add_proposals(
    report: StepReport,
    drafter: str,
    match_length: int,
    accepted_counts: Sequence[int],
    censored_counts: Sequence[int] = (),
) -> None:
    """Adds what proposals would have given.  The arguments are the fields of `ProposalCounts`."""
    entry = report.proposals.add()
    entry.drafter = drafter
    if match_length:
        entry.match_length = match_length
    entry.accepted_counts.extend(accepted_counts)
    if any(censored_counts):
        entry.censored_counts.extend(censored_counts)


def add_classes(
    report: StepReport,
    labels: Sequence[str],
    accepted: Sequence[int],
    kept: Mapping[int, int],
    gamma: int,
) -> None:
    """Counts accepted drafts by class.

    kept: tokens that the answers took of rows that were cut at their end.
    """
    found: dict[str, Evidence] = {}
    for row, (label, length) in enumerate(zip(labels, accepted, strict=True)):
        if label and (label in found or len(found) < CLASSES_MOST):
            shown = kept.get(row, gamma)
            found.setdefault(label, Evidence(gamma)).add(min(length, shown), shown)
    for label, shows in found.items():
        if not shows.is_empty:
            entry = report.classes.add()
            entry.label = label
            entry.accepted_counts.extend(shows.exact)
            if any(shows.censored):
                entry.censored_counts.extend(shows.censored)
