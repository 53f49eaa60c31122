"""Compares what was played: rates over that of the best single arm, and differing tokens."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.core.engine_spec import Arm
from lab.harness.spread import Spread
from lab.paced.plays import StreamPlay


@dataclass(frozen=True)
class EditsOutcome:
    """Holds the plays of one run.

    off: plain decoding.  singles: each fixed arm of a single drafter.  mixed: each fixed arm of the
    mixture.  steered: one play a repeat.
    """

    off: StreamPlay
    singles: Mapping[Arm, StreamPlay]
    mixed: Mapping[Arm, StreamPlay]
    steered: Sequence[StreamPlay]

    @property
    def best_arm(self) -> Arm | None:
        """The fastest arm of a single drafter, found by running all; None for plain decoding."""
        arm = max(self.singles, key=lambda arm: self.singles[arm].tokens_per_second)
        faster = self.singles[arm].tokens_per_second > self.off.tokens_per_second
        return arm if faster else None

    @property
    def best(self) -> StreamPlay:
        """The play of the best single arm."""
        arm = self.best_arm
        return self.off if arm is None else self.singles[arm]

    @property
    def gain(self) -> Spread:
        """Steered over the best single arm, by repeat."""
        best = self.best.tokens_per_second
        return Spread(tuple(play.tokens_per_second / best for play in self.steered))

    @property
    def plays(self) -> tuple[StreamPlay, ...]:
        """All plays that speculate."""
        return (*self.singles.values(), *self.mixed.values(), *self.steered)

    @property
    def differing(self) -> int:
        """Answers that differ from plain decoding's in any token."""
        expected = tokens_by_request(self.off)
        return sum(
            tokens != expected[request]
            for play in self.plays
            for request, tokens in tokens_by_request(play).items()
        )

    @property
    def compared(self) -> int:
        """Answers that were compared."""
        return sum(len(play.played.served) for play in self.plays)

    def as_json(self) -> dict[str, Any]:
        """The outcome as it stands in a result file."""
        return {
            "off": _play(self.off),
            "singles": {name_of(arm): _play(play) for arm, play in self.singles.items()},
            "mixed": {name_of(arm): _play(play) for arm, play in self.mixed.items()},
            "steered": [_play(play) for play in self.steered],
            "best": "off" if self.best_arm is None else name_of(self.best_arm),
            "gain": self.gain.as_json(),
            "answers": {"compared": self.compared, "differing": self.differing},
        }


def tokens_by_request(play: StreamPlay) -> dict[str, tuple[int, ...]]:
    """The tokens of each answer, by the request's id."""
    return {str(served.id): served.tokens for served in play.played.served}


def name_of(arm: Arm) -> str:
    """Names an arm: its drafter and its draft length."""
    return f"{arm.drafter} {arm.gamma}"


def shares(play: StreamPlay) -> dict[str, float]:
    """Share of the decode steps by what drafted, the most frequent first."""
    steps = play.decode_steps
    found = Counter(
        "off" if step.gamma == 0 else f"{step.drafter}{'+ngram' if step.mixed else ''} {step.gamma}"
        for step in steps
    )
    return {name: count / len(steps) for name, count in found.most_common()}


def _play(play: StreamPlay) -> dict[str, Any]:
    return {
        "tokens_per_second": round(play.tokens_per_second, 1),
        "acceptance_length": round(play.acceptance_length, 3),
        "steps": len(play.decode_steps),
        "late_share": round(play.late_share, 4),
        "shares": {name: round(share, 3) for name, share in shares(play).items()},
    }
