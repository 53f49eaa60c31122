"""Defines what the simulated engine is asked to do: requests, and when they come.

Every request carries, for every drafter and every position of its output, the number of drafts
that would be accepted if drafting started there.  A step at position p with draft length gamma
accepts min(accepted[p], gamma) and moves p on by that + 1.  So every policy meets exactly the same
luck (paired comparison), and a recorded bank is replayed rather than averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RequestPool:
    """Requests in the order in which they are served.

    context_tokens, output_tokens, labels: [requests] of int64; `labels` index `label_names`.
    offsets: [requests] of int64, where a request's positions start in `accepted`.
    accepted: drafter -> [positions] of uint8, drafts that would be accepted from that position on.
    """

    context_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    accepted: Mapping[str, NDArray[np.uint8]]
    label_names: tuple[str, ...] = ("",)

    @property
    def requests(self) -> int:
        """Counts the requests."""
        return len(self.output_tokens)

    def tokens_per_step(self, drafter: str, gammas: Sequence[int]) -> NDArray[np.float64]:
        """[gammas] mean tokens that a sequence gains in a step: every request is replayed alone.

        Tokens past the end of a request do not count.  Raises KeyError for an unknown drafter.
        """
        accepted = self.accepted[drafter]
        most = np.array(gammas, dtype=np.int64)[:, None]
        position = np.zeros((len(most), self.requests), dtype=np.int64)
        steps = np.zeros(len(most), dtype=np.int64)
        running = position < self.output_tokens
        while running.any():
            at = np.where(running, self.offsets + position, 0)
            position += running * (np.minimum(accepted[at], most) + 1)
            steps += running.sum(axis=1)
            running = position < self.output_tokens
        mean: NDArray[np.float64] = self.output_tokens.sum() / steps
        return mean


class AcceptanceSource(Protocol):
    """Provides acceptance from a curve, or from a recorded trace."""

    @property
    def name(self) -> str:
        """Short name for tables."""
        ...

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that the source knows."""
        ...

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """Draws so many requests.

        Lengths ([requests] of int64) are the source's own if not given.  A recorded sequence
        shorter than the asked output starts again from its beginning.
        """
        ...


class PhaseStart(Enum):
    """Names what happens to the running requests when a phase begins.

    DRAINED: they finish first, and the phase's own requests take their places one by one.
    CHANGED: at the phase's first step they change over to its acceptance, where they stand (pools
    of equal shape only).  REPLACED: at the phase's first step they are set aside, and those of the
    phase take their place: new ones, or those that were set aside when a phase of the same pool and
    concurrency ended.
    """

    DRAINED = "drained"
    CHANGED = "changed"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class WorkloadPhase:
    """A stretch of closed-loop work: `tokens` tokens at `concurrency`, from `pool` in turn.

    When a phase begins at a smaller concurrency, running requests finish first (unless they are
    replaced), and its tokens count once the batch has shrunk to it.

    tokens None: every request of the pool once.  The phase ends when its last request was admitted,
    the next one goes on beside what still runs, and the last phase ends with its last request;
    every token counts in the phase in which it was gained.
    """

    name: str
    pool: RequestPool
    concurrency: int
    tokens: int | None
    begins: PhaseStart = PhaseStart.DRAINED

    @property
    def at_once(self) -> bool:
        """Is true where the traffic changes within one step, instead of request by request."""
        return self.begins is not PhaseStart.DRAINED


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Phases one after the other; every phase is one segment of the oracle's."""

    phases: tuple[WorkloadPhase, ...]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that come when they come; at most `max_concurrency` run, the others wait.

    arrival_seconds: [requests], ascending, from 0.  window_seconds: length of an oracle segment.
    """

    pool: RequestPool
    arrival_seconds: NDArray[np.float64]
    max_concurrency: int
    window_seconds: float


Workload = ClosedLoop | OpenLoop
