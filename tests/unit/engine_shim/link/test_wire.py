from typing import Any

import pytest

from engine_shim.link import packets
from engine_shim.link.errors import UnusablePlanError
from engine_shim.link.packets import (
    ClassEntry,
    GroupEntry,
    ProbeEntry,
    ProposalsEntry,
    ReportPacket,
    RowEntry,
    RuleEntry,
)
from engine_shim.link.wire import Translator, session_tag
from speculation.v1.engine_pb2 import (
    ClassCounts,
    Drafter,
    EngineSpec,
    ProposalCounts,
    RowGroup,
    StepFlags,
    StepReport,
)
from speculation.v1.plan_pb2 import REGIME_MODE_ONLINE, MixtureRule, Plan, PlanRow, Probe, Regime

ENGINE = EngineSpec(
    engine_id="e",
    drafters=[Drafter(name="eagle3", gammas=[0, 1, 3]), Drafter(name="dflash", gammas=[0, 7])],
)
TRANSLATOR = Translator(ENGINE)
REPORT = ReportPacket(10, 3, 900, 1, 1, (2, 1), 0.02, 0, 4, 8, 5, 0.25, 3)


def test_a_report_names_its_drafter_and_keeps_every_number():
    assert TRANSLATOR.report(REPORT, 5) == StepReport(
        step=10,
        batch_size=3,
        kv_tokens=900,
        drafter="dflash",
        gamma=1,
        accepted_counts=[2, 1],
        step_seconds=0.02,
        plan_epoch=4,
        probe_id=8,
        update_seconds=0.25,
        draft_version=3,
    )


@pytest.mark.parametrize("learnt", [None, 0, 2])
def test_weights_learnt_online_are_said_to_be_learnt(learnt: int | None):
    message = TRANSLATOR.report(REPORT._replace(learnt_from=learnt), 5)
    assert (message.learnt_from if message.HasField("learnt_from") else None) == learnt


ENDED = GroupEntry(0, 0, (4,), ended=True)


def test_rows_that_differ_go_by_the_names_of_their_drafters():
    message = TRANSLATOR.report(
        REPORT._replace(
            prefill_tokens=77,
            groups=(GroupEntry(1, 1, (0, 2)), GroupEntry(packets.NO_DRAFTER, 0, (1,)), ENDED),
            proposals=(ProposalsEntry(0, 3, (1, 0, 0), (0, 2)), ProposalsEntry(0, 0, (1, 0), (0,))),
            classes=(ClassEntry("letters", (1, 0)), ClassEntry("code", (0, 0), (1,))),
            delivered_tokens=0,
        ),
        5,
    )
    assert message.prefill_tokens == 77
    assert list(message.groups) == [
        RowGroup(drafter="dflash", gamma=1, accepted_counts=[0, 2]),
        RowGroup(drafter="", gamma=0, accepted_counts=[1]),
        RowGroup(drafter="eagle3", gamma=0, accepted_counts=[4], ended=True),
    ]
    assert list(message.proposals) == [
        ProposalCounts(
            drafter="eagle3", match_length=3, accepted_counts=[1, 0, 0], censored_counts=[0, 2]
        ),
        ProposalCounts(drafter="eagle3", accepted_counts=[1, 0]),
    ]
    assert list(message.classes) == [
        ClassCounts(label="letters", accepted_counts=[1, 0]),
        ClassCounts(label="code", accepted_counts=[0, 0], censored_counts=[1]),
    ]
    assert message.HasField("delivered_tokens")


def rule(**changes):
    known: dict[str, Any] = {
        "drafter": "dflash",
        "gamma": 7,
        "main_expected": 1.5,
        "free_expected": [0.5, 2.0],
    }
    return MixtureRule(**({**known, "least_match": 2, "ratio_weight": 0.125} | changes))


def test_a_rule_becomes_an_index():
    plan = Plan(epoch=1, rows=[good_row()], lease_ms=1, rules=[rule()])
    assert TRANSLATOR.plan(plan, 5, 0).rules == (RuleEntry(1, 7, 1.5, (0.5, 2.0), 2, 0.125),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "medusa"}, "drafter 'medusa'"),
        ({"gamma": 3}, "did not introduce gamma 3"),
        ({"free_expected": []}, "a rule for 0 match lengths"),
        ({"main_expected": float("inf")}, "a rule with the numbers"),
    ],
)
def test_a_rule_that_the_engine_cannot_use_is_refused(changes, message):
    plan = Plan(epoch=1, rows=[good_row()], lease_ms=1, rules=[rule(**changes)])
    with pytest.raises(UnusablePlanError, match=message):
        TRANSLATOR.plan(plan, 5, 0)


