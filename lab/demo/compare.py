"""Compares plays of several policies: exactness, medians, paired ratios."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lab.harness.load_generator import (
    Answer,
    Play,
    acceptance_length,
    paired_ratio,
    phase_rates,
)
from lab.harness.sidecar import GammaSample
from lab.harness.spread import Spread
from lab.harness.stream import StreamPhase


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token in which an answer differs from the reference's."""

    request: int
    position: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class PolicyPlays:
    """All repeats of one policy, in order."""

    policy: str
    plays: tuple[Play, ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers of all repeats."""
        return tuple(answer for play in self.plays for answer in play.answers)

    def tokens_per_second(self, phase: int | None = None) -> Spread:
        """Tokens/s of each repeat, of one phase (counted from 0) or of the whole stream."""
        return phase_rates(self.plays, phase)

    def acceptance_by_domain(self) -> dict[str, float]:
        """Acceptance length of the requests of each domain, whatever their phase."""
        domains = sorted({answer.request.domain for answer in self.answers})
        return {
            domain: acceptance_length([a for a in self.answers if a.request.domain == domain])
            for domain in domains
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """The plays that the static draft length was chosen from, by the draft length they ran at."""

    plays: Mapping[int, tuple[Play, ...]]

    @property
    def ranked(self) -> tuple[int, ...]:
        """Draft lengths from the highest mean rate down; those played more often come first."""
        return tuple(
            sorted(self.plays, key=lambda g: (len(self.plays[g]), self.rate(g)), reverse=True)
        )

    @property
    def gamma(self) -> int:
        """The best draft length."""
        return self.ranked[0]

    def rate(self, gamma: int, phase: int | None = None) -> float:
        """Tokens/s, mean over the plays, of one phase (counted from 0) or of the whole stream."""
        return fmean(phase_rates(self.plays[gamma], phase).values)

    @property
    def hindsight(self) -> float:
        """Tokens/s of the whole stream had every phase run at its own best draft length.

        About the most that any choice of draft length can reach; somewhat too high, since the best
        of several noisy rates is.
        """
        phases = self.plays[self.gamma][0].phases
        seconds = sum(
            phase.tokens / max(self.rate(gamma, number) for gamma in self.plays)
            for number, phase in enumerate(phases)
        )
        return sum(phase.tokens for phase in phases) / seconds


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """Everything that was measured.

    policies: off, static, SGLang's adaptive, steered; the first play of the first one is the
    reference for exactness.  watched: what the sidecar saw of each steered play.
    selection: None when the static draft length was given.
    """

    stream: tuple[StreamPhase, ...]
    policies: tuple[PolicyPlays, ...]
    watched: tuple[tuple[GammaSample, ...], ...]
    selection: Selection | None

    @property
    def steered(self) -> PolicyPlays:
        """The steered policy, which the others are compared with."""
        return self.policies[-1]

    @property
    def others(self) -> tuple[PolicyPlays, ...]:
        """All policies but the steered one."""
        return self.policies[:-1]

    def mismatches(self, play: Play) -> tuple[Mismatch, ...]:
        """The first wrong token of each answer that differs from the reference's."""
        found: list[Mismatch] = []
        reference = self.policies[0].plays[0]
        for expected, answer in zip(reference.answers, play.answers, strict=True):
            for position, (a, b) in enumerate(zip(expected.tokens, answer.tokens, strict=True)):
                if a != b:
                    found.append(Mismatch(answer.request.index, position, a, b))
                    break
        return tuple(found)

    def ratio(self, other: PolicyPlays, phase: int | None = None) -> Spread:
        """Tokens/s of the steered engine over another's, repeat by repeat.

        phase: counted from 0; None for the whole stream.
        """
        return paired_ratio(self.steered.plays, other.plays, phase)

    def exact(self, policy: PolicyPlays) -> bool:
        """Every token of every repeat equals the reference's."""
        return not any(self.mismatches(play) for play in policy.plays)

    def samples_of(self, repeat: int, number: int) -> tuple[GammaSample, ...]:
        """Steered steps that were seen during one phase (counted from 0) of one repeat."""
        phase = self.steered.plays[repeat].phases[number]
        end = phase.started + phase.seconds
        return tuple(s for s in self.watched[repeat] if phase.started <= s.at <= end)


def choice_shares(samples: Sequence[GammaSample]) -> dict[str, float]:
    """Share of the samples at each drafter and draft length, ascending."""
    counts = Counter((s.drafter if s.gamma else "", s.gamma, s.choice) for s in samples)
    return {key[2]: counts[key] / len(samples) for key in sorted(counts)}
