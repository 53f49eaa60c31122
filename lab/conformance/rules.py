"""The rules of the contract for reports and plans, each with a name, and what breaks them.

A broken rule is noted once, with the first place where it was broken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from controller.core.errors import InvalidReportError
from controller.wire.reports import report_from_proto
from lab.harness.sidecar import find_row
from speculation.v1.engine_pb2 import EngineSpec, StepReport
from speculation.v1.plan_pb2 import Plan


@dataclass
class Findings:
    """Holds broken rules by their names: the first place of each, and how often it was broken."""

    first: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def expect(self, holds: bool, rule: str, location: str) -> None:
        """Notes the rule as broken unless it holds."""
        if not holds:
            self.first.setdefault(rule, location)
            self.times[rule] = self.times.get(rule, 0) + 1

    def lines(self) -> list[str]:
        """Returns a line for each broken rule."""
        return [
            f"{rule}: {location}"
            + (f" (and {n} times more)" if (n := self.times[rule] - 1) else "")
            for rule, location in self.first.items()
        ]


def check_plan(findings: Findings, engine: EngineSpec, plan: Plan, newest: int) -> None:
    """Notes the rules that a plan breaks.  newest: the largest epoch before it, 0 for none."""
    location = f"plan {plan.epoch}"
    arms = {(drafter.name, gamma) for drafter in engine.drafters for gamma in drafter.gammas}
    findings.expect(plan.epoch >= newest, "epochs do not go back", f"{location} after {newest}")
    findings.expect(plan.lease_ms > 0, "a plan has a lease", location)
    findings.expect(bool(plan.rows), "a plan has rows", location)
    sizes = [row.max_batch_size for row in plan.rows]
    findings.expect(
        all(a < b for a, b in pairwise([0, *sizes])), "rows ascend", f"{location}: {sizes}"
    )
    for row in plan.rows:
        requested_arms = [(row.drafter, row.gamma)]
        if row.HasField("probe"):
            requested_arms.append((row.probe.drafter, row.probe.gamma))
            findings.expect(
                row.probe.probe_id > 0 and row.probe.steps > 0,
                "a probe has an id and steps",
                location,
            )
        findings.expect(
            set(requested_arms) <= arms,
            "a plan asks for what was introduced",
            f"{location}: {requested_arms}",
        )
        findings.expect(
            not row.drafter_asleep or any(gamma == 0 for _, gamma in requested_arms),
            "a drafter sleeps at gamma 0 only",
            location,
        )
    mixtures = {d.name for d in engine.drafters if d.HasField("mixture")}
    for rule in plan.rules:
        numbers = [rule.main_expected, rule.ratio_weight, *rule.free_expected]
        findings.expect(
            rule.drafter in mixtures and (rule.drafter, rule.gamma) in arms,
            "a rule is of a mixture at one of its draft lengths",
            f"{location}: {rule.drafter} at {rule.gamma}",
        )
        findings.expect(
            bool(rule.free_expected) and all(math.isfinite(n) and n >= 0 for n in numbers),
            "a rule's numbers are finite and not negative",
            location,
        )


def check_reports(
    engine: EngineSpec, plans: Mapping[int, Plan], reports: Sequence[StepReport]
) -> Findings:
    """Returns the rules that the reports break.

    plans: all that were sent in the session, by epoch.
    """
    findings = Findings()
    gammas = {drafter.name: set(drafter.gammas) for drafter in engine.drafters}
    probed: dict[int, int] = {}
    step = epoch = 0
    for report in reports:
        location = f"step {report.step}"
        findings.expect(report.step > step, "steps increase strictly", location)
        findings.expect(
            report.gamma in gammas.get(report.drafter, ()),
            "drafter and draft length were introduced",
            f"{location}: {report.drafter!r} at {report.gamma}",
        )
        findings.expect(report.step_seconds > 0, "step_seconds is above 0", location)
        findings.expect(report.kv_tokens > 0, "kv_tokens counts the context", location)
        findings.expect(
            1 <= report.batch_size <= engine.max_batch_size, "batch_size is possible", location
        )
        _check_conversion(findings, report)
        _check_counts(findings, report, location)
        _check_rows(findings, report, set(gammas), location)
        plan_epoch = report.plan_epoch
        findings.expect(
            plan_epoch == 0 or plan_epoch in plans,
            "plan_epoch is of a plan of this session",
            location,
        )
        findings.expect(
            plan_epoch == 0 or plan_epoch >= epoch, "plan_epoch does not go back", location
        )
        step, epoch = report.step, max(epoch, plan_epoch)
        if plan_epoch in plans:
            _check_choice(findings, plans[plan_epoch], report, probed, location)
    return findings


def _check_conversion(findings: Findings, report: StepReport) -> None:
    """Checks what else a sidecar refuses: labels, widths, bounds of lists and numbers."""
    try:
        report_from_proto(report)
    except InvalidReportError as error:
        findings.expect(holds=False, rule="a sidecar takes the report", location=str(error))


def _check_counts(findings: Findings, report: StepReport, location: str) -> None:
    counts = report.accepted_counts
    findings.expect(
        len(counts) == report.gamma + 1 and sum(counts) == report.batch_size,
        "accepted_counts are gamma + 1 counts of all sequences",
        f"{location}: {list(counts)} at gamma {report.gamma}, batch {report.batch_size}",
    )
    for part in report.classes:
        findings.expect(
            len(part.accepted_counts) == report.gamma + 1,
            "a class has gamma + 1 counts",
            f"{location}: {part.label!r}",
        )


def _check_rows(findings: Findings, report: StepReport, names: set[str], location: str) -> None:
    if report.groups:
        total = [0] * (report.gamma + 1)
        for group in report.groups:
            findings.expect(
                group.drafter in names or (not group.drafter and group.gamma == 0),
                "a group names a drafter, or is of rows at gamma 0 that must not be drafted for",
                f"{location}: {group.drafter!r} at {group.gamma}",
            )
            for k, count in enumerate(group.accepted_counts[: report.gamma + 1]):
                total[k] += count
        findings.expect(
            total == list(report.accepted_counts), "groups sum up to accepted_counts", location
        )
    rows: dict[str, int] = {}
    for part in report.proposals:
        findings.expect(
            part.drafter in names, "proposals name a drafter", f"{location}: {part.drafter}"
        )
        width = len(part.accepted_counts) - 1
        findings.expect(
            width >= 1 and len(part.censored_counts) in {0, width},
            "censored_counts have one entry less than accepted_counts",
            f"{location}: {part.drafter}",
        )
        findings.expect(
            not part.censored_counts or part.censored_counts[0] == 0,
            "a step shows the first token of every proposal",
            f"{location}: {part.drafter}",
        )
        proposed_rows = sum(part.accepted_counts) + sum(part.censored_counts)
        rows[part.drafter] = rows.get(part.drafter, 0) + proposed_rows
    findings.expect(
        all(row_count <= report.batch_size for row_count in rows.values()),
        "a drafter proposes once for a row",
        f"{location}: {rows}",
    )


def _check_choice(
    findings: Findings, plan: Plan, report: StepReport, probed: dict[int, int], location: str
) -> None:
    row = find_row(plan, report.batch_size)
    planned_arm, executed_arm = (row.drafter, row.gamma), (report.drafter, report.gamma)
    if report.probe_id:
        probed[report.probe_id] = probed.get(report.probe_id, 0) + 1
        findings.expect(
            row.HasField("probe") and row.probe.probe_id == report.probe_id,
            "probe_id is of the row's probe",
            location,
        )
        findings.expect(
            probed[report.probe_id] <= max(row.probe.steps, 1),
            "a probe runs for its steps and no longer",
            f"{location}: {probed[report.probe_id]} of {row.probe.steps}",
        )
        planned_arm = (row.probe.drafter, row.probe.gamma)
    if not (report.flags.unsteered or report.flags.mixed_choice):
        # At gamma 0 no drafter runs, so the report may name either one.
        findings.expect(
            executed_arm == planned_arm or executed_arm[1] == planned_arm[1] == 0,
            "a step runs what its plan asks for at its batch size",
            f"{location}: {executed_arm} where plan {plan.epoch} asks for {planned_arm}",
        )
