"""Prints the outcome as tables for a person."""

from collections.abc import Mapping, Sequence
from typing import Any

from lab.demo.compare import (
    DemoOutcome,
    PolicyPlays,
    Selection,
    choice_shares,
)
from lab.harness.foreign_load import DOUBTFUL_CORES
from lab.harness.load_generator import acceptance_length
from lab.harness.spread import Spread
from lab.harness.stream import StreamPhase
from lab.harness.terminal import Terminal

# Choices that ran less are left out of the table.
_LEAST_SHOWN = 0.05


def show(outcome: DemoOutcome, terminal: Terminal) -> None:
    """Prints the whole stream, then each phase, then the draft lengths."""
    repeats = len(outcome.steered.plays)
    terminal.table(
        f"Whole stream, {repeats} repeats (median, range)",
        ["policy", "tokens/s", "range", "steered ÷ it", "range", "accept length", "exact"],
        [_stream_row(outcome, policy) for policy in outcome.policies],
    )
    terminal.table(
        "By phase: tokens/s (median), and steered ÷ each, paired",
        [
            "phase",
            *(policy.policy for policy in outcome.policies),
            *(f"÷ {policy.policy}" for policy in outcome.others),
        ],
        [_phase_row(outcome, number) for number in range(len(outcome.stream))],
    )
    terminal.table(
        "Steered: drafters and draft lengths by phase (share of samples), and acceptance length",
        ["phase", "γ", *(policy.policy for policy in outcome.policies[1:])],
        [_gamma_row(outcome, number) for number in range(len(outcome.stream))],
    )
    busiest = max(play.foreign_cores for p in outcome.policies for play in p.plays)
    if busiest > DOUBTFUL_CORES:
        terminal.say(
            f"Other programs kept up to {busiest:.1f} cores busy during a play: "
            "the speeds above are doubtful, the exactness of the tokens is not affected."
        )
    for policy in outcome.policies:
        for repeat, play in enumerate(policy.plays, start=1):
            for wrong in outcome.mismatches(play)[:3]:
                terminal.say(
                    f"NOT EXACT: {policy.policy}, repeat {repeat}, request {wrong.request}: token "
                    f"{wrong.position} is {wrong.found}, plain decoding gave {wrong.expected}"
                )


def show_profile(profile: Mapping[str, Any], terminal: Terminal) -> None:
    """Prints the step costs of a profile, which is given as its file's JSON document."""
    cost = {
        (c["drafter"] if c["gamma"] else "", c["gamma"], c["batch_size"]): c["step_seconds"]
        for c in profile["cells"]
    }
    arms = sorted({(drafter, gamma) for drafter, gamma, _ in cost})
    terminal.table(
        "Milliseconds of a step",
        ["B", *(f"{drafter} γ = {gamma}".strip() for drafter, gamma in arms)],
        [
            [str(size), *(f"{1000 * cost[*arm, size]:.1f}" for arm in arms)]
            for size in sorted({size for *_, size in cost})
        ],
    )


def show_selection(selection: Selection, stream: Sequence[StreamPhase], terminal: Terminal) -> None:
    """Prints the rate of each draft length that was held throughout a play."""
    gammas = list(selection.plays)
    rows = [
        [phase.name, *(f"{selection.rate(gamma, number):.0f}" for gamma in gammas)]
        for number, phase in enumerate(stream)
    ]
    rows.append(["whole stream", *(f"{selection.rate(gamma):.1f}" for gamma in gammas)])
    terminal.table(
        f"Held to one γ: tokens/s; the best for the whole stream is γ = {selection.gamma}",
        ["phase", *(f"γ = {gamma}" for gamma in gammas)],
        rows,
    )
    terminal.say(
        f"Every phase at its own best γ, in hindsight: {selection.hindsight:.1f} tokens/s, "
        f"{selection.hindsight / selection.rate(selection.gamma):.2f} × the best static."
    )


def _stream_row(outcome: DemoOutcome, policy: PolicyPlays) -> list[str]:
    rate = policy.tokens_per_second()
    row = [policy.policy, f"{rate.median:.1f}", _range(rate, 1)]
    if policy is outcome.steered:
        row += ["", ""]
    else:
        ratio = outcome.ratio(policy)
        row += [f"{ratio.median:.3f}", _range(ratio, 3)]
    exact = "yes" if outcome.exact(policy) else "NO"
    return [*row, f"{acceptance_length(policy.answers):.2f}", exact]


def _phase_row(outcome: DemoOutcome, number: int) -> list[str]:
    return [
        outcome.stream[number].name,
        *(f"{p.tokens_per_second(number).median:.0f}" for p in outcome.policies),
        *(f"{outcome.ratio(p, number).median:.2f}" for p in outcome.others),
    ]


def _gamma_row(outcome: DemoOutcome, number: int) -> list[str]:
    samples = [
        sample
        for repeat in range(len(outcome.watched))
        for sample in outcome.samples_of(repeat, number)
    ]
    shown = {c: share for c, share in choice_shares(samples).items() if share >= _LEAST_SHOWN}
    shares = "  ".join(f"{choice}: {share:.0%}" for choice, share in shown.items())
    lengths = [
        acceptance_length([a for play in policy.plays for a in play.phases[number].answers])
        for policy in outcome.policies[1:]
    ]
    return [outcome.stream[number].name, shares, *(f"{length:.2f}" for length in lengths)]


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.low:.{digits}f}–{spread.high:.{digits}f}"
