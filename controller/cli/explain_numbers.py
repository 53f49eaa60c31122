"""The third level of `controller explain`: every choice with all its numbers.

Also has the texts that all levels, and `controller engines`, share.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from controller.cli.output import print_table, print_words
from controller.util.text import TIME, TextColumn, TextTable, moment_text, numbers
from controller.wire.override_text import PRECEDENCE, held_text, reason_text, regime_text

if TYPE_CHECKING:
    from speculation.v1 import engine_pb2, plan_pb2, policy_pb2, service_pb2

# Number of training rounds that are shown: the newest.
_PAST_ROUNDS = 4
# Columns of the choices, with the priority by which they are left out.
_ARMS = {
    "": 0, "drafter": 0, "gamma": 0, "accepted": 3, "step ms": 2, "drift": 6, "catch-up ms": 7,
    "ms a token": 4, "tokens/s": 1, "of best": 2, "could be": 5,
}  # fmt: skip


def print_numbers(answer: "service_pb2.ExplainResponse", *, wide: bool) -> None:
    """Prints every choice and estimate, and the other inputs of the decision.

    wide: prints all columns of the tables, even if they do not fit.
    """
    print_table(_arms_table(answer), wide=wide)
    if any(arm.extrapolated for arm in answer.arms):
        print_words("* extrapolated: the profile did not measure it")
    if any(_above_bound(answer, arm) for arm in answer.arms):
        print_words("! above the bound")
    print_table(_positions_table(answer), wide=wide)
    if answer.HasField("updates"):
        print_table(_strides_table(answer.updates), wide=wide)
    print_words(_in_words(answer))


def _arms_table(answer: "service_pb2.ExplainResponse") -> TextTable:
    # Columns with the same value in all rows are left out.
    drifted = any(abs(arm.cost_drift - 1) >= 0.005 for arm in answer.arms)
    priced = any(arm.catch_up_seconds > 0 for arm in answer.arms)
    useless = {
        *(() if drifted else ("drift",)),
        *(() if priced else ("catch-up ms",)),
        *(() if answer.HasField("bound") else ("ms a token",)),
    }
    best = max((arm.tokens_per_second for arm in answer.arms), default=0.0)
    rows = [
        {
            "": "->" if arm.chosen else "",
            "drafter": arm.drafter,
            "gamma": str(arm.gamma),
            "accepted": f"{arm.expected_accepted:.2f}",
            "step ms": f"{arm.step_seconds * 1e3:.2f}{'*' if arm.extrapolated else ''}",
            "drift": f"x{arm.cost_drift:.2f}",
            "catch-up ms": f"{arm.catch_up_seconds * 1e3:.2f}",
            "ms a token": _token_ms(answer, arm),
            "tokens/s": f"{arm.tokens_per_second:.0f}",
            "of best": f"{arm.tokens_per_second / best:.3f}" if best else "-",
            "could be": _could_be(arm),
        }
        for arm in sorted(answer.arms, key=lambda arm: -arm.tokens_per_second)
    ]
    titles = [title for title in _ARMS if title not in useless]
    return TextTable(
        f"{answer.engine_id} at B = {answer.batch_size}",
        [TextColumn(title, title not in {"", "drafter"}, _ARMS[title]) for title in titles],
        [tuple(row[title] for title in titles) for row in rows],
    )


def _token_ms(answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation") -> str:
    return f"{arm.seconds_per_token * 1e3:.2f}{'!' if _above_bound(answer, arm) else ''}"


def _above_bound(answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation") -> bool:
    return answer.HasField("bound") and arm.seconds_per_token > answer.bound.seconds


def _could_be(arm: "service_pb2.ArmExplanation") -> str:
    if arm.lost:
        return "lost"
    return "forbidden" if arm.forbidden else f"{arm.optimistic_tokens_per_second:.0f}"


def _positions_table(answer: "service_pb2.ExplainResponse") -> TextTable:
    classes = any(estimate.label for estimate in answer.positions)
    return TextTable(
        "acceptance",
        [
            TextColumn("drafter"),
            *([TextColumn("class")] if classes else []),
            TextColumn("position", right=True),
            TextColumn("P(accepted)", right=True),
            TextColumn("evidence", right=True, priority=1),
        ],
        [
            (
                estimate.drafter,
                *([estimate.label or "all"] if classes else []),
                str(estimate.position),
                f"{estimate.conditional_acceptance:.3f}",
                f"{estimate.exposures:.0f}",
            )
            for estimate in answer.positions
        ],
    )


def _strides_table(updates: "service_pb2.UpdatesExplanation") -> TextTable:
    best = max((value.tokens_per_second for value in updates.strides), default=0.0)
    return TextTable(
        "online updates of the drafter",
        [
            TextColumn(""),
            TextColumn("stride", right=True),
            *numbers(
                ["P(first accepted)", "ms lost a step", "tokens/s", "of best", "could be"],
                {"P(first accepted)": 3, "ms lost a step": 4, "of best": 2, "could be": 5},
            ),
        ],
        [
            (
                ("?" if updates.trying else "->") if value.chosen else "",
                str(value.stride) if value.stride else "off",
                f"{value.first_acceptance:.3f}",
                f"{value.lost_seconds * 1e3:.2f}",
                f"{value.tokens_per_second:.0f}",
                f"{value.tokens_per_second / best:.3f}" if best else "-",
                f"{value.optimistic_tokens_per_second:.0f}",
            )
            for value in updates.strides
        ],
    )


def _updates_text(answer: "service_pb2.ExplainResponse") -> str:
    regime = regime_text(answer.plan.regime)
    if not answer.HasField("updates"):
        return "" if regime == "off" else f"the drafter's online updates: {regime}\n"
    it = answer.updates
    found = (
        f"{it.updates} so far, the last took {it.update_seconds * 1e3:.0f} ms and delayed "
        f"concurrent steps by {it.lost_seconds * 1e3:.1f} ms"
        if it.updates
        else "none so far"
    )
    return (
        f"the drafter's online updates: {regime}{' on trial' if it.trying else ''}; {found}; they "
        f"may add {it.gain:.3f} +- {it.gain_deviation:.3f} to P(first accepted); trials may cost "
        f"{max(0.0, it.trial_steps):.0f} more steps\n"
    )


def _training_text(answer: "service_pb2.ExplainResponse") -> str:
    if not answer.HasField("training"):
        return ""
    it = answer.training
    head = (
        f"the drafter's training: {it.phase}; acceptance rate {it.alpha_short:.3f} short-term, "
        f"{it.alpha_long:.3f} long-term ({it.measured} measured); {it.stored_signals} of "
        f"{it.signals_needed} signals for round {it.rounds + 1}"
    )
    lines = [head]
    if it.draft_version or it.past or it.learnt:
        arrived = "" if it.served_version == it.draft_version else f", {it.served_version} serves"
        trial = f", on trial after {it.parent_version}" if it.on_trial else ""
        learnt = ", changed by online updates since" if it.learnt else ""
        lines.append(f"  version: {it.draft_version or 'as loaded'}{arrived}{learnt}{trial}")
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
    policy = (
        ""
        if answer.policy in {"", "goodput"}
        else f"\nthe decision rule is {answer.policy}, not the default (goodput)"
    )
    second = (
        f"runner-up {answer.runner_up_drafter} gamma {answer.runner_up_gamma}, "
        f"{answer.margin:.1%} behind the best"
        if answer.runner_up_drafter
        else "nothing to choose from"
    )
    warm = f"acceptance was warm-started from {answer.warm_start}\n" if answer.warm_start else ""
    return (
        f"plan {plan.epoch}: {reason_text(plan)}; {plan.reason_detail}\n"
        f"{lost_text(answer.lost)}{warnings_text(answer.warnings)}{_bound_text(answer)}{_mixtures_text(answer)}"
        f"{_updates_text(answer)}{_training_text(answer)}"
        f"costs: {costs}; context {answer.kv_tokens_per_sequence:.0f} tokens per sequence; "
        f"{answer.cost_outliers} step times left out as outliers\n"
        f"{second}; {counted(answer.switches, 'switch', 'switches')}"
        f"{_switch_price_text(answer.switch_seconds)}\n"
        f"{counted(answer.shifts, 'shift', 'shifts')} of traffic{resembles_text(answer)}\n"
        f"{warm}{_overrides_text(answer)}{health_text(answer.services)}"
        f"probing has cost {answer.probe_share:.2%} of step time: {answer.probes} probes of "
        f"{counted(answer.probe_steps, 'step', 'steps')}, "
        f"{probing_text(answer.probe_lost_seconds)}, "
        f"{probe_budget_text(answer.probe_credit_seconds)}"
        f"{policy}"
    )


def _switch_price_text(seconds: float) -> str:
    return f" of {1e3 * seconds:.2f} ms each" if seconds else ""


def resembles_text(answer: "service_pb2.ExplainResponse") -> str:
    """Names the earlier traffic that the present traffic resembles, by this machine's clock."""
    if not answer.HasField("resembles"):
        return ""
    past = answer.resembles
    now = time.time()
    began, ended = (
        moment_text(now - ago, TIME) for ago in (past.began_seconds_ago, past.ended_seconds_ago)
    )
    return f"; it resembles {began} to {ended}, seen {counted(past.visits, 'time', 'times')} before"


