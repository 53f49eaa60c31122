"""Adds to a step's report the groups of rows that differ, and the evidence of rows and proposals.

A client disables drafting for its request with the extra parameter `{"speculation": false}`, in the
way in which the engine forwards extra parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from speculation.v1.engine_pb2 import StepReport

# The contract's limit of classes in a report; rows of further classes count as without a class.
# A long request can belong to a class that is no longer counted separately.
MAX_CLASSES: Final = 64
# The name of the parameter; only the value False has an effect.
SPECULATION_PARAMETER: Final = "speculation"


def add_group(
    report: StepReport, drafter: str, gamma: int, counts: Sequence[int], *, ended: bool = False
) -> None:
    """Adds rows with the same drafter and gamma; the arguments are the fields of `RowGroup`."""
    group = report.groups.add()
    if drafter:
        group.drafter = drafter
    group.gamma = gamma
    group.accepted_counts.extend(counts)
    if ended:
        group.ended = True


def add_remaining_groups(
    report: StepReport,
    undrafted: Collection[int],
    ended: Collection[int],
    main_drafter: str,
    accepted: Sequence[int],
    gamma: int,
) -> None:
    """Adds to a step's groups the rows without drafts and the rows that had ended.

    undrafted, ended: disjoint sets of rows.  main_drafter: the drafter of all other rows, if the
    report has no groups of these yet.  accepted: [B].
    """
    if not report.groups and len(undrafted) + len(ended) < len(accepted):
        excluded_rows = {*undrafted, *ended}
        counts = [0] * (gamma + 1)
        for row, length in enumerate(accepted):
            if row not in excluded_rows:
                counts[length] += 1
        add_group(report, main_drafter, gamma, counts)
    if undrafted:
        add_group(report, "", 0, (len(undrafted),))
    if ended:
        add_group(report, main_drafter, 0, (len(ended),), ended=True)


class DraftEvidence:
    """Counts the accepted lengths that the rows of a step show for their drafter.

    exact: gamma + 1 counts, censored: gamma counts, as in proto ProposalCounts.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.exact = [0] * (gamma + 1)
        self.censored = [0] * gamma

    def add(self, accepted: int, compared_drafts: int) -> None:
        """Adds a row.

        compared_drafts: how many of its drafts were compared with tokens of the answer: gamma, or
        fewer if fewer were verified or if the answer ended earlier.
        """
        if accepted < compared_drafts or compared_drafts >= self.gamma:
            self.exact[accepted] += 1
        elif compared_drafts:
            self.censored[compared_drafts] += 1

    @property
    def is_empty(self) -> bool:
        """Whether no row was counted."""
        return not any(self.exact) and not any(self.censored)

    def add_to_report(self, report: StepReport, drafter: str) -> None:
        """Adds the counts to the proposals of a report."""
        add_proposals(report, drafter, 0, self.exact, self.censored)


def add_proposals(
    report: StepReport,
    drafter: str,
    match_length: int,
    accepted_counts: Sequence[int],
    censored_counts: Sequence[int] = (),
) -> None:
    """Adds counts of proposals that were not used; the arguments are those of `ProposalCounts`."""
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
    kept_tokens: Mapping[int, int],
    gamma: int,
) -> None:
    """Counts accepted drafts by class.

    kept_tokens: row -> tokens that the answer took, for rows that were cut at the answer's end.
    """
    evidence_by_label: dict[str, DraftEvidence] = {}
    for row, (label, length) in enumerate(zip(labels, accepted, strict=True)):
        if label and (label in evidence_by_label or len(evidence_by_label) < MAX_CLASSES):
            compared_drafts = kept_tokens.get(row, gamma)
            evidence_by_label.setdefault(label, DraftEvidence(gamma)).add(
                min(length, compared_drafts), compared_drafts
            )
    for label, evidence in evidence_by_label.items():
        if not evidence.is_empty:
            entry = report.classes.add()
            entry.label = label
            entry.accepted_counts.extend(evidence.exact)
            if any(evidence.censored):
                entry.censored_counts.extend(evidence.censored)
