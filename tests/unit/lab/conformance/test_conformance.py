"""The checks pass a sidecar and a report that keep the contract, and name what breaks it."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.conformance.__main__ import app
from lab.conformance.rules import Findings, check_plan, check_reports
from lab.conformance.shim_side import ShimCheck, check_introduction
from lab.conformance.sidecar_side import FakeEngine, engine_spec
from speculation.v1.engine_pb2 import (
    CAPABILITY_DRAFTER,
    ClassCounts,
    EngineSpec,
    ProposalCounts,
    RowGroup,
    StepReport,
)
from speculation.v1.plan_pb2 import MixtureRule, Plan, PlanRow, Probe
from tests.support.sidecar_process import sidecar_process

ENGINE = engine_spec("engine-1")
PLAN = Plan(
    epoch=3, lease_ms=1000,
    rows=[
        PlanRow(
            max_batch_size=8, drafter="mtp+ngram", gamma=3,
            probe=Probe(probe_id=7, drafter="mtp", gamma=5, steps=2),
        )
    ],
)  # fmt: skip


def test_a_real_sidecar_keeps_the_contract(tmp_path: Path) -> None:
    with sidecar_process(tmp_path) as sidecar:
        result = CliRunner().invoke(app, ["sidecar", sidecar.address])
    assert result.exit_code == 0, result.output
    assert result.output == "the contract is kept\n"


def test_no_sidecar_is_said_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["sidecar", f"unix:{tmp_path}/none.sock"])
    assert result.exit_code == 2
    assert "UNAVAILABLE" in result.output


def test_no_engine_is_said_in_one_line(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/check.sock"
    result = CliRunner().invoke(app, ["shim", address, "--wait-seconds", "0.2"])
    assert result.exit_code == 2
    assert "an introduction did not come within 0.2 s" in result.output


def played(steps: int = 4) -> list[StepReport]:
    engine = FakeEngine(ENGINE)
    return [engine.step(PLAN) for _ in range(steps)]


def test_what_the_played_engine_reports_keeps_the_contract() -> None:
    assert check_reports(ENGINE, {3: PLAN}, played(20)).lines() == []


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"step": 1}, "steps increase strictly"),
        ({"gamma": 2}, "drafter and draft length were introduced"),
        ({"step_seconds": 0.0}, "step_seconds is above 0"),
        ({"kv_tokens": 0}, "kv_tokens counts the context"),
        ({"batch_size": 5}, "accepted_counts are gamma + 1 counts of all sequences"),
        ({"plan_epoch": 9}, "plan_epoch is of a plan of this session"),
        ({"drafter": "dflash"}, "a step runs what its plan asks for at its batch size"),
        ({"probe_id": 8}, "probe_id is of the row's probe"),
        ({"groups": [RowGroup(drafter="mtp", accepted_counts=[4])]}, "groups sum up to"),
        ({"groups": [RowGroup(drafter="", gamma=3)]}, "a group names a drafter, or is of rows"),
        (
            {"proposals": [ProposalCounts(drafter="mtp", accepted_counts=[3, 3])]},
            "a drafter proposes once for a row",
        ),
        (
            {"proposals": [ProposalCounts(drafter="x", accepted_counts=[3, 1])]},
            "proposals name a drafter",
        ),
        (
            {
                "proposals": [
                    ProposalCounts(drafter="mtp", accepted_counts=[0, 1], censored_counts=[1])
                ]
            },
            "a step shows the first token of every proposal",
        ),
        # What the sidecar refuses, in its own words.
        (
            {"groups": [RowGroup(drafter="mtp", gamma=3, accepted_counts=[1, 1, 1, 1, 0, 0, 0])]},
            "a sidecar takes the report",
        ),
        (
            {"classes": [ClassCounts(label="a\n", accepted_counts=[1, 0, 0, 0])]},
            "a sidecar takes the report",
        ),
        ({"prefill_tokens": 1 << 30}, "a sidecar takes the report"),
        ({"step_seconds": float("nan")}, "a sidecar takes the report"),
    ],
)
def test_a_report_that_breaks_a_rule_is_named_with_it(change: dict[str, Any], rule: str) -> None:
    reports = played()
    for name, value in change.items():
        reports[-1].ClearField(name)  # type: ignore[arg-type]
        reports[-1].MergeFrom(StepReport(**{name: value}))
    assert any(line.startswith(rule) for line in check_reports(ENGINE, {3: PLAN}, reports).lines())


def test_a_drafter_that_was_lost_is_not_asked_for(tmp_path: Path) -> None:
    engine = EngineSpec()
    engine.CopyFrom(ENGINE)
    engine.lost.add(capability=CAPABILITY_DRAFTER, drafter="dflash")
    engine.lost.add(capability=CAPABILITY_DRAFTER, drafter="mtp", gammas=[5])
    arms = ShimCheck(f"unix:{tmp_path}/none.sock", print, 1.0)._arms(engine)
    assert {drafter for drafter, _ in arms} == {"mtp", "ngram", "mtp+ngram"}
    assert [gamma for drafter, gamma in arms if drafter == "mtp"] == [0, 1, 3]


def test_an_introduction_that_a_sidecar_would_refuse_is_named() -> None:
    findings = Findings()
    check_introduction(findings, ENGINE)
    assert findings.lines() == []
    broken = EngineSpec()
    broken.CopyFrom(ENGINE)
    broken.drafters[3].gammas.append(7)
    check_introduction(findings, broken)
    (line,) = findings.lines()
    assert line.startswith("a sidecar takes the introduction: mixture 'mtp+ngram': 'mtp' has not")


def test_a_probe_that_runs_for_too_long_is_named() -> None:
    reports = played(3)
    reports[2].CopyFrom(reports[1])
    reports[2].step = 3
    lines = check_reports(ENGINE, {3: PLAN}, reports).lines()
    assert lines == ["a probe runs for its steps and no longer: step 3: 3 of 2"]


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (Plan(epoch=1, lease_ms=1, rows=PLAN.rows), "epochs do not go back"),
        (Plan(epoch=3, rows=PLAN.rows), "a plan has a lease"),
        (Plan(epoch=3, lease_ms=1), "a plan has rows"),
        (Plan(epoch=3, lease_ms=1, rows=[*PLAN.rows, *PLAN.rows]), "rows ascend"),
        (
            Plan(epoch=3, lease_ms=1, rows=[PlanRow(max_batch_size=8, drafter="mtp", gamma=4)]),
            "a plan asks for what was introduced",
        ),
        (
            Plan(
                epoch=3, lease_ms=1, rows=PLAN.rows,
                rules=[MixtureRule(drafter="mtp", gamma=3, free_expected=[1.0])],
            ),
            "a rule is of a mixture",
        ),
        (
            Plan(
                epoch=3, lease_ms=1, rows=PLAN.rows,
                rules=[MixtureRule(drafter="mtp+ngram", gamma=3, main_expected=float("nan"))],
            ),
            "a rule's numbers are finite",
        ),
    ],
)  # fmt: skip
def test_a_plan_that_breaks_a_rule_is_named_with_it(plan: Plan, rule: str) -> None:
    findings = Findings()
    check_plan(findings, ENGINE, plan, 2)
    assert any(line.startswith(rule) for line in findings.lines())
