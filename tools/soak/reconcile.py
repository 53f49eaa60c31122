"""Compares what is on record with what really ran, by step, by plan and by token.

Every function returns findings, one line each; an empty list means that nothing is wrong.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from controller.core.step_report import StepReport
from lab.harness.sidecar import row_for
from speculation.v1 import plan_pb2
from tools.soak.engine_log import Ended, Step
from tools.soak.load import Served
from tools.soak.on_record import OnRecord

# The most findings of one kind that are reported.
_SHOWN = 5


def steps(ran: Sequence[Step], record: OnRecord) -> list[str]:
    """Every step once, or counted as dropped; the same batch, draft length and accepted counts."""
    found = [f"a report was refused: {text}" for text in record.refused]
    found += record.gaps
    times = Counter(told.report.step for told in record.told)
    found += _some(f"step {n} is on record {k} times" for n, k in times.items() if k > 1)
    by_number = {step.number: step for step in ran}
    found += _some(f"step {n} is on record, but never ran" for n in times if n not in by_number)
    missing = sorted(by_number.keys() - times.keys())
    if len(missing) != record.dropped:
        found.append(
            f"{len(missing)} steps are not on record, {record.dropped} are counted as dropped: "
            f"{missing[:_SHOWN]}"
        )
    found += _some(
        f"step {told.report.step}: {_of_report(told.report)} on record, ran {_of_step(step)}"
        for told in record.told
        if (step := by_number.get(told.report.step)) and _of_step(step) != _of_report(told.report)
    )
    return found


def plans(record: OnRecord) -> list[str]:
    """What a step ran is what the plan that it names asks for in its batch."""
    return _some(
        f"step {told.report.step}: gamma {told.report.gamma} at B = {told.report.batch_size}, its "
        f"plan {told.report.plan_epoch} has {sorted(allowed)}"
        for told in record.told
        if told.report.plan_epoch
        and told.report.gamma
        not in (
            allowed := _gammas(
                record.plans.get((told.session, told.report.plan_epoch)), told.report.batch_size
            )
        )
    )


def served(ran: Sequence[Step], record: OnRecord, answers: Sequence[Served]) -> list[str]:
    """SGLang's own counters, of each request and of all, against what was accepted."""
    gained: dict[str, list[int]] = defaultdict(list)
    ended: dict[str, Ended] = {}
    for step in ran:
        for row in step.rows:
            gained[row.rid].append(row.accepted)
        ended |= {end.rid: end for end in step.ended}
    found = _some(
        f"request {rid}: SGLang counts {end.verify_steps} steps and {end.accepted} accepted "
        f"drafts, {len(gained[rid])} and {sum(gained[rid])} ran"
        for rid, end in ended.items()
        if (end.verify_steps, end.accepted) != (len(gained[rid]), sum(gained[rid]))
    )
    found += _some(
        f"request {a.rid}: answered with {a.verify_steps} steps and {a.accepted} accepted drafts, "
        f"ended with {ended.get(a.rid)}"
        for a in answers
        if a.whole
        and (
            a.rid not in ended
            or (ended[a.rid].verify_steps, ended[a.rid].accepted) != (a.verify_steps, a.accepted)
        )
    )
    # The prefill gives the first token; the last step may give more than was asked for.
    found += _some(
        f"request {a.rid}: {len(a.tokens)} tokens were served, {1 + _tokens(gained[a.rid])} "
        f"gained, {a.asked} asked for"
        for a in answers
        if a.whole and len(a.tokens) != min(a.asked, 1 + _tokens(gained[a.rid]))
    )
    on_record = {told.report.step for told in record.told}
    told_of = served_tokens(record)
    dropped = sum(step.tokens for step in ran if step.number not in on_record)
    counted = sum(end.verify_steps + end.accepted for end in ended.values())
    if told_of + dropped != counted:
        found.append(
            f"{told_of} tokens are on record and {dropped} in steps that were dropped, SGLang "
            f"counts {counted}"
        )
    return found


def served_tokens(record: OnRecord) -> int:
    """Tokens that sequences gained by the reports on record, bonus tokens included."""
    return sum(_tokens_of(told.report) for told in record.told)


def tokens(answers: Iterable[Served]) -> list[str]:
    """Every token is plain decoding's, also of a request that was ended early."""
    return _some(
        f"request {answer.rid}: its tokens are not plain decoding's"
        for answer in answers
        if answer.tokens != answer.plain[: len(answer.tokens)]
    )


def overrides(record: OnRecord, gammas_of: dict[str, frozenset[int]]) -> list[str]:
    """Each override was in force and has ended, and the steps under it obey it.

    gammas_of: the draft lengths that each allows, by its id.
    """
    found = []
    ran = Counter[str]()
    for told in record.told:
        plan = record.plans.get((told.session, told.report.plan_epoch))
        for name in plan.overrides if plan is not None else ():
            ran[name] += 1
            if told.report.gamma not in gammas_of.get(name, frozenset()):
                found.append(f"step {told.report.step} ran {told.report.gamma} under {name}")
    found = _some(found)
    for name in gammas_of:
        if not ran[name]:
            found.append(f"override {name}: no step ran under it")
        if record.overrides and name in record.overrides[-1]:
            found.append(f"override {name} is in force at the end")
    return found


def _of_step(step: Step) -> tuple[int, int, tuple[int, ...]]:
    return len(step.rows), step.gamma, step.accepted_counts


def _of_report(report: StepReport) -> tuple[int, int, tuple[int, ...]]:
    return report.batch_size, report.gamma, tuple(report.accepted_counts)


def _tokens(accepted: Iterable[int]) -> int:
    return sum(count + 1 for count in accepted)


def _tokens_of(report: StepReport) -> int:
    return sum((k + 1) * count for k, count in enumerate(report.accepted_counts))


def _gammas(plan: plan_pb2.Plan | None, batch_size: int) -> set[int]:
    if plan is None:
        return set()
    row = row_for(plan, batch_size)
    return {row.gamma, row.probe.gamma} if row.HasField("probe") else {row.gamma}


def _some(findings: Iterable[str]) -> list[str]:
    """The first few, and how many more there are."""
    every = list(findings)
    rest = len(every) - _SHOWN
    return [*every[:_SHOWN], f"... and {rest} more of these"] if rest > 0 else every
