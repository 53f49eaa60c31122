"""Counts for a step's report which drafter the rows used, and the acceptance of each proposal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from engine_shim.common.row_groups import add_group, add_proposals
from speculation.v1.engine_pb2 import StepReport


class Role(NamedTuple):
    """Says which drafters a step uses.

    main: index of the drafter that drafts; None: the lookup alone.  is_mixed: whether the lookup's
    proposal may replace the main drafter's in single rows.
    """

    main: int | None
    is_mixed: bool


# The argument `cut_row_tokens` if no row was cut at the end of its answer.
NO_CUT_ROWS: Final[Mapping[int, int]] = {}


def count_rows(
    report: StepReport,
    outcome_cpu: Any,
    accepted: Sequence[int],
    role: Role,
    lookup_index: int,
    mixture_index: int | None,
    names: Sequence[str],
    cut_row_tokens: Mapping[int, int] = NO_CUT_ROWS,
) -> None:
    """Adds the counts of a step's rows to its report.

    outcome_cpu: [B, 5], as `RowDrafterChooser.learn` returns it.  accepted: [B] accepted drafts, as
    the host counts them.  lookup_index, mixture_index: indices of drafters; mixture_index is the
    main drafter's mixture, None if it has none.  names: of all drafters.  cut_row_tokens: tokens
    that the answers took, for rows that were cut at the end of an answer.
    """
    gamma = report.gamma
    outcome = np.asarray(outcome_cpu, dtype=np.int64)
    prefers_lookup, match, main_accepted, lookup_accepted, accepted_counts = outcome.T
    # Without a rule it is unknown what the mixture would have chosen.
    has_rule, prefers_lookup = bool((prefers_lookup >= 0).all()), prefers_lookup > 0
    host_accepted = np.array(accepted, dtype=np.int64)
    if cut_row_tokens:
        # Tokens after the end of an answer are no evidence: a step compares `accepted_counts` + 1.
        accepted_counts = accepted_counts.copy()
        for row, tokens in cut_row_tokens.items():
            accepted_counts[row] = tokens - 1
        main_accepted = np.minimum(main_accepted, accepted_counts + 1)
        lookup_accepted = np.minimum(lookup_accepted, accepted_counts + 1)
    _count_lookup(report, names[lookup_index], match, lookup_accepted, accepted_counts, gamma)
    if role.is_mixed and role.main is not None:
        for drafter, rows in ((role.main, ~prefers_lookup), (lookup_index, prefers_lookup)):
            if rows.any():
                add_group(report, names[drafter], gamma, _histogram(host_accepted[rows], gamma))
        _count_proposals(report, names[role.main], 0, main_accepted, accepted_counts, gamma)
    elif role.main is not None and mixture_index is not None and has_rule:
        mixture_accepted = np.where(prefers_lookup, lookup_accepted, main_accepted)
        _count_proposals(report, names[mixture_index], 0, mixture_accepted, accepted_counts, gamma)


def count_compared(report: StepReport, outcome_cpu: Any, main: str, lookup: str) -> None:
    """Adds the counts of a step at gamma 0, in which only first tokens were compared.

    main: the drafter that reads the tokens; its column is -1 if it proposes nothing.
    """
    outcome = np.asarray(outcome_cpu, dtype=np.int64)
    _, match, main_accepted, lookup_accepted, accepted_counts = outcome.T
    _count_lookup(report, lookup, match, lookup_accepted, accepted_counts, 1)
    if len(main_accepted) and main_accepted[0] >= 0:
        _count_proposals(report, main, 0, main_accepted, accepted_counts, 1)


def _count_lookup(
    report: StepReport,
    lookup: str,
    match: np.ndarray,
    proposal_accepted: np.ndarray,
    accepted_counts: np.ndarray,
    gamma: int,
) -> None:
    """Adds the acceptance of a lookup's proposals, by the length of the match."""
    for length in np.unique(match):
        if length:
            rows = match == length
            _count_proposals(
                report, lookup, int(length), proposal_accepted[rows], accepted_counts[rows], gamma
            )
    if unmatched_rows := int((match == 0).sum()):
        # Without a match, no draft would have been accepted.
        add_proposals(report, lookup, 0, (unmatched_rows, *[0] * gamma))


def _count_proposals(
    report: StepReport,
    drafter: str,
    match_length: int,
    proposal_accepted: np.ndarray,
    accepted: np.ndarray,
    gamma: int,
) -> None:
    # A step compares `accepted` + 1 tokens.
    is_censored = (proposal_accepted == accepted + 1) & (proposal_accepted < gamma)
    censored = np.bincount(proposal_accepted[is_censored], minlength=gamma)
    add_proposals(
        report,
        drafter,
        match_length,
        _histogram(proposal_accepted[~is_censored], gamma),
        censored.tolist(),
    )


def _histogram(values: np.ndarray, gamma: int) -> list[int]:
    counts: list[int] = np.bincount(values, minlength=gamma + 1).tolist()
    return counts
