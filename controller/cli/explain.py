"""`controller engines` and `controller explain`: what a running sidecar knows, as tables."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli.connection import DEFAULT_ADDRESS, UINT32_MAX, Address, connected, print_wide
from controller.cli.fleet import (
    FilterOption,
    FleetOption,
    fleet_of,
    require_fleet,
    show_fleet,
)
from controller.cli.output import (
    Column,
    Listing,
    Output,
    OutputOption,
    plain_values,
    print_document,
    printable,
    show,
)
from controller.wire.override_text import (
    PRECEDENCE,
    author_text,
    regime_text,
    rule_text,
    scope_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from speculation.v1 import engine_pb2, plan_pb2, policy_pb2, service_pb2

_ANSWER_SECONDS_MAX = 5.0
# Rounds of training that are shown, the newest.
_PAST_ROUNDS = 4


def engines(
    output: OutputOption = Output.TABLE,
    fleet: FleetOption = False,
    words: FilterOption = "",
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Lists the engines that the sidecar steers, or, with --fleet, those of all sidecars."""
    from controller.client.paging import every_page
    from speculation.v1 import service_pb2, service_pb2_grpc

    require_fleet(fleet=fleet, words=words)
    with connected(address) as channel:
        if fleet:
            show_fleet(fleet_of(channel, words), output)
            return
        inspection = service_pb2_grpc.InspectionServiceStub(channel)
        answer = every_page(
            lambda token: inspection.ListEngines(
                service_pb2.ListEnginesRequest(page_token=token), timeout=_ANSWER_SECONDS_MAX
            )
        )
    show(_ENGINES, answer.engines, output, "no engine has introduced itself")
    if output not in {Output.TABLE, Output.WIDE}:
        return
    for status in answer.engines:
        for line in _lost_text(status.engine.lost).splitlines():
            print(f"{status.engine.engine_id}: {line}")
    print(_health_text(answer.sidecar.services), end="")


