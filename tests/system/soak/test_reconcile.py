"""The reconciliation itself: whatever differs between what ran and what is on record is found."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from controller.core.step_report import StepReport
from speculation.v1 import plan_pb2
from tools.soak import reconcile
from tools.soak.engine_log import EndedRequest, Row, Step
from tools.soak.load import Served
from tools.soak.on_record import RecordedEngine, RecordedReport

SESSION = 7
# Two requests; the second ends a step before the first.
RAN = (
    Step(1, 2, (Row("a", 2), Row("b", 0))),
    Step(2, 3, (Row("a", 1), Row("b", 3)), (EndedRequest("b", 6, 2, 3),)),
    Step(3, 2, (Row("a", 2),), (EndedRequest("a", 9, 3, 5),)),
)
PLAIN = tuple(range(100, 200))
ANSWERS = (
    Served("a", PLAIN[:9], PLAIN, 9, True, 3, 5),
    Served("b", PLAIN[:6], PLAIN, 6, True, 2, 3),
)


def report(step: Step, **changes: object) -> StepReport:
    right: dict[str, object] = {
        "step": step.number,
        "batch_size": len(step.rows),
        "kv_tokens": 100,
        "drafter": "eagle3",
        "gamma": step.gamma,
        "accepted_counts": step.accepted_counts,
        "step_seconds": 0.01,
        "plan_epoch": 5,
    }
    return StepReport(**right | changes)  # type: ignore[arg-type]


def record(*reports: StepReport) -> RecordedEngine:
    """Under one plan: 2 tokens for one sequence, and for more 2 with a probe of 3."""
    rows = [
        plan_pb2.PlanRow(max_batch_size=1, drafter="eagle3", gamma=2),
        plan_pb2.PlanRow(
            max_batch_size=16, drafter="eagle3", gamma=2,
            probe=plan_pb2.Probe(probe_id=1, drafter="eagle3", gamma=3, steps=2),
        ),
    ]  # fmt: skip
    plan = plan_pb2.Plan(epoch=5, rows=rows, overrides=["short"])
    recorded_run = RecordedEngine(
        reports=[RecordedReport(SESSION, r) for r in reports], plans={(SESSION, 5): plan}
    )
    recorded_run.overrides = [frozenset(), frozenset({"short"}), frozenset()]
    return recorded_run


def findings(recorded_run: RecordedEngine, ran: tuple[Step, ...] = RAN) -> list[str]:
    return [
        *reconcile.steps(ran, recorded_run),
        *reconcile.plans(recorded_run),
        *reconcile.served(ran, recorded_run, ANSWERS),
        *reconcile.tokens(ANSWERS),
        *reconcile.overrides(recorded_run, {"short": frozenset({2, 3})}),
    ]


def test_what_agrees_has_no_findings() -> None:
    assert findings(record(*map(report, RAN))) == []


def test_a_step_that_is_counted_as_dropped_is_none() -> None:
    recorded_run = record(report(RAN[0]), report(RAN[2]))
    recorded_run.dropped = 1
    assert findings(recorded_run) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: [r[0], r[2]], "1 steps are not on record, 0 are counted as dropped: [2]"),
        (lambda r: [r[0], *r], "step 1 is on record 2 times"),
        (lambda r: [*r, replace(r[0], step=9)], "step 9 is on record, but never ran"),
        (
            lambda r: [r[0], r[1], replace(r[2], accepted_counts=(0, 1, 0))],
            "step 3: (1, 2, (0, 1, 0)) on record, ran (1, 2, (0, 0, 1))",
        ),
        (
            lambda r: [r[0], r[1], replace(r[2], batch_size=2, accepted_counts=(0, 0, 2))],
            "step 3: (2, 2, (0, 0, 2)) on record, ran (1, 2, (0, 0, 1))",
        ),
        (
            lambda r: [r[0], r[1], replace(r[2], gamma=3, accepted_counts=(0, 0, 1, 0))],
            "step 3: gamma 3 at B = 1, its plan 5 has [2]",
        ),
        (lambda r: [r[0], r[1], replace(r[2], plan_epoch=6)], "its plan 6 has []"),
    ],
)
def test_what_is_on_record_otherwise_is_found(
    change: Callable[[list[StepReport]], list[StepReport]], text: str
) -> None:
    complaints = findings(record(*change([report(step) for step in RAN])))
    assert any(text in finding for finding in complaints), complaints


def test_losses_that_were_counted_but_did_not_happen_are_found() -> None:
    recorded_run = record(*map(report, RAN))
    recorded_run.dropped = 2
    assert "0 steps are not on record, 2 are counted as dropped: []" in findings(recorded_run)


def test_refusals_and_gaps_are_found() -> None:
    recorded_run = record(*map(report, RAN))
    recorded_run.refused, recorded_run.gaps = (
        ["step 2 does not follow step 2"],
        ["a frame was torn"],
    )
    assert findings(recorded_run) == [
        "a report was refused: step 2 does not follow step 2",
        "a frame was torn",
    ]


def test_a_step_that_the_engines_own_counters_do_not_know_is_found() -> None:
    ran = (RAN[0], RAN[1], replace(RAN[2], ended=(EndedRequest("a", 9, 2, 3),)))
    complaints = findings(record(*map(report, ran)), ran)
    assert any("SGLang counts 2 steps and 3 accepted drafts, 3 and 5 ran" in f for f in complaints)
    assert any("answered with 3 steps and 5 accepted" in f for f in complaints)
    assert any("13 tokens are on record and 0 in steps that were dropped" in f for f in complaints)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (replace(ANSWERS[0], tokens=PLAIN[:8]), "8 tokens were served, 9 gained, 9 asked for"),
        (replace(ANSWERS[0], tokens=(*PLAIN[:8], 0)), "its tokens are not plain decoding's"),
    ],
)
def test_tokens_that_are_wrong_are_found(answer: Served, text: str) -> None:
    complaints = [
        *reconcile.served(RAN, record(*map(report, RAN)), [answer]),
        *reconcile.tokens([answer]),
    ]
    assert len(complaints) == 1
    assert text in complaints[0]


def test_an_override_that_is_not_obeyed_or_never_ends_is_found() -> None:
    recorded_run = record(*map(report, RAN))
    assert reconcile.overrides(recorded_run, {"short": frozenset({2})}) == [
        "step 2 ran 3 under short"
    ]
    recorded_run.overrides = [frozenset({"short"})]
    assert reconcile.overrides(
        recorded_run, {"short": frozenset({2, 3}), "other": frozenset()}
    ) == [
        "override short is in force at the end",
        "override other: no step ran under it",
    ]
