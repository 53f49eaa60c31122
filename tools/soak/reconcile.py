"""Compares what is on record with what really ran, by step, by plan and by token.

Every function returns findings, one line each; an empty list means that nothing is wrong.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from controller.core.step_report import StepReport
from lab.harness.sidecar import find_row
from speculation.v1 import plan_pb2
from tools.soak.engine_log import EndedRequest, Step
from tools.soak.load import Served
from tools.soak.on_record import RecordedEngine

# The most findings of one kind that are reported.
_MAX_SHOWN = 5


def steps(executed_steps: Sequence[Step], record: RecordedEngine) -> list[str]:
    """Every step once, or counted as dropped; the same batch, draft length and accepted counts."""
    problems = [f"a report was refused: {text}" for text in record.refused]
    problems += record.gaps
    times = Counter(recorded.report.step for recorded in record.reports)
    problems += _first_few(f"step {n} is on record {k} times" for n, k in times.items() if k > 1)
    by_number = {step.number: step for step in executed_steps}
    problems += _first_few(
        f"step {n} is on record, but never ran" for n in times if n not in by_number
    )
    missing = sorted(by_number.keys() - times.keys())
    if len(missing) != record.dropped:
        problems.append(
            f"{len(missing)} steps are not on record, {record.dropped} are counted as dropped: "
            f"{missing[:_MAX_SHOWN]}"
        )
    problems += _first_few(
        f"step {recorded.report.step}: {_report_facts(recorded.report)} on record, ran "
        f"{_step_facts(step)}"
        for recorded in record.reports
        if (step := by_number.get(recorded.report.step))
        and _step_facts(step) != _report_facts(recorded.report)
    )
    return problems


def plans(record: RecordedEngine) -> list[str]:
    """Returns the steps that did not run the arm which their plan demands."""
    return _first_few(
        f"step {recorded.report.step}: gamma {recorded.report.gamma} at B = "
        f"{recorded.report.batch_size}, its "
        f"plan {recorded.report.plan_epoch} has {sorted(allowed)}"
        for recorded in record.reports
        if recorded.report.plan_epoch
        and recorded.report.gamma
        not in (
            allowed := _planned_gammas(
                record.plans.get((recorded.session, recorded.report.plan_epoch)),
                recorded.report.batch_size,
            )
        )
    )


def served(
    executed_steps: Sequence[Step], record: RecordedEngine, answers: Sequence[Served]
) -> list[str]:
    """SGLang's own counters, of each request and of all, against what was accepted."""
    accepted_by_request: dict[str, list[int]] = defaultdict(list)
    ended: dict[str, EndedRequest] = {}
    for step in executed_steps:
        for row in step.rows:
            accepted_by_request[row.rid].append(row.accepted)
        ended |= {end.rid: end for end in step.ended}
    problems = _first_few(
        f"request {rid}: SGLang counts {end.verify_steps} steps and {end.accepted} accepted "
        f"drafts, {len(accepted_by_request[rid])} and {sum(accepted_by_request[rid])} ran"
        for rid, end in ended.items()
        if (end.verify_steps, end.accepted)
        != (len(accepted_by_request[rid]), sum(accepted_by_request[rid]))
    )
    problems += _first_few(
        f"request {answer.rid}: answered with {answer.verify_steps} steps and {answer.accepted} "
        "accepted drafts, "
        f"ended with {ended.get(answer.rid)}"
        for answer in answers
        if answer.is_complete
        and (
            answer.rid not in ended
            or (ended[answer.rid].verify_steps, ended[answer.rid].accepted)
            != (answer.verify_steps, answer.accepted)
        )
    )
    # The prefill gives the first token; the last step may give more than was asked for.
    problems += _first_few(
        f"request {answer.rid}: {len(answer.tokens)} tokens were served, "
        f"{1 + _tokens(accepted_by_request[answer.rid])} "
        f"gained, {answer.token_limit} asked for"
        for answer in answers
        if answer.is_complete
        and len(answer.tokens)
        != min(answer.token_limit, 1 + _tokens(accepted_by_request[answer.rid]))
    )
    recorded_steps = {recorded.report.step for recorded in record.reports}
    recorded_tokens = served_tokens(record)
    dropped = sum(step.tokens for step in executed_steps if step.number not in recorded_steps)
    engine_count = sum(end.verify_steps + end.accepted for end in ended.values())
    if recorded_tokens + dropped != engine_count:
        problems.append(
            f"{recorded_tokens} tokens are on record and {dropped} in steps that were dropped, "
            "SGLang "
            f"counts {engine_count}"
        )
    return problems


def served_tokens(record: RecordedEngine) -> int:
    """Tokens that sequences gained by the reports on record, bonus tokens included."""
    return sum(_reported_tokens(recorded.report) for recorded in record.reports)


def tokens(answers: Iterable[Served]) -> list[str]:
    """Every token is plain decoding's, also of a request that was ended early."""
    return _first_few(
        f"request {answer.rid}: its tokens are not plain decoding's"
        for answer in answers
        if answer.tokens != answer.plain[: len(answer.tokens)]
    )


def overrides(record: RecordedEngine, allowed_gammas: dict[str, frozenset[int]]) -> list[str]:
    """Each override was in force and has ended, and the steps under it obey it.

    allowed_gammas: the draft lengths that each allows, by its id.
    """
    problems = []
    step_counts = Counter[str]()
    for recorded in record.reports:
        plan = record.plans.get((recorded.session, recorded.report.plan_epoch))
        for name in plan.overrides if plan is not None else ():
            step_counts[name] += 1
            if recorded.report.gamma not in allowed_gammas.get(name, frozenset()):
                problems.append(
                    f"step {recorded.report.step} ran {recorded.report.gamma} under {name}"
                )
    problems = _first_few(problems)
    for name in allowed_gammas:
        if not step_counts[name]:
            problems.append(f"override {name}: no step ran under it")
        if record.overrides and name in record.overrides[-1]:
            problems.append(f"override {name} is in force at the end")
    return problems


def _step_facts(step: Step) -> tuple[int, int, tuple[int, ...]]:
    return len(step.rows), step.gamma, step.accepted_counts


def _report_facts(report: StepReport) -> tuple[int, int, tuple[int, ...]]:
    return report.batch_size, report.gamma, tuple(report.accepted_counts)


def _tokens(accepted: Iterable[int]) -> int:
    return sum(count + 1 for count in accepted)


def _reported_tokens(report: StepReport) -> int:
    return sum((k + 1) * count for k, count in enumerate(report.accepted_counts))


def _planned_gammas(plan: plan_pb2.Plan | None, batch_size: int) -> set[int]:
    if plan is None:
        return set()
    row = find_row(plan, batch_size)
    return {row.gamma, row.probe.gamma} if row.HasField("probe") else {row.gamma}


def _first_few(findings: Iterable[str]) -> list[str]:
    """The first few, and how many more there are."""
    all_findings = list(findings)
    omitted = len(all_findings) - _MAX_SHOWN
    return (
        [*all_findings[:_MAX_SHOWN], f"... and {omitted} more of these"]
        if omitted > 0
        else all_findings
    )
