"""Counts, for a step's report, which drafter the rows used and what each would have given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from engine_shim.link.packets import GroupEntry, ProposalsEntry


class Role(NamedTuple):
    """Names what a step drafts with.

    main: the drafter that drafts, by its place in the introduction; None: the lookup alone.
    is_mixed: the lookup's proposal may be used in its place, row by row.
    """

    main: int | None
    is_mixed: bool


class RowCounts(NamedTuple):
    """The parts of a report that tell of rows."""

    groups: tuple[GroupEntry, ...]
    proposals: tuple[ProposalsEntry, ...]


# Rows that were cut at the end of their answers: none.
NOT_CUT: Final[Mapping[int, int]] = {}
# Of a step whose rows are all alike.
NOTHING_APART: Final = RowCounts((), ())


def count_rows(
    outcome_cpu: Any,
    accepted: Sequence[int],
    gamma: int,
    role: Role,
    lookup: int,
    mixture: int | None,
    kept: Mapping[int, int] = NOT_CUT,
) -> RowCounts:
    """Counts a step.

    outcome_cpu: [B, 5], as `RowChoice.learn` returns it.  accepted: [B] accepted drafts, as the
    host counts them.  lookup, mixture: places in the introduction; mixture: of the main drafter's,
    None if it has none.  kept: tokens that the answers took of rows that were cut at their end.
    """
    chose, match, main_shown, free_shown, found = np.asarray(outcome_cpu, dtype=np.int64).T
    # Without a rule nobody knows what the mixture would have done.
    has_rule, chose = bool((chose >= 0).all()), chose > 0
    counted = np.array(accepted, dtype=np.int64)
    if kept:
        # What lies behind the end of an answer shows nothing: a step shows found + 1 tokens.
        found = found.copy()
        for row, tokens in kept.items():
            found[row] = tokens - 1
        main_shown = np.minimum(main_shown, found + 1)
        free_shown = np.minimum(free_shown, found + 1)
    groups: list[GroupEntry] = []
    proposals = [
        _proposals(lookup, int(length), free_shown[match == length], found[match == length], gamma)
        for length in np.unique(match)
        if length
    ]
    if len(without := found[match == 0]):
        # Where nothing was found again nothing would have been accepted.
        exact = (len(without), *[0] * gamma)
        proposals.append(ProposalsEntry(lookup, 0, exact, (0,) * gamma))
    if role.is_mixed and role.main is not None:
        groups += [
            GroupEntry(drafter, gamma, _histogram(counted[rows], gamma))
            for drafter, rows in ((role.main, ~chose), (lookup, chose))
            if rows.any()
        ]
        proposals.append(_proposals(role.main, 0, main_shown, found, gamma))
    elif role.main is not None and mixture is not None and has_rule:
        would = np.where(chose, free_shown, main_shown)
        proposals.append(_proposals(mixture, 0, would, found, gamma))
    return RowCounts(tuple(groups), tuple(proposals))


def count_watched(outcome_cpu: Any, main: int, lookup: int) -> RowCounts:
    """Counts a step at gamma 0, in which only first tokens were compared.

    main: place of the drafter that reads along; its column is -1 where it proposes nothing.
    """
    _, match, main_shown, free_shown, found = np.asarray(outcome_cpu, dtype=np.int64).T
    proposals = [
        _proposals(lookup, int(length), free_shown[match == length], found[match == length], 1)
        for length in np.unique(match)
        if length
    ]
    if without := int((match == 0).sum()):
        proposals.append(ProposalsEntry(lookup, 0, (without, 0), (0,)))
    if len(main_shown) and main_shown[0] >= 0:
        proposals.append(_proposals(main, 0, main_shown, found, 1))
    return RowCounts((), tuple(proposals))


def _proposals(
    drafter: int, match: int, shown: np.ndarray, accepted: np.ndarray, gamma: int
) -> ProposalsEntry:
    # A step shows accepted + 1 tokens.
    is_censored = (shown == accepted + 1) & (shown < gamma)
    censored = np.bincount(shown[is_censored], minlength=gamma)
    return ProposalsEntry(
        drafter, match, _histogram(shown[~is_censored], gamma), tuple(censored.tolist())
    )


def _histogram(values: np.ndarray, gamma: int) -> tuple[int, ...]:
    return tuple(np.bincount(values, minlength=gamma + 1).tolist())
