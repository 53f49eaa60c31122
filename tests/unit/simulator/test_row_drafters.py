"""A mixture's step chooses row by row what the rule says, and tells what it has shown."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.engine_spec import Arm, DrafterSpec, Mixture
from controller.core.model_shapes import DrafterKind
from controller.core.plan import MixtureRule
from simulator.row_drafters import RowDrafterChooser

GAMMA = 4
DRAFTERS = (
    DrafterSpec("eagle", DrafterKind.MTP, (0, GAMMA)),
    DrafterSpec("ngram", DrafterKind.NGRAM, (0, GAMMA)),
    DrafterSpec("both", DrafterKind.MIXTURE, (GAMMA,), mixture=Mixture("eagle", "ngram")),
)
EAGLE, NGRAM, BOTH = range(3)
RULE = MixtureRule(Arm("both", GAMMA), 1.5, (0.5, 1.0, 2.0, 3.0), 2, 0.1)


def choice(eagle, ngram, matches):
    arrays = (np.array(eagle, dtype=np.uint8), np.array(ngram, dtype=np.uint8))
    return RowDrafterChooser(DRAFTERS, arrays, np.array(matches, dtype=np.uint8))


def step(row_choice, running=BOTH, rules=(RULE,), rows=None, positions=None):
    rows = np.arange(len(row_choice._matches)) if rows is None else np.array(rows)
    return row_choice.choose_rows(
        running, GAMMA, rows if positions is None else np.array(positions), rows, rules
    )


def proposals(evidence):
    return {
        (p.drafter, p.match_length): (p.accepted_counts, p.censored_counts)
        for p in evidence.proposals
    }


def test_a_row_uses_the_lookup_where_its_match_promises_more():
    accepted, evidence = step(choice([1, 1, 1, 1], [4, 4, 4, 4], [0, 3, 4, 5]))
    assert accepted.tolist() == [1, 1, 4, 4]
    assert [(g.drafter, g.accepted_counts) for g in evidence.groups] == [
        ("eagle", (0, 2, 0, 0, 0)),
        ("ngram", (0, 0, 0, 0, 2)),
    ]


def test_without_a_rule_the_main_drafter_is_used_in_every_row():
    accepted, evidence = step(choice([1, 2], [4, 4], [5, 5]), rules=())
    assert accepted.tolist() == [1, 2]
    assert [g.drafter for g in evidence.groups] == ["eagle"]


def test_a_proposal_counts_as_far_as_the_step_shows_it():
    # The lookup is used and accepted for 0, 1, 3 and 4: what else would eagle have given?
    _, evidence = step(choice([3, 1, 4, 2], [0, 1, 3, 4], [5, 5, 5, 5]))
    counts = proposals(evidence)
    assert counts["ngram", 5] == ((1, 1, 0, 1, 1), ())
    # 3 tokens after a step of 1: at least 1.  4 after a step of 4, 3 of which are drafts: all 4.
    assert counts["eagle", 0] == ((0, 1, 1, 0, 1), (0, 1, 0, 0))
    assert ("both", 0) not in counts


def test_the_main_drafter_alone_shows_what_the_mixture_would_have_given():
    accepted, evidence = step(choice([1, 3], [0, 4], [0, 5]), running=EAGLE)
    counts = proposals(evidence)
    assert accepted.tolist() == [1, 3]
    assert evidence.groups == ()
    assert counts["both", 0] == ((0, 1, 0, 0, 1), ())
    assert counts["ngram", 0] == ((1, 0, 0, 0, 0), ())


def test_the_lookup_alone_shows_nothing_of_the_main_drafter():
    _, evidence = step(choice([1, 3], [2, 4], [0, 5]), running=NGRAM)
    assert set(proposals(evidence)) == {("ngram", 0), ("ngram", 5)}


def test_a_request_that_the_lookup_fails_in_uses_it_no_more_and_others_do():
    # From position 0 it is never accepted, from position 1 always; both rows have a long match.
    row_choice = choice([1, 1], [0, 4], [5, 5])
    used = [step(row_choice)[1].groups for _ in range(9)]
    assert [g.drafter for g in used[0]] == ["ngram"]
    assert [(g.drafter, sum(g.accepted_counts)) for g in used[-1]] == [("eagle", 1), ("ngram", 1)]


@dataclass
class Row:
    """The rule for one request, in plain words."""

    main: float = 1.0
    free: float = 1.0

    def expected(self, match):
        return RULE.free_expected[min(match, 5) - 2] if match >= 2 else 0.0

    def one(self, running, eagle, ngram, match):
        eagle, ngram, expected = min(eagle, GAMMA), min(ngram, GAMMA), self.expected(match)
        takes_free = match >= 2 and self.free * expected > self.main * RULE.main_expected
        uses = {EAGLE: "eagle", NGRAM: "ngram"}.get(running, "ngram" if takes_free else "eagle")
        accepted = ngram if uses == "ngram" else eagle

        def seen(would, ratio, mean):
            if would <= accepted or accepted + 1 >= GAMMA:
                return would
            return max(accepted + 1, ratio * mean)

        if match >= 2:
            value = seen(ngram, self.free, expected)
            self.free += 0.1 * (value / expected - self.free)
        if running != NGRAM:
            value = seen(eagle, self.main, RULE.main_expected)
            self.main += 0.1 * (value / RULE.main_expected - self.main)
        return accepted


STEPS = st.lists(
    st.tuples(
        st.sampled_from([EAGLE, NGRAM, BOTH]),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 2, 3, 4, 5])),
                 min_size=3, max_size=3),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_a_batch_does_what_each_of_its_rows_would_do_alone(steps):
    draws = np.array([row for _, rows in steps for row in rows]).reshape(-1, 3)
    row_choice, alone = choice(*draws.T), [Row() for _ in range(3)]
    for number, (running, rows) in enumerate(steps):
        accepted, evidence = step(
            row_choice, running, rows=[0, 1, 2], positions=3 * number + np.arange(3)
        )
        expected = [row.one(running, *drawn) for row, drawn in zip(alone, rows, strict=True)]
        assert accepted.tolist() == expected
        by_drafter: dict[str, int] = {}
        for part in evidence.proposals:
            by_drafter[part.drafter] = by_drafter.get(part.drafter, 0) + part.row_count
        assert set(by_drafter.values()) == {3}
    ratios = row_choice._mixtures[0]._ratios[:, :3]
    assert ratios[0] == pytest.approx([row.main for row in alone])
    assert ratios[1] == pytest.approx([row.free for row in alone])


def test_a_request_of_any_number_has_ratios():
    row_choice = choice([0], [4], [5])
    accepted, _ = step(row_choice, rows=[5000], positions=[0])
    assert accepted.tolist() == [4]
