"""Prints the outcome as tables for a person."""

from collections.abc import Mapping
from typing import Any

from lab.demo.outcome import DemoOutcome, arm_name
from lab.harness.terminal import Terminal
from lab.paced.engines import ADAPTIVE, STEERED
from lab.paced.lost_time import Oracle
from lab.paced.traffic import Stream

# Choices that ran less are left out of the table.
_MIN_SHOWN_SHARE = 0.05


def show_table(
    stream: Stream, oracle: Oracle, source: str, terminal: Terminal, *, imposed: bool = True
) -> None:
    """Prints what the table makes of the stream before it is played."""
    terminal.heading(f"The stream {stream.name!r}, computed from the table")
    terminal.say(f"Step times are {'imposed: ' if imposed else 'real; the table is the '}{source}.")
    terminal.say("Acceptance is drawn from measured curves, alike for all policies.")
    terminal.say(
        f"{stream.requests} requests, {stream.tokens} tokens, "
        + ", ".join(f"{phase.name} ×{phase.concurrency}" for phase in stream.phases)
    )
    terminal.say(
        f"The best arm of each phase ({', '.join(arm_name(arm) for arm in oracle.arms)}) has "
        f"{oracle.gain:.3f} times the tokens/s of the best static one "
        f"({arm_name(oracle.best_static)})."
    )


def show(outcome: DemoOutcome, terminal: Terminal) -> None:
    """Prints the whole stream, then each phase, then what the steered engine lost."""
    repeats = len(outcome.plays[STEERED])
    repeated = f" (median of {repeats}, range)" if repeats > 1 else ""
    terminal.table(
        f"Whole day{repeated}: tokens/s and times" + (" of the model" if outcome.paced else ""),
        ["policy", "tokens/s", "÷ oracle", "steered ÷", "ms/token p50", "p99",
         "latency p50", "p99", "late", "exact"],
        [_row(outcome, policy) for policy in outcome.policies],
    )  # fmt: skip
    terminal.table(
        "By phase: tokens/s, and steered ÷ each",
        ["phase", *outcome.policies, *(f"÷ {p}" for p in outcome.compared_policies)],
        [_phase_row(outcome, number) for number in range(len(outcome.stream.phases))],
    )
    adaptive_policies = [policy for policy in (ADAPTIVE, STEERED) if policy in outcome.plays]
    terminal.table(
        "Drafter and draft length by phase, share of steps",
        ["phase", "best", *adaptive_policies],
        [
            _choice_row(outcome, number, adaptive_policies)
            for number in range(len(outcome.stream.phases))
        ],
    )
    for lost_time in outcome.lost_times:
        terminal.say(
            f"Lost against the best arm of every single step: {lost_time.total:.1%} of the time "
            f"(waiting for information {lost_time.waiting:.1%}, probing {lost_time.probing:.1%}, "
            "switching "
            f"{lost_time.switching:.1%}, wrong estimates {lost_time.estimates:.1%}, link "
            f"{lost_time.link:.1%}); "
            f"the shim's own work, hidden behind the step: {lost_time.shim:.1%}"
        )
    for play in outcome.exact:
        for mismatch in play.mismatches[:3]:
            terminal.say(
                f"NOT EXACT: {play.policy}, request {mismatch.request}: token {mismatch.position} "
                "is "
                f"{mismatch.actual}, plain decoding gave {mismatch.expected}"
            )
    if outcome.exact:
        tokens = sum(play.tokens for play in outcome.exact)
        arms = outcome.exact[-1].arms
        terminal.say(
            f"Unpaced, with the small trained models: {tokens} tokens compared with plain "
            f"decoding, {'all of them equal' if outcome.all_exact else 'NOT all of them equal'}; "
            f"the steered engine changed at random among {len(arms)} arms."
        )


def show_profile(profile: Mapping[str, Any], dilation: float, terminal: Terminal) -> None:
    """Prints the step costs of a profile, in the model's time."""
    cost = {
        (c["drafter"] if c["gamma"] else "", c["gamma"], c["batch_size"]): c["step_seconds"]
        for c in profile["cells"]
    }
    arms = sorted({(drafter, gamma) for drafter, gamma, _ in cost})
    terminal.table(
        "What `controller profile` measured: milliseconds of a step, of the model",
        ["B", *(f"{drafter} {gamma}".strip() for drafter, gamma in arms)],
        [
            [str(size), *(f"{1000 * cost[*arm, size] / dilation:.2f}" for arm in arms)]
            for size in sorted({size for *_, size in cost})
        ],
    )


def _row(outcome: DemoOutcome, policy: str) -> list[str]:
    rates, plays = outcome.rates(policy), outcome.plays[policy]
    text = f"{rates.median:.0f}"
    if len(rates.values) > 1:
        text += f" ({rates.low:.0f}–{rates.high:.0f})"
    middle = sorted(plays, key=lambda play: play.tokens_per_second)[len(plays) // 2]
    exact = outcome.exactness(policy)
    return [
        policy,
        text,
        f"{outcome.share_of_oracle(policy).median:.3f}",
        "" if policy == STEERED else f"{outcome.ratio(policy).median:.3f}",
        f"{middle.token_milliseconds(50):.2f}",
        f"{middle.token_milliseconds(99):.2f}",
        f"{middle.latency_seconds(50):.2f} s",
        f"{middle.latency_seconds(99):.2f} s",
        f"{max(play.late_share for play in plays):.1%}" if outcome.paced else "",
        {None: "", True: "yes", False: "NO"}[exact],
    ]


def _phase_row(outcome: DemoOutcome, number: int) -> list[str]:
    phase = outcome.stream.phases[number]
    return [
        f"{phase.name} ×{phase.concurrency}",
        *(f"{outcome.phase_rates(p, number).median:.0f}" for p in outcome.policies),
        *(f"{outcome.ratio(p, number).median:.3f}" for p in outcome.compared_policies),
    ]


def _choice_row(outcome: DemoOutcome, number: int, policies: list[str]) -> list[str]:
    cells = []
    for policy in policies:
        choices = outcome.plays[policy][0].choices(number)
        choice_texts = [
            f"{choice.removeprefix('eagle3 ')}: {share:.0%}"
            for choice, share in choices.items()
            if share >= _MIN_SHOWN_SHARE
        ]
        cells.append(" ".join(choice_texts))
    best = arm_name(outcome.oracles[0].arms[number]).removeprefix("eagle3 ")
    return [outcome.stream.phases[number].name, best, *cells]
