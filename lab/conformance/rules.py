"""The rules of the contract for reports and plans, each with a name, and what breaks them.

A broken rule is noted once, with the first place where it was broken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from controller.core.errors import InvalidReportError
from controller.wire.reports import report_from_proto
from lab.harness.sidecar import row_for
from speculation.v1.engine_pb2 import EngineSpec, StepReport
from speculation.v1.plan_pb2 import Plan


@dataclass
class Findings:
    """Holds broken rules by their names: the first place of each, and how often it was broken."""

    first: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def expect(self, holds: bool, rule: str, where: str) -> None:
        """Notes the rule as broken unless it holds."""
        if not holds:
            self.first.setdefault(rule, where)
            self.times[rule] = self.times.get(rule, 0) + 1

    def lines(self) -> list[str]:
        """Returns a line for each broken rule."""
        return [
            f"{rule}: {where}" + (f" (and {n} times more)" if (n := self.times[rule] - 1) else "")
            for rule, where in self.first.items()
        ]


def check_plan(found: Findings, engine: EngineSpec, plan: Plan, newest: int) -> None:
    """Notes the rules that a plan breaks.  newest: the largest epoch before it, 0 for none."""
    where = f"plan {plan.epoch}"
    arms = {(drafter.name, gamma) for drafter in engine.drafters for gamma in drafter.gammas}
    found.expect(plan.epoch >= newest, "epochs do not go back", f"{where} after {newest}")
    found.expect(plan.lease_ms > 0, "a plan has a lease", where)
    found.expect(bool(plan.rows), "a plan has rows", where)
    sizes = [row.max_batch_size for row in plan.rows]
    found.expect(all(a < b for a, b in pairwise([0, *sizes])), "rows ascend", f"{where}: {sizes}")
    for row in plan.rows:
        asked = [(row.drafter, row.gamma)]
        if row.HasField("probe"):
            asked.append((row.probe.drafter, row.probe.gamma))
            found.expect(
                row.probe.probe_id > 0 and row.probe.steps > 0, "a probe has an id and steps", where
            )
        found.expect(set(asked) <= arms, "a plan asks for what was introduced", f"{where}: {asked}")
        found.expect(
            not row.drafter_asleep or any(gamma == 0 for _, gamma in asked),
            "a drafter sleeps at gamma 0 only",
            where,
        )
    mixtures = {d.name for d in engine.drafters if d.HasField("mixture")}
    for rule in plan.rules:
        numbers = [rule.main_expected, rule.ratio_weight, *rule.free_expected]
        found.expect(
            rule.drafter in mixtures and (rule.drafter, rule.gamma) in arms,
            "a rule is of a mixture at one of its draft lengths",
            f"{where}: {rule.drafter} at {rule.gamma}",
        )
        found.expect(
            bool(rule.free_expected) and all(math.isfinite(n) and n >= 0 for n in numbers),
            "a rule's numbers are finite and not negative",
            where,
        )


def check_reports(
    engine: EngineSpec, plans: Mapping[int, Plan], reports: Sequence[StepReport]
) -> Findings:
    """Returns the rules that the reports break.

    plans: all that were sent in the session, by epoch.
    """
    found = Findings()
    gammas = {drafter.name: set(drafter.gammas) for drafter in engine.drafters}
    probed: dict[int, int] = {}
    step = epoch = 0
    for report in reports:
        where = f"step {report.step}"
        found.expect(report.step > step, "steps increase strictly", where)
        found.expect(
            report.gamma in gammas.get(report.drafter, ()),
            "drafter and draft length were introduced",
            f"{where}: {report.drafter!r} at {report.gamma}",
        )
        found.expect(report.step_seconds > 0, "step_seconds is above 0", where)
        found.expect(report.kv_tokens > 0, "kv_tokens counts the context", where)
        found.expect(
            1 <= report.batch_size <= engine.max_batch_size, "batch_size is possible", where
        )
        _check_taken(found, report)
        _check_counts(found, report, where)
        _check_rows(found, report, set(gammas), where)
        said = report.plan_epoch
        found.expect(said == 0 or said in plans, "plan_epoch is of a plan of this session", where)
        found.expect(said == 0 or said >= epoch, "plan_epoch does not go back", where)
        step, epoch = report.step, max(epoch, said)
        if said in plans:
            _check_choice(found, plans[said], report, probed, where)
    return found


def _check_taken(found: Findings, report: StepReport) -> None:
    """Checks what else a sidecar refuses: labels, widths, bounds of lists and numbers."""
    try:
        report_from_proto(report)
    except InvalidReportError as error:
        found.expect(holds=False, rule="a sidecar takes the report", where=str(error))


def _check_counts(found: Findings, report: StepReport, where: str) -> None:
    counts = report.accepted_counts
    found.expect(
        len(counts) == report.gamma + 1 and sum(counts) == report.batch_size,
        "accepted_counts are gamma + 1 counts of all sequences",
        f"{where}: {list(counts)} at gamma {report.gamma}, batch {report.batch_size}",
    )
    for part in report.classes:
        found.expect(
            len(part.accepted_counts) == report.gamma + 1,
            "a class has gamma + 1 counts",
            f"{where}: {part.label!r}",
        )


def _check_rows(found: Findings, report: StepReport, names: set[str], where: str) -> None:
    if report.groups:
        total = [0] * (report.gamma + 1)
        for group in report.groups:
            found.expect(
                group.drafter in names or (not group.drafter and group.gamma == 0),
                "a group names a drafter, or is of rows at gamma 0 that must not be drafted for",
                f"{where}: {group.drafter!r} at {group.gamma}",
            )
            for k, count in enumerate(group.accepted_counts[: report.gamma + 1]):
                total[k] += count
        found.expect(
            total == list(report.accepted_counts), "groups sum up to accepted_counts", where
        )
    rows: dict[str, int] = {}
    for part in report.proposals:
        found.expect(part.drafter in names, "proposals name a drafter", f"{where}: {part.drafter}")
        width = len(part.accepted_counts) - 1
        found.expect(
            width >= 1 and len(part.censored_counts) in {0, width},
            "censored_counts have one entry less than accepted_counts",
            f"{where}: {part.drafter}",
        )
        found.expect(
            not part.censored_counts or part.censored_counts[0] == 0,
            "a step shows the first token of every proposal",
            f"{where}: {part.drafter}",
        )
        mine = sum(part.accepted_counts) + sum(part.censored_counts)
        rows[part.drafter] = rows.get(part.drafter, 0) + mine
    found.expect(
        all(many <= report.batch_size for many in rows.values()),
        "a drafter proposes once for a row",
        f"{where}: {rows}",
    )


def _check_choice(
    found: Findings, plan: Plan, report: StepReport, probed: dict[int, int], where: str
) -> None:
    row = row_for(plan, report.batch_size)
    asked, ran = (row.drafter, row.gamma), (report.drafter, report.gamma)
    if report.probe_id:
        probed[report.probe_id] = probed.get(report.probe_id, 0) + 1
        found.expect(
            row.HasField("probe") and row.probe.probe_id == report.probe_id,
            "probe_id is of the row's probe",
            where,
        )
        found.expect(
            probed[report.probe_id] <= max(row.probe.steps, 1),
            "a probe runs for its steps and no longer",
            f"{where}: {probed[report.probe_id]} of {row.probe.steps}",
        )
        asked = (row.probe.drafter, row.probe.gamma)
    if not (report.flags.unsteered or report.flags.mixed_choice):
        # At gamma 0 no drafter runs, so the report may name either one.
        found.expect(
            ran == asked or ran[1] == asked[1] == 0,
            "a step runs what its plan asks for at its batch size",
            f"{where}: {ran} where plan {plan.epoch} asks for {asked}",
        )
