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


# The argument `kept` if no row was cut at the end of its answer.
NOT_CUT: Final[Mapping[int, int]] = {}


def count_rows(
    report: StepReport,
    outcome_cpu: Any,
    accepted: Sequence[int],
    role: Role,
    lookup: int,
    mixture: int | None,
    names: Sequence[str],
    kept: Mapping[int, int] = NOT_CUT,
) -> None:
    """Adds the counts of a step's rows to its report.

    outcome_cpu: [B, 5], as `RowChoice.learn` returns it.  accepted: [B] accepted drafts, as the
    host counts them.  lookup, mixture: indices of drafters; mixture: the main drafter's mixture,
    None if it has none.  names: of all drafters.  kept: tokens that the answers took, for rows that
    were cut at the end of an answer.
    """
    gamma = report.gamma
    chose, match, main_shown, free_shown, found = np.asarray(outcome_cpu, dtype=np.int64).T
    # Without a rule it is unknown what the mixture would have chosen.
    has_rule, chose = bool((chose >= 0).all()), chose > 0
    counted = np.array(accepted, dtype=np.int64)
    if kept:
        # Tokens after the end of an answer are no evidence: a step compares `found` + 1 tokens.
        found = found.copy()
        for row, tokens in kept.items():
            found[row] = tokens - 1
        main_shown = np.minimum(main_shown, found + 1)
        free_shown = np.minimum(free_shown, found + 1)
    _count_lookup(report, names[lookup], match, free_shown, found, gamma)
    if role.is_mixed and role.main is not None:
        for drafter, rows in ((role.main, ~chose), (lookup, chose)):
            if rows.any():
                add_group(report, names[drafter], gamma, _histogram(counted[rows], gamma))
        _count_proposals(report, names[role.main], 0, main_shown, found, gamma)
    elif role.main is not None and mixture is not None and has_rule:
        would = np.where(chose, free_shown, main_shown)
        _count_proposals(report, names[mixture], 0, would, found, gamma)


def count_watched(report: StepReport, outcome_cpu: Any, main: str, lookup: str) -> None:
    """Adds the counts of a step at gamma 0, in which only first tokens were compared.

    main: the drafter that reads the tokens; its column is -1 if it proposes nothing.
    """
    _, match, main_shown, free_shown, found = np.asarray(outcome_cpu, dtype=np.int64).T
    _count_lookup(report, lookup, match, free_shown, found, 1)
    if len(main_shown) and main_shown[0] >= 0:
        _count_proposals(report, main, 0, main_shown, found, 1)


def _count_lookup(
    report: StepReport,
    lookup: str,
    match: np.ndarray,
    shown: np.ndarray,
    found: np.ndarray,
    gamma: int,
) -> None:
    """Adds the acceptance of a lookup's proposals, by the length of the match."""
    for length in np.unique(match):
        if length:
            rows = match == length
            _count_proposals(report, lookup, int(length), shown[rows], found[rows], gamma)
    if without := int((match == 0).sum()):
        # Without a match, no draft would have been accepted.
        add_proposals(report, lookup, 0, (without, *[0] * gamma))


def _count_proposals(
    report: StepReport,
    drafter: str,
    match: int,
    shown: np.ndarray,
    accepted: np.ndarray,
    gamma: int,
) -> None:
    # A step compares `accepted` + 1 tokens.
    is_censored = (shown == accepted + 1) & (shown < gamma)
    censored = np.bincount(shown[is_censored], minlength=gamma)
    add_proposals(report, drafter, match, _histogram(shown[~is_censored], gamma), censored.tolist())


def _histogram(values: np.ndarray, gamma: int) -> list[int]:
    found: list[int] = np.bincount(values, minlength=gamma + 1).tolist()
    return found