def _bound_text(answer: "service_pb2.ExplainResponse") -> str:
    """Describes the active bound on the time per output token, its source and its effect."""
    if not answer.HasField("bound"):
        return ""
    it = answer.bound
    whose = f"override {it.override_id}" if it.override_id else "planner.tpot_ceiling_seconds"
    if it.expected_seconds > it.seconds:
        found = f"not met, {it.expected_seconds / it.seconds:.3g} times as long is expected"
        found += "" if it.attainable else ", and no choice meets it here"
    elif it.HasField("excluded_drafter"):
        found = f"it excludes {it.excluded_drafter} gamma {it.excluded_gamma}"
    else:
        found = "met, and without it the choice would be the same"
    if it.kept_up_to:
        where = f"it can be met in every batch up to {it.kept_up_to}"
    else:
        where = "no choice meets it even in the smallest batches"
    return f"bound of {it.seconds * 1e3:g} ms a token ({whose}): {found}; {where}\n"


def _mixtures_text(answer: "service_pb2.ExplainResponse") -> str:
    return "".join(
        f"{it.drafter}: {it.free_share:.0%} of the recent rows used the free drafter, "
        f"{it.gained:+.1f} tokens each\n"
        for it in answer.mixtures
    )


def _overrides_text(answer: "service_pb2.ExplainResponse") -> str:
    lines = [
        f"override {held.override.override_id}{_standing(held.override, answer.limits)}: "
        f"{held_text(held)}\n"
        for held in answer.overrides
    ]
    if lines:
        lines.append(f"{PRECEDENCE}\n")
    return "".join(lines) + store_text(answer.store)