def test_flags_are_told_apart():
    flags = packets.FIRST_USE | packets.UNSTEERED
    message = TRANSLATOR.report(REPORT._replace(flags=flags), 5)
    assert message.flags == StepFlags(first_use=True, unsteered=True)
    everything = TRANSLATOR.report(REPORT._replace(flags=packets.ALL_FLAGS), 5)
    assert all(getattr(everything.flags, f.name) for f in StepFlags.DESCRIPTOR.fields)


def test_a_plan_of_an_earlier_session_is_not_named_to_this_one():
    message = TRANSLATOR.report(REPORT, 6)
    assert (message.plan_epoch, message.probe_id) == (0, 0)
    unsaid = TRANSLATOR.report(REPORT._replace(session=0), 6)
    assert (unsaid.plan_epoch, unsaid.probe_id) == (4, 8)


def test_a_report_of_an_unknown_drafter_is_refused():
    with pytest.raises(IndexError):
        TRANSLATOR.report(REPORT._replace(drafter_index=2), 5)


def test_a_plan_becomes_indices():
    plan = Plan(
        epoch=9,
        rows=[
            PlanRow(
                max_batch_size=4,
                drafter="eagle3",
                gamma=3,
                probe=Probe(probe_id=2, drafter="dflash", gamma=7, steps=5),
            ),
            PlanRow(max_batch_size=16, drafter="dflash", gamma=0, drafter_asleep=True),
        ],
        regime=Regime(mode=REGIME_MODE_ONLINE, stride=20),
        lease_ms=1500,
        draft_version=7,
    )
    assert TRANSLATOR.plan(plan, 5, 123) == packets.PlanPacket(
        session=5,
        epoch=9,
        arrival_ns=123,
        lease_ms=1500,
        regime_mode=REGIME_MODE_ONLINE,
        regime_stride=20,
        rows=(
            RowEntry(4, 0, 3, asleep=False, probe=ProbeEntry(2, 1, 7, 5)),
            RowEntry(16, 1, 0, asleep=True, probe=None),
        ),
        draft_version=7,
    )


@pytest.mark.parametrize("mode", [-1, 9, 2**31 - 1])
def test_a_regime_that_this_version_does_not_know_is_unspecified(mode):
    plan = Plan(epoch=1, rows=[good_row()], lease_ms=1)
    plan.regime.mode = mode
    assert TRANSLATOR.plan(plan, 5, 0).regime_mode == 0


def good_row() -> PlanRow:
    return PlanRow(max_batch_size=4, drafter="eagle3", gamma=3)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(lease_ms=1), "0 rows"),
        (Plan(rows=[good_row()]), "no lease"),
        (Plan(lease_ms=1, rows=[good_row(), good_row()]), "4 after 4"),
        (Plan(lease_ms=1, rows=[PlanRow(drafter="eagle3")]), "0 after 0"),
        (
            Plan(lease_ms=1, rows=[PlanRow(max_batch_size=1, drafter="eagle3", gamma=7)]),
            "did not introduce gamma 7 of drafter 'eagle3'",
        ),
        (
            Plan(lease_ms=1, rows=[PlanRow(max_batch_size=1, drafter="medusa", gamma=1)]),
            "drafter 'medusa'",
        ),
        (
            Plan(
                lease_ms=1,
                rows=[
                    PlanRow(max_batch_size=1, drafter="eagle3", gamma=1, drafter_asleep=True),
                ],
            ),
            "with the drafter asleep",
        ),
        (
            Plan(
                lease_ms=1,
                rows=[
                    PlanRow(
                        max_batch_size=1,
                        drafter="eagle3",
                        gamma=1,
                        probe=Probe(probe_id=1, drafter="eagle3", gamma=3),
                    )
                ],
            ),
            "has no steps",
        ),
    ],
)
def test_a_plan_that_the_engine_cannot_run_is_refused(plan, message):
    with pytest.raises(UnusablePlanError, match=message):
        TRANSLATOR.plan(plan, 5, 0)


def test_session_tags_differ_and_are_never_zero():
    tags = {session_tag(f"session-{i}") for i in range(1000)}
    assert len(tags) == 1000
    assert 0 not in tags


def test_a_lease_that_is_too_long_is_cut():
    rows = [PlanRow(max_batch_size=4, drafter="eagle3", gamma=1)]
    for asked, used in ((1, 1), (30_000, 30_000), (2**32 - 1, 30_000)):
        plan = Plan(epoch=1, rows=rows, lease_ms=asked)
        assert Translator(ENGINE, 30.0).plan(plan, 5, 0).lease_ms == used