def explain(
    engine: Annotated[str, typer.Argument(help="Engine id, as `controller engines` lists it.")],
    batch_size: Annotated[
        int,
        typer.Option(
            min=0, max=UINT32_MAX, help="Batch size to explain; 0: that of the last report."
        ),
    ] = 0,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Shows why an engine runs the draft length that it runs: every choice with its numbers.

    Exit codes: 0 shown, 1 refused, 2 options, 4 no sidecar answers, 6 the sidecar does not know the
    engine.
    """
    from speculation.v1 import service_pb2, service_pb2_grpc

    with connected(address) as channel:
        answer = service_pb2_grpc.InspectionServiceStub(channel).Explain(
            service_pb2.ExplainRequest(engine_id=engine, batch_size=batch_size),
            timeout=_ANSWER_SECONDS_MAX,
        )
    if output in {Output.TABLE, Output.WIDE}:
        _print_explanation(answer)
    elif output is Output.NAME:
        print(printable(answer.engine_id))
    else:
        print_document("Explanation", plain_values(answer), output)


def _last_size(status: "service_pb2.EngineStatus") -> int:
    return status.last_report.batch_size if status.HasField("last_report") else 0


def _planned(status: "service_pb2.EngineStatus") -> str:
    row = _row_for(status.plan, _last_size(status) or 1)
    return f"{row.drafter} {row.gamma}"


def _last_report(status: "service_pb2.EngineStatus") -> str:
    return f"{status.seconds_since_last_report:.1f} s ago" if _last_size(status) else "never"


_ENGINES: "Listing[service_pb2.EngineStatus]" = Listing(
    "EngineStatusList",
    lambda status: status.engine.engine_id,
    (
        Column("engine", lambda status: status.engine.engine_id),
        Column("profile", lambda status: status.profile_id or "none (prior)", priority=3),
        Column("B", lambda status: str(_last_size(status) or "-"), right=True),
        Column("gamma", _planned),
        Column("reason", lambda status: _reason(status.plan.reason), priority=1),
        Column("reports", lambda status: str(status.reports), right=True, priority=4),
        Column("rejected", lambda status: str(status.rejected_reports), right=True, priority=5),
        Column("dropped", lambda status: str(status.dropped_reports), right=True, priority=5),
        Column("last report", _last_report, right=True, priority=2),
    ),
    plain_values,
    lambda status: status.unavailable,
)


def _print_explanation(answer: "service_pb2.ExplainResponse") -> None:
    from rich.text import Text

    print_wide(_arms_table(answer))
    if any(arm.extrapolated for arm in answer.arms):
        print_wide(Text("* outside of what the profile measured"))
    if any(_above_bound(answer, arm) for arm in answer.arms):
        print_wide(Text("! above the bound"))
    print_wide(_positions_table(answer))
    if answer.HasField("updates"):
        print_wide(_strides_table(answer.updates))
    print_wide(Text(_in_words(answer)))


def _arms_table(answer: "service_pb2.ExplainResponse") -> "Table":
    from rich.table import Table

    # Columns that would say the same everywhere are left out.
    drifted = any(abs(arm.cost_drift - 1) >= 0.005 for arm in answer.arms)
    priced = any(arm.catch_up_seconds > 0 for arm in answer.arms)
    table = Table(
        "", "drafter", "gamma", "accepted", "step ms",
        *(["drift"] if drifted else []),
        *(["catch-up ms"] if priced else []),
        *(["ms a token"] if answer.HasField("bound") else []),
        "tokens/s", "of best", "could be",
        title=f"{answer.engine_id} at B = {answer.batch_size}",
    )  # fmt: skip
    best = max((arm.tokens_per_second for arm in answer.arms), default=0.0)
    for arm in sorted(answer.arms, key=lambda arm: -arm.tokens_per_second):
        table.add_row(
            "->" if arm.chosen else "",
            arm.drafter,
            str(arm.gamma),
            f"{arm.expected_accepted:.2f}",
            f"{arm.step_seconds * 1e3:.2f}{'*' if arm.extrapolated else ''}",
            *([f"x{arm.cost_drift:.2f}"] if drifted else []),
            *([f"{arm.catch_up_seconds * 1e3:.2f}"] if priced else []),
            *([_token_ms(answer, arm)] if answer.HasField("bound") else []),
            f"{arm.tokens_per_second:.0f}",
            f"{arm.tokens_per_second / best:.3f}" if best else "-",
            _could_be(arm),
        )
    return table


def _token_ms(answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation") -> str:
    return f"{arm.seconds_per_token * 1e3:.2f}{'!' if _above_bound(answer, arm) else ''}"


def _above_bound(answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation") -> bool:
    return answer.HasField("bound") and arm.seconds_per_token > answer.bound.seconds


def _could_be(arm: "service_pb2.ArmExplanation") -> str:
    if arm.lost:
        return "lost"
    return "forbidden" if arm.forbidden else f"{arm.optimistic_tokens_per_second:.0f}"


def _positions_table(answer: "service_pb2.ExplainResponse") -> "Table":
    from rich.table import Table

    classes = any(estimate.label for estimate in answer.positions)
    table = Table(
        "drafter", *(["class"] if classes else []), "position", "P(accepted)", "evidence",
        title="acceptance",
    )  # fmt: skip
    for estimate in answer.positions:
        table.add_row(
            estimate.drafter,
            *([estimate.label or "all"] if classes else []),
            str(estimate.position),
            f"{estimate.conditional_acceptance:.3f}",
            f"{estimate.exposures:.0f}",
        )
    return table


def _strides_table(updates: "service_pb2.UpdatesExplanation") -> "Table":
    from rich.table import Table

    table = Table(
        "", "stride", "P(first accepted)", "ms lost a step", "tokens/s", "of best", "could be",
        title="online updates of the drafter",
    )  # fmt: skip
    best = max((value.tokens_per_second for value in updates.strides), default=0.0)
    for value in updates.strides:
        table.add_row(
            ("?" if updates.trying else "->") if value.chosen else "",
            str(value.stride) if value.stride else "off",
            f"{value.first_acceptance:.3f}",
            f"{value.lost_seconds * 1e3:.2f}",
            f"{value.tokens_per_second:.0f}",
            f"{value.tokens_per_second / best:.3f}" if best else "-",
            f"{value.optimistic_tokens_per_second:.0f}",
        )
    return table


def _updates_text(answer: "service_pb2.ExplainResponse") -> str:
    regime = regime_text(answer.plan.regime)
    if not answer.HasField("updates"):
        return "" if regime == "off" else f"the drafter's online updates: {regime}\n"
    it = answer.updates
    found = (
        f"{it.updates} so far, the last took {it.update_seconds * 1e3:.0f} ms and "
        f"{it.lost_seconds * 1e3:.1f} ms of the steps beside it"
        if it.updates
        else "none so far"
    )
    return (
        f"the drafter's online updates: {regime}{' on trial' if it.trying else ''}; {found}; they "
        f"may add {it.gain:.3f} +- {it.gain_deviation:.3f} to P(first accepted); trying may lose "
        f"{max(0.0, it.trial_steps):.0f} steps more\n"
    )


def _training_text(answer: "service_pb2.ExplainResponse") -> str:
    if not answer.HasField("training"):
        return ""
    it = answer.training
    head = (
        f"the drafter's training: {it.phase}; acceptance rate {it.alpha_short:.3f} lately, "
        f"{it.alpha_long:.3f} over long ({it.measured} measured); {it.stored_signals} of "
        f"{it.signals_needed} signals for round {it.rounds + 1}"
    )
    lines = [head]
    if it.draft_version or it.past:
        arrived = "" if it.served_version == it.draft_version else f", {it.served_version} serves"
        trial = f", on trial after {it.parent_version}" if it.on_trial else ""
        lines.append(f"  its version: {it.draft_version or 'as loaded'}{arrived}{trial}")
    lines += [f"  {_round_text(past)}" for past in it.past[-_PAST_ROUNDS:]]
    return "\n".join(lines) + "\n"


def _round_text(past: "service_pb2.PastRound") -> str:
    it = past.round
    if it.error:
        return f"round {it.round} {past.outcome}: {it.error}"
    return (
        f"round {it.round}, version {it.version} {past.outcome}: accepted {it.alpha_train:.3f} in "
        f"service; on held-out signals {it.alpha_before:.3f} before, {it.alpha_eval:.3f} after"
    )


def _in_words(answer: "service_pb2.ExplainResponse") -> str:
    plan = answer.plan
    costs = (
        f"profile {answer.profile_id}"
        if answer.profile_id
        else f"{answer.prior or 'generic'} prior (no profile matches)"
    )
    policy = "" if answer.policy in {"", "goodput"} else f"\nthe rule is {answer.policy}, not ours"
    second = (
        f"runner-up {answer.runner_up_drafter} gamma {answer.runner_up_gamma}, "
        f"{answer.margin:.1%} behind the best"
        if answer.runner_up_drafter
        else "nothing to choose from"
    )
    warm = f"acceptance began from {answer.warm_start}\n" if answer.warm_start else ""
    return (
        f"plan {plan.epoch}: {_reason(plan.reason)}; {plan.reason_detail}\n"
        f"{_lost_text(answer.lost)}{_bound_text(answer)}{_mixtures_text(answer)}"
        f"{_updates_text(answer)}{_training_text(answer)}"
        f"costs: {costs}; context {answer.kv_tokens_per_sequence:.0f} tokens a sequence; "
        f"{answer.cost_outliers} step times left out as outliers\n"
        f"{second}; {_counted(answer.switches, 'switch', 'switches')}"
        f"{_switch_price_text(answer.switch_seconds)}\n"
        f"{_counted(answer.shifts, 'shift', 'shifts')} of traffic{resembles_text(answer)}\n"
        f"{warm}{_overrides_text(answer)}{_health_text(answer.services)}"
        f"probing has cost {answer.probe_share:.2%} of step time: {answer.probes} probes of "
        f"{_counted(answer.probe_steps, 'step', 'steps')}, "
        f"{probing_text(answer.probe_lost_seconds)}, {answer.probe_credit_seconds:.3f} s to spend"
        f"{policy}"
    )


def _switch_price_text(seconds: float) -> str:
    return f" of {1e3 * seconds:.2f} ms each" if seconds else ""


def resembles_text(answer: "service_pb2.ExplainResponse") -> str:
    """Names the earlier traffic that the present one is taken for, by this machine's clock."""
    if not answer.HasField("resembles"):
        return ""
    past = answer.resembles
    now = time.time()
    began, ended = (
        time.strftime("%H:%M:%S", time.localtime(now - ago))
        for ago in (past.began_seconds_ago, past.ended_seconds_ago)
    )
    return (
        f"; it resembles {began} to {ended}, seen {_counted(past.visits, 'time', 'times')} before"
    )


def _bound_text(answer: "service_pb2.ExplainResponse") -> str:
    """Tells which bound on the time per output token is in force, whose it is, and if it binds."""
    if not answer.HasField("bound"):
        return ""
    it = answer.bound
    whose = f"override {it.override_id}" if it.override_id else "planner.tpot_ceiling_seconds"
    if it.expected_seconds > it.seconds:
        found = f"not kept, {it.expected_seconds / it.seconds:.3g} times as long is expected"
        found += "" if it.attainable else ", and no choice keeps it here"
    elif it.HasField("excluded_drafter"):
        found = f"it excludes {it.excluded_drafter} gamma {it.excluded_gamma}"
    else:
        found = "kept, and without it the choice would be the same"
    if it.kept_up_to:
        where = f"some choice keeps it in every batch up to {it.kept_up_to}"
    else:
        where = "no choice keeps it even in the smallest batches"
    return f"bound of {it.seconds * 1e3:g} ms a token ({whose}): {found}; {where}\n"


def _mixtures_text(answer: "service_pb2.ExplainResponse") -> str:
    return "".join(
        f"{it.drafter}: lately {it.free_share:.0%} of the rows used the free drafter, "
        f"{it.gained:+.1f} tokens each\n"
        for it in answer.mixtures
    )


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _lost_text(lost: "Iterable[engine_pb2.LostCapability]") -> str:
    """A line for everything that the engine can no longer do."""
    from controller.wire.capabilities import lost_text

    return "".join(f"{lost_text(loss)}\n" for loss in lost)


def _health_text(services: "Iterable[service_pb2.ServiceHealth]") -> str:
    """The services that are NOT_SERVING, and why."""
    return "".join(
        f"{it.service or 'the sidecar'} is NOT_SERVING: {it.detail}\n"
        for it in services
        if not it.serving
    )


def _overrides_text(answer: "service_pb2.ExplainResponse") -> str:
    lines = []
    for held in answer.overrides:
        it = held.override
        lines.append(
            f"override {it.override_id}{_standing(it, answer.limits)}: {scope_text(it)}: "
            f"{rule_text(it)}; {author_text(held)}: {it.reason}\n"
        )
    if lines:
        lines.append(f"{PRECEDENCE}\n")
    if not answer.store.ok:
        lines.append(f"the store of overrides is in trouble: {answer.store.detail}\n")
    return "".join(lines)


def _standing(it: "policy_pb2.Override", limits: "service_pb2.OverrideLimits") -> str:
    """Whether it counts at this batch size, and what decides in its place."""
    if it.override_id not in limits.overrides:
        return " (not at this batch size)"
    rule, by = it.rule, set[str]()
    bounds = any(rule.HasField(name) for name in ("gamma", "gamma_min", "gamma_max"))
    if bounds and it.override_id not in limits.gamma_by:
        by |= set(limits.gamma_by)
    if rule.HasField("drafter") and limits.drafter_by not in {"", it.override_id}:
        by.add(limits.drafter_by)
    if rule.HasField("tpot_max_seconds") and limits.tpot_by not in {"", it.override_id}:
        by.add(limits.tpot_by)
    return f" (shadowed by {', '.join(sorted(by))})" if by else ""


def _row_for(plan: "plan_pb2.Plan", batch_size: int) -> "plan_pb2.PlanRow":
    fitting = (row for row in plan.rows if batch_size <= row.max_batch_size)
    return next(fitting, plan.rows[-1])


def probing_text(lost_seconds: float) -> str:
    """Tells what probes have lost in all, or gained where they found something better."""
    if lost_seconds < 0:
        return f"{-lost_seconds:.2f} s gained"
    return f"{lost_seconds:.2f} s lost"


def _reason(reason: "plan_pb2.Reason.ValueType") -> str:
    from speculation.v1 import plan_pb2

    name = plan_pb2.Reason.Name(reason)
    return name.removeprefix("REASON_").lower().replace("_", "-")