def _standing(it: "policy_pb2.Override", limits: "service_pb2.OverrideLimits") -> str:
    """Says if an override does not apply at this batch size, or which others shadow it."""
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


def probing_text(lost_seconds: float) -> str:
    """Returns what all probes together have lost, or gained if they ran something better."""
    if lost_seconds < 0:
        return f"{-lost_seconds:.2f} s gained"
    return f"{lost_seconds:.2f} s lost"


def probe_budget_text(credit_seconds: float) -> str:
    """Describes what probes may still lose; a negative credit is a budget that is overspent."""
    if credit_seconds < 0:
        return f"{-credit_seconds:.3f} s over budget"
    return f"{credit_seconds:.3f} s to spend"


def counted(number: int, one: str, several: str) -> str:
    """Writes a number with its noun."""
    return f"{number} {one if number == 1 else several}"


def lost_text(lost: "Iterable[engine_pb2.LostCapability]") -> str:
    """Returns a line for each capability that the engine has lost."""
    from controller.wire import engines

    return "".join(f"{engines.lost_text(loss)}\n" for loss in lost)


def warnings_text(warnings: "Iterable[service_pb2.EngineWarning]") -> str:
    """Returns a line for each problem that the engine's reports show."""
    return "".join(f"warning: {it.found}; {it.advice}\n" for it in warnings)


def health_text(services: "Iterable[service_pb2.ServiceHealth]") -> str:
    """Returns a line for each service that is NOT_SERVING, with the reason."""
    return "".join(
        f"{it.service or 'the sidecar'} is NOT_SERVING: {it.detail}\n"
        for it in services
        if not it.serving
    )


def store_text(store: "policy_pb2.StoreStatus") -> str:
    """Says what is wrong with the store of overrides; "" if nothing is."""
    return "" if store.ok else f"the store of overrides has failed: {store.detail}\n"


def row_for(plan: "plan_pb2.Plan", batch_size: int) -> "plan_pb2.PlanRow":
    """Returns the row of a plan that is for this batch size; an empty one if it has none."""
    from speculation.v1 import plan_pb2

    fitting = (row for row in plan.rows if batch_size <= row.max_batch_size)
    return next(fitting, plan.rows[-1] if plan.rows else plan_pb2.PlanRow())
