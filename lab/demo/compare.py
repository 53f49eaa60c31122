"""Plays of several policies against each other: exactness, medians, paired ratios."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lab.harness.load_generator import Answer, Play, acceptance_length
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
    def tokens_per_second(self) -> Spread:
        """Of the whole stream."""
        return Spread(tuple(play.tokens_per_second for play in self.plays))

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Of all repeats."""
        return tuple(answer for play in self.plays for answer in play.answers)

    def phase_tokens_per_second(self, number: int) -> Spread:
        """Of one phase, counted from 0."""
        return Spread(tuple(play.phases[number].tokens_per_second for play in self.plays))

    def acceptance_by_domain(self) -> dict[str, float]:
        """Acceptance length of the requests of each domain, whatever their phase."""
        domains = sorted({answer.request.domain for answer in self.answers})
        return {
            domain: acceptance_length([a for a in self.answers if a.request.domain == domain])
            for domain in domains
        }


@dataclass(frozen=True, slots=True)
class Selection:
    """How the static draft length was found: the plays held to each, in the order played."""

    plays: Mapping[int, tuple[Play, ...]]

    @property
    def ranked(self) -> tuple[int, ...]:
        """Draft lengths from the highest mean rate down; those played more often come first."""
        return tuple(
            sorted(self.plays, key=lambda g: (len(self.plays[g]), self.rate(g)), reverse=True)
        )

    @property
    def gamma(self) -> int:
        """The best one."""
        return self.ranked[0]

    def rate(self, gamma: int) -> float:
        """Tokens/s of the whole stream, mean over its plays."""
        return fmean(play.tokens_per_second for play in self.plays[gamma])

    def phase_rate(self, gamma: int, number: int) -> float:
        """Tokens/s of one phase, counted from 0, mean over its plays."""
        return fmean(play.phases[number].tokens_per_second for play in self.plays[gamma])

    @property
    def hindsight(self) -> float:
        """Tokens/s of the whole stream had every phase run at its own best draft length.

        About the most that any choice of draft length can reach; somewhat too high, since the best
        of several noisy rates is.
        """
        phases = self.plays[self.gamma][0].phases
        seconds = sum(
            phase.tokens / max(self.phase_rate(gamma, number) for gamma in self.plays)
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
        """Ours."""
        return self.policies[-1]

    @property
    def others(self) -> tuple[PolicyPlays, ...]:
        """What it is compared with."""
        return self.policies[:-1]

    def mismatches(self, play: Play) -> tuple[Mismatch, ...]:
        """Where a play differs from the reference."""
        return mismatches(self.policies[0].plays[0], play)

    def exact(self, policy: PolicyPlays) -> bool:
        """Every token of every repeat equals the reference's."""
        return not any(self.mismatches(play) for play in policy.plays)

    def samples_of(self, repeat: int, number: int) -> tuple[GammaSample, ...]:
        """Steered steps that were seen during one phase (counted from 0) of one repeat."""
        phase = self.steered.plays[repeat].phases[number]
        end = phase.started + phase.seconds
        return tuple(s for s in self.watched[repeat] if phase.started <= s.at <= end)


def mismatches(reference: Play, play: Play) -> tuple[Mismatch, ...]:
    """Where the answers of `play` differ from the reference's; empty when every token is equal."""
    found: list[Mismatch] = []
    for expected, answer in zip(reference.answers, play.answers, strict=True):
        for position, (a, b) in enumerate(zip(expected.tokens, answer.tokens, strict=True)):
            if a != b:
                found.append(Mismatch(answer.request.index, position, a, b))
                break
    return tuple(found)


def paired_ratio(ours: PolicyPlays, theirs: PolicyPlays) -> Spread:
    """Tokens/s of ours over theirs, repeat by repeat: what drifts from one to the next cancels."""
    pairs = zip(ours.plays, theirs.plays, strict=True)
    return Spread(tuple(a.tokens_per_second / b.tokens_per_second for a, b in pairs))


def paired_phase_ratio(ours: PolicyPlays, theirs: PolicyPlays, number: int) -> Spread:
    """The same of one phase, counted from 0."""
    pairs = zip(ours.plays, theirs.plays, strict=True)
    return Spread(
        tuple(
            a.phases[number].tokens_per_second / b.phases[number].tokens_per_second
            for a, b in pairs
        )
    )


def choice_shares(samples: Sequence[GammaSample]) -> dict[str, float]:
    """Share of the samples at each drafter and draft length, ascending."""
    counts = Counter((s.drafter if s.gamma else "", s.gamma, s.choice) for s in samples)
    return {key[2]: counts[key] / len(samples) for key in sorted(counts)}
