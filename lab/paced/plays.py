"""A stream as one policy has played it, in the model's time."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lab.cpu_engine.pace.step_log import LoggedStep, LogPart
from lab.harness.load_generator import Play
from lab.paced.traffic import Stream

# A play with a larger share of late passes is rejected.
LATE_SHARE_MAX = 0.01


@dataclass(frozen=True)
class StreamPlay:
    """Holds one play: what its clients saw, and the engine's log of it.

    dilation: seconds of the machine for each of the model; 1 where nothing is imposed.
    """

    policy: str
    stream: Stream
    dilation: float
    client_play: Play
    log: LogPart

    @property
    def seconds(self) -> float:
        """Seconds of the model's time, from the first request to the last answer."""
        return self.client_play.seconds / self.dilation

    @property
    def tokens_per_second(self) -> float:
        """All tokens over all seconds of the model's time."""
        return self.stream.tokens / self.seconds

    @property
    def late_share(self) -> float:
        """The share of passes in which the machine missed the pace."""
        return sum(step.late for step in self.log.steps) / max(len(self.log.steps), 1)

    @property
    def decode_steps(self) -> tuple[LoggedStep, ...]:
        """The decode steps, in order."""
        return tuple(step for step in self.log.steps if step.is_decode)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a sequence gained in a decode step, on average."""
        sequences = sum(step.batch_size for step in self.decode_steps)
        return sum(step.tokens for step in self.decode_steps) / max(sequences, 1)

    @cached_property
    def phase_bounds(self) -> tuple[tuple[float, float], ...]:
        """Begin and end of each phase, on the machine's clock."""
        return tuple(
            (phase.started, phase.started + phase.seconds) for phase in self.client_play.phases
        )

    def phase_steps(self, phase: int) -> tuple[LoggedStep, ...]:
        """The decode steps that began in a phase, counted from 0."""
        begin, end = self.phase_bounds[phase]
        return tuple(step for step in self.decode_steps if begin <= step.began < end)

    def phase_rate(self, phase: int) -> float:
        """Tokens/s of the model's time in a phase, the first tokens of requests included."""
        begin, end = self.phase_bounds[phase]
        first = sum(begin <= request.first_token < end for request in self.log.requests)
        tokens = sum(step.tokens for step in self.phase_steps(phase)) + first
        return tokens / ((end - begin) / self.dilation)

    def choices(self, phase: int | None = None) -> dict[str, float]:
        """Share of decode steps at each drafter and draft length, the most frequent first."""
        steps = self.decode_steps if phase is None else self.phase_steps(phase)
        counts = Counter(step_choice(step) for step in steps)
        return {choice: count / len(steps) for choice, count in counts.most_common()}

    def token_milliseconds(self, percentile: float) -> float:
        """A percentile over requests of the mean time between their tokens, ms of the model."""
        values = [
            (request.last_token - request.first_token) / (request.tokens - 1)
            for request in self.log.requests
            if request.tokens > 1
        ]
        return 1000.0 * float(np.percentile(values, percentile)) / self.dilation

    def latency_seconds(self, percentile: float) -> float:
        """A percentile over requests from sending to the whole answer, seconds of the model."""
        values = [answer.seconds for answer in self.client_play.answers]
        return float(np.percentile(values, percentile)) / self.dilation


def step_choice(step: LoggedStep) -> str:
    """Names what a decode step ran: "0", or the drafter and its draft length."""
    return f"{step.drafter} {step.gamma}" if step.gamma else "0"
