"""Prints the outcome as one table for a person."""

from lab.harness.terminal import Terminal
from lab.paced.edits.outcome import EditsOutcome, name_of, shares
from lab.paced.plays import StreamPlay

_LEAST_SHOWN = 0.05


def label(source: str) -> str:
    """Says what is imposed and what is real."""
    return (
        f"Step times are imposed, by a {source}, and the lookup pays for its kernels; the target "
        "and its EAGLE3 drafter are small, trained to edit code, and every token is theirs. Time "
        "is the model's."
    )


def show(outcome: EditsOutcome, source: str, terminal: Terminal) -> None:
    """Prints the table and what follows from it."""
    best = outcome.best.tokens_per_second
    rows = [("off", outcome.off)]
    rows += [(name_of(arm), play) for arm, play in outcome.singles.items()]
    rows += [(f"{name_of(arm)}, fixed", play) for arm, play in outcome.mixed.items()]
    rows += [("steered", play) for play in outcome.steered]
    (phase,) = outcome.off.stream.phases
    terminal.table(
        f"{phase.plan.requests} code edits, {phase.plan.concurrency} at a time",
        ["", "tokens/s", "÷ best single", "tokens a step", "steps"],
        [_row(name, play, best) for name, play in rows],
    )
    gain = outcome.gain
    terminal.say(
        f"Steered over the best single arm "
        f"({'off' if outcome.best_arm is None else name_of(outcome.best_arm)}): {gain.median:.3f} "
        f"({gain.low:.3f}–{gain.high:.3f}). {outcome.compared - outcome.differing} of "
        f"{outcome.compared} answers have plain decoding's tokens. {label(source)}"
    )


def _row(name: str, play: StreamPlay, best: float) -> list[str]:
    ran = [f"{arm} {share:.0%}" for arm, share in shares(play).items() if share >= _LEAST_SHOWN]
    return [
        name,
        f"{play.tokens_per_second:.0f}",
        f"{play.tokens_per_second / best:.3f}",
        f"{play.acceptance_length:.2f}",
        ", ".join(ran) if name == "steered" else "",
    ]
