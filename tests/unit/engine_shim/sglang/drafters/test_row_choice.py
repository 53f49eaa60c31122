"""The choice of rows, what steps show of proposals, and the counts that are reported of them."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.sglang.drafters.lookup import MIN_MATCH_TOKENS, Proposal
from engine_shim.sglang.drafters.row_choice import RowChoice, RowProposals
from engine_shim.sglang.drafters.row_counts import NO_CUT_ROWS, Role, count_compared, count_rows
from speculation.v1.engine_pb2 import StepReport
from speculation.v1.plan_pb2 import MixtureRule
from tests.support.step_reports import group, proposals

MAIN, LOOKUP, MIXTURE = 0, 1, 2
NAMES = ("main", "lookup", "mixture")
WEIGHT = 0.25


def rule_of(main: float, *free: float, gamma: int = 4) -> MixtureRule:
    return MixtureRule(
        drafter=NAMES[MIXTURE],
        gamma=gamma,
        main_expected=main,
        free_expected=free,
        least_match=MIN_MATCH_TOKENS,
        ratio_weight=WEIGHT,
    )


def counts_of(
    outcome: torch.Tensor,
    accepted: Sequence[int],
    gamma: int,
    role: Role,
    kept: Mapping[int, int] = NO_CUT_ROWS,
) -> StepReport:
    report = StepReport(gamma=gamma)
    mixture = None if role.main is None else MIXTURE
    count_rows(report, outcome, accepted, role, LOOKUP, mixture, NAMES, kept)
    return report


def watched(outcome: torch.Tensor) -> StepReport:
    report = StepReport()
    count_compared(report, outcome, NAMES[MAIN], NAMES[LOOKUP])
    return report


def proposal(tokens: Sequence[Sequence[int]], match: Sequence[int]) -> Proposal:
    return Proposal(torch.tensor(tokens), torch.tensor(match))


def leading(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


ROW = st.tuples(
    st.lists(st.integers(0, 1), min_size=4, max_size=4),
    st.lists(st.integers(0, 1), min_size=4, max_size=4),
    st.sampled_from([0, 2, 3, 5]),
    st.lists(st.integers(0, 1), min_size=5, max_size=5),
)


@given(st.lists(ROW, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_a_step_shows_of_each_proposal_what_its_tokens_tell(rows, is_mixed, has_rule):
    choice = RowChoice(8, "cpu")
    main, free, match, truth = (list(column) for column in zip(*rows, strict=True))
    rule = (
        choice.find_rule((rule_of(1.0, 0.5, 2.0, 2.0, 3.0),), NAMES[MIXTURE], 4)
        if has_rule
        else None
    )
    tokens, drafted = choice.choose(
        torch.arange(len(rows)), torch.tensor(main), proposal(free, match), rule, is_mixed=is_mixed
    )
    chose = [has_rule and length >= 3 for length in match]
    used = [f if c and is_mixed else m for m, f, c in zip(main, free, chose, strict=True)]
    assert tokens.tolist() == used
    accepted = [leading(u, t) for u, t in zip(used, truth, strict=True)]
    verified = [[*t[: a + 1], *[9] * (4 - a)] for t, a in zip(truth, accepted, strict=True)]
    outcome = choice.observe(drafted, torch.tensor(verified), torch.tensor(accepted) + 1)
    role = Role(MAIN, is_mixed=is_mixed and has_rule)
    counts = counts_of(outcome, accepted, 4, role)
    expected: Counter[tuple[int, int, int, bool]] = Counter()
    for m, f, length, c, a, t in zip(main, free, match, chose, accepted, truth, strict=True):
        shown = {MAIN: leading(m, t[: a + 1]), LOOKUP: leading(f, t[: a + 1])}
        if not length:
            shown[LOOKUP] = 0
        if not role.is_mixed:
            if has_rule:
                shown[MIXTURE] = shown[LOOKUP if c else MAIN]
            del shown[MAIN]
        for drafter, n in shown.items():
            key = length if drafter == LOOKUP else 0
            expected[drafter, key, n, n == a + 1 and n < 4] += 1
    assert counted(counts) == expected
    assert sum(sum(part.accepted_counts) for part in counts.groups) == (
        len(rows) if role.is_mixed else 0
    )


def counted(counts: StepReport) -> Counter[tuple[int, int, int, bool]]:
    """By drafter, match length, tokens and whether they are censored: rows."""
    proposal_counts: Counter[tuple[int, int, int, bool]] = Counter()
    for part in counts.proposals:
        for censored in (False, True):
            for n, many in enumerate(part.censored_counts if censored else part.accepted_counts):
                if many:
                    proposal_counts[NAMES.index(part.drafter), part.match_length, n, censored] += (
                        many
                    )
    return proposal_counts


def test_groups_hold_the_rows_of_each_drafter():
    outcome = torch.tensor([[1, 5, 1, 3, 3], [0, 0, 2, 0, 2], [1, 2, 0, 1, 1]])
    groups = counts_of(outcome, [3, 2, 1], 4, Role(MAIN, is_mixed=True)).groups
    assert list(groups) == [group("main", [0, 0, 1, 0, 0]), group("lookup", [0, 1, 0, 1, 0])]


def test_a_lookup_that_drafts_alone_tells_of_itself_only():
    choice = RowChoice(8, "cpu")
    rows = torch.tensor([1, 2])
    free = proposal([[1, 1], [1, 1]], [3, 0])
    drafted = RowProposals(rows, 2, None, free, None, None, is_mixed=False)
    outcome = choice.observe(drafted, torch.tensor([[1, 0, 0], [0, 0, 0]]), torch.tensor([2, 1]))
    counts = counts_of(outcome, [1, 0], 2, Role(None, is_mixed=False))
    assert not counts.groups
    assert list(counts.proposals) == [
        proposals("lookup", [0, 1, 0], match_length=3),
        proposals("lookup", [1, 0, 0]),
    ]


def test_what_lies_behind_the_end_of_an_answer_shows_nothing_of_a_proposal():
    # Three accepted of 4 by the main drafter, of which the answer took 2; the lookup agreed with 1.
    outcome = torch.tensor([[0, 5, 4, 1, 3], [0, 4, 2, 4, 3]])
    counts = counts_of(outcome, [3, 3], 4, Role(MAIN, is_mixed=True), kept={0: 2, 1: 2})
    assert counted(counts) == {
        (LOOKUP, 5, 1, False): 1,
        (LOOKUP, 4, 2, True): 1,
        (MAIN, 0, 2, True): 2,
    }


def test_at_gamma_0_first_tokens_are_compared_and_nothing_is_accepted():
    choice = RowChoice(8, "cpu")
    free = proposal([[5], [5], [6]], [3, 0, 2])
    main = torch.tensor([[5], [6], [5]])
    drafted = RowProposals(
        torch.arange(3), 1, main, free, None, None, is_mixed=False, is_verified=False
    )
    outcome = choice.observe(drafted, torch.tensor([[5], [6], [6]]), torch.tensor([1, 1, 1]))
    counts = watched(outcome)
    assert not counts.groups
    assert list(counts.proposals) == [
        proposals("lookup", [0, 1], match_length=2),
        proposals("lookup", [0, 1], match_length=3),
        proposals("lookup", [1, 0]),
        proposals("main", [1, 2]),
    ]


def test_at_gamma_0_a_batch_without_a_row_that_may_be_drafted_for_has_no_counts():
    assert not watched(torch.zeros((0, 5))).proposals


def steps(
    choice: RowChoice, rule: MixtureRule, main: Sequence[int], free: Sequence[int], times: int
) -> list[bool]:
    """Whether row 3 prefers the lookup, step after step; all of them verify 1, 1, 1, 1, 1."""
    choices = []
    rows, truth = torch.tensor([3]), torch.ones((1, 5), dtype=torch.int64)
    for _ in range(times):
        device_rule = choice.find_rule((rule,), NAMES[MIXTURE], 4)
        tokens, drafted = choice.choose(
            rows, torch.tensor([main]), proposal([free], [5]), device_rule, is_mixed=True
        )
        known = (tokens == truth[:, :4]).cumprod(1).sum(1) + 1
        choice.observe(drafted, truth, known)
        assert drafted.prefers_lookup is not None
        choices.append(bool(drafted.prefers_lookup[0]))
    return choices


def test_a_request_that_differs_from_what_is_expected_is_learnt_and_forgotten():
    choice = RowChoice(8, "cpu")
    # The lookup is expected to be worth less, and is accepted whole in this request.
    choices = steps(choice, rule_of(2.0, 1.5), [1, 0, 0, 0], [1, 1, 1, 1], 12)
    assert choices[0] is False
    assert all(choices[6:])
    choice.reset_rows([3])
    assert steps(choice, rule_of(2.0, 1.5), [1, 0, 0, 0], [1, 1, 1, 1], 1) == [False]


def test_what_a_step_cannot_show_does_not_count_against_a_proposal():
    choice = RowChoice(8, "cpu")
    # The main drafter is used and rejected at once: the step shows one token of the lookup's.
    choices = steps(choice, rule_of(3.0, 2.9), [0, 0, 0, 0], [1, 1, 1, 1], 3)
    assert choices[-1] is True


def test_a_proposal_that_was_cut_short_keeps_what_is_expected_of_it():
    choice = RowChoice(8, "cpu")
    # One token was seen of a proposal from which 2.9 are expected: that is no reason for less.
    steps(choice, rule_of(3.0, 2.9), [0, 0, 0, 0], [1, 1, 1, 1], 1)
    # The main drafter's ratio is three quarters by now: the lookup's must be above 0.9.
    choices = steps(choice, rule_of(1.2, 1.0), [0, 0, 0, 0], [1, 1, 1, 1], 1)
    assert choices == [True]


def test_without_a_rule_the_main_drafter_is_used():
    choice = RowChoice(8, "cpu")
    main = torch.tensor([[1, 2]])
    tokens, drafted = choice.choose(
        torch.tensor([0]), main, proposal([[3, 4]], [5]), None, is_mixed=True
    )
    assert tokens.tolist() == main.tolist()
    assert not drafted.is_mixed


@pytest.mark.parametrize(("match", "wanted"), [(0, False), (2, False), (3, True), (5, True)])
def test_a_longer_match_than_the_rule_names_counts_as_its_longest(match, wanted):
    choice = RowChoice(8, "cpu")
    rule = choice.find_rule((rule_of(1.0, 0.5, 1.5),), NAMES[MIXTURE], 4)
    _, drafted = choice.choose(
        torch.tensor([0]), torch.zeros((1, 4), dtype=torch.int64),
        proposal([[1, 1, 1, 1]], [match]), rule, is_mixed=True,
    )  # fmt: skip
    assert drafted.prefers_lookup is not None
    assert drafted.prefers_lookup.tolist() == [wanted]
