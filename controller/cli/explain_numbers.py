"""The third level of `controller explain`: every choice with all its numbers.

Also has the texts that all levels, and `controller engines`, share.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from controller.cli.output import print_table, print_wrapped
from controller.util.text import TIME, TextColumn, TextTable, number_columns, timestamp_text
from controller.wire.override_text import PRECEDENCE, held_override_text, reason_text, regime_text

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
        print_wrapped("* extrapolated: the profile did not measure it")
    if any(_above_bound(answer, arm) for arm in answer.arms):
        print_wrapped("! above the bound")
    print_table(_positions_table(answer), wide=wide)
    if answer.HasField("updates"):
        print_table(_strides_table(answer.updates), wide=wide)
    print_wrapped(_summary_text(answer))


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
            "ms a token": _token_ms_text(answer, arm),
            "tokens/s": f"{arm.tokens_per_second:.0f}",
            "of best": f"{arm.tokens_per_second / best:.3f}" if best else "-",
            "could be": _optimistic_rate_text(arm),
        }
        for arm in sorted(answer.arms, key=lambda arm: -arm.tokens_per_second)
    ]
    titles = [title for title in _ARMS if title not in useless]
    return TextTable(
        f"{answer.engine_id} at B = {answer.batch_size}",
        [TextColumn(title, title not in {"", "drafter"}, _ARMS[title]) for title in titles],
        [tuple(row[title] for title in titles) for row in rows],
    )


def _token_ms_text(answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation") -> str:
    return f"{arm.seconds_per_token * 1e3:.2f}{'!' if _above_bound(answer, arm) else ''}"


def _above_bound(answer: "service_pb2.ExplainResponse", arm: "service_pb2.ArmExplanation") -> bool:
    return answer.HasField("bound") and arm.seconds_per_token > answer.bound.seconds


def _optimistic_rate_text(arm: "service_pb2.ArmExplanation") -> str:
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
            TextColumn("position", is_right_aligned=True),
            TextColumn("P(accepted)", is_right_aligned=True),
            TextColumn("evidence", is_right_aligned=True, priority=1),
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
            TextColumn("stride", is_right_aligned=True),
            *number_columns(
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
    updates = answer.updates
    history = (
        f"{updates.updates} so far, the last took {updates.update_seconds * 1e3:.0f} ms and "
        "delayed "
        f"concurrent steps by {updates.lost_seconds * 1e3:.1f} ms"
        if updates.updates
        else "none so far"
    )
    return (
        f"the drafter's online updates: {regime}{' on trial' if updates.trying else ''}; "
        f"{history}; they "
        f"may add {updates.gain:.3f} +- {updates.gain_deviation:.3f} to P(first accepted); trials "
        "may cost "
        f"{max(0.0, updates.trial_steps):.0f} more steps\n"
    )


def _training_text(answer: "service_pb2.ExplainResponse") -> str:
    if not answer.HasField("training"):
        return ""
    training = answer.training
    head = (
        f"the drafter's training: {training.phase}; acceptance rate {training.alpha_short:.3f} "
        "short-term, "
        f"{training.alpha_long:.3f} long-term ({training.measured} measured); "
        f"{training.stored_signals} of "
        f"{training.signals_needed} signals for round {training.rounds + 1}"
    )
    lines = [head]
    if training.draft_version or training.past or training.learnt:
        arrived = (
            ""
            if training.served_version == training.draft_version
            else f", {training.served_version} serves"
        )
        trial = f", on trial after {training.parent_version}" if training.on_trial else ""
        learnt = ", changed by online updates since" if training.learnt else ""
        lines.append(f"  version: {training.draft_version or 'as loaded'}{arrived}{learnt}{trial}")
    lines += [f"  {_round_text(past_round)}" for past_round in training.past[-_PAST_ROUNDS:]]
    return "\n".join(lines) + "\n"


def _round_text(past_round: "service_pb2.PastRound") -> str:
    training_round = past_round.round
    if training_round.error:
        return f"round {training_round.round} {past_round.outcome}: {training_round.error}"
    return (
        f"round {training_round.round}, version {training_round.version} {past_round.outcome}: "
        f"accepted {training_round.alpha_train:.3f} in "
        f"service; on held-out signals {training_round.alpha_before:.3f} before, "
        f"{training_round.alpha_eval:.3f} after"
    )


def _summary_text(answer: "service_pb2.ExplainResponse") -> str:
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
    runner_up = (
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
        f"{runner_up}; {count_text(answer.switches, 'switch', 'switches')}"
        f"{_switch_price_text(answer.switch_seconds)}\n"
        f"{count_text(answer.shifts, 'shift', 'shifts')} of traffic{resembles_text(answer)}\n"
        f"{warm}{_overrides_text(answer)}{health_text(answer.services)}"
        f"probing has cost {answer.probe_share:.2%} of step time: {answer.probes} probes of "
        f"{count_text(answer.probe_steps, 'step', 'steps')}, "
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
    earlier = answer.resembles
    now = time.time()
    began, ended = (
        timestamp_text(now - ago, TIME)
        for ago in (earlier.began_seconds_ago, earlier.ended_seconds_ago)
    )
    visits = count_text(earlier.visits, "time", "times")
    return f"; it resembles {began} to {ended}, seen {visits} before"


def _bound_text(answer: "service_pb2.ExplainResponse") -> str:
    """Describes the active bound on the time per output token, its source and its effect."""
    if not answer.HasField("bound"):
        return ""
    bound = answer.bound
    source = (
        f"override {bound.override_id}" if bound.override_id else "planner.tpot_ceiling_seconds"
    )
    if bound.expected_seconds > bound.seconds:
        effect = f"not met, {bound.expected_seconds / bound.seconds:.3g} times as long is expected"
        effect += "" if bound.attainable else ", and no choice meets it here"
    elif bound.HasField("excluded_drafter"):
        effect = f"it excludes {bound.excluded_drafter} gamma {bound.excluded_gamma}"
    else:
        effect = "met, and without it the choice would be the same"
    if bound.kept_up_to:
        reach = f"it can be met in every batch up to {bound.kept_up_to}"
    else:
        reach = "no choice meets it even in the smallest batches"
    return f"bound of {bound.seconds * 1e3:g} ms a token ({source}): {effect}; {reach}\n"


def _mixtures_text(answer: "service_pb2.ExplainResponse") -> str:
    return "".join(
        f"{mixture.drafter}: {mixture.free_share:.0%} of the recent rows used the prompt lookup, "
        f"{mixture.gained:+.1f} tokens each\n"
        for mixture in answer.mixtures
    )


def _overrides_text(answer: "service_pb2.ExplainResponse") -> str:
    lines = [
        f"override {entry.override.override_id}{_precedence_text(entry.override, answer.limits)}: "
        f"{held_override_text(entry)}\n"
        for entry in answer.overrides
    ]
    if lines:
        lines.append(f"{PRECEDENCE}\n")
    return "".join(lines) + store_text(answer.store)


def _precedence_text(override: "policy_pb2.Override", limits: "service_pb2.OverrideLimits") -> str:
    """Says if an override does not apply at this batch size, or which others shadow it."""
    if override.override_id not in limits.overrides:
        return " (not at this batch size)"
    rule, shadowing = override.rule, set[str]()
    bounds = any(rule.HasField(name) for name in ("gamma", "gamma_min", "gamma_max"))
    if bounds and override.override_id not in limits.gamma_by:
        shadowing |= set(limits.gamma_by)
    if rule.HasField("drafter") and limits.drafter_by not in {"", override.override_id}:
        shadowing.add(limits.drafter_by)
    if rule.HasField("tpot_max_seconds") and limits.tpot_by not in {"", override.override_id}:
        shadowing.add(limits.tpot_by)
    return f" (shadowed by {', '.join(sorted(shadowing))})" if shadowing else ""


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


def count_text(number: int, singular: str, plural: str) -> str:
    """Writes a number with its noun."""
    return f"{number} {singular if number == 1 else plural}"


def lost_text(lost: "Iterable[engine_pb2.LostCapability]") -> str:
    """Returns a line for each capability that the engine has lost."""
    from controller.wire import engines

    return "".join(f"{engines.lost_capability_text(loss)}\n" for loss in lost)


def warnings_text(warnings: "Iterable[service_pb2.EngineWarning]") -> str:
    """Returns a line for each problem that the engine's reports show."""
    return "".join(f"warning: {warning.found}; {warning.advice}\n" for warning in warnings)


def health_text(services: "Iterable[service_pb2.ServiceHealth]") -> str:
    """Returns a line for each service that is NOT_SERVING, with the reason."""
    return "".join(
        f"{service.service or 'the sidecar'} is NOT_SERVING: {service.detail}\n"
        for service in services
        if not service.serving
    )


def store_text(store: "policy_pb2.StoreStatus") -> str:
    """Says what is wrong with the store of overrides; "" if nothing is."""
    return "" if store.ok else f"the store of overrides has failed: {store.detail}\n"


def row_for(plan: "plan_pb2.Plan", batch_size: int) -> "plan_pb2.PlanRow":
    """Returns the row of a plan that is for this batch size; an empty one if it has none."""
    from speculation.v1 import plan_pb2

    fitting = (row for row in plan.rows if batch_size <= row.max_batch_size)
    return next(fitting, plan.rows[-1] if plan.rows else plan_pb2.PlanRow())
