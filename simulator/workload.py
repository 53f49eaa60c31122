"""Defines the workload of the simulated engine: requests, and when they arrive.

Every request carries, for every drafter and every position of its output, the number of drafts
that would be accepted if drafting started there.  A step at position p with draft length gamma
accepts min(accepted[p], gamma) and advances p by that + 1.  So every policy gets exactly the same
draws (paired comparison), and a recorded bank is replayed rather than averaged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# The match length of all rows if the lookup's match lengths are unknown.
_UNKNOWN_MATCH = 2


@dataclass(frozen=True, slots=True)
class RequestPool:
    """Requests in the order in which they are served.

    context_tokens, output_tokens, labels: [requests] of int64; `labels` index `label_names`, which
    the engine reports as classes.
    offsets: [requests] of int64, where a request's positions start in `accepted`.
    accepted: drafter -> [positions] of uint8, drafts that would be accepted from that position on.
    matches: [positions] of uint8, tokens of the newest text that a prompt lookup finds again there,
    0 where it finds none.  None: unknown.
    kinds: [requests] of int64 from 0, the true kind of traffic of each request.  Only the oracle
    knows it.  None: all are alike.
    """

    context_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    accepted: Mapping[str, NDArray[np.uint8]]
    label_names: tuple[str, ...] = ("",)
    kinds: NDArray[np.int64] | None = None
    matches: NDArray[np.uint8] | None = None

    @property
    def requests(self) -> int:
        """Counts the requests."""
        return len(self.output_tokens)

    @property
    def known_matches(self) -> NDArray[np.uint8]:
        """Returns [positions], `matches`, or one length everywhere if they are unknown."""
        if self.matches is not None:
            return self.matches
        positions = max(len(values) for values in self.accepted.values())
        return np.full(positions, _UNKNOWN_MATCH, dtype=np.uint8)

    @property
    def request_kinds(self) -> NDArray[np.int64]:
        """Returns [requests], the true kind of each; zeros where all are alike."""
        return np.zeros(self.requests, dtype=np.int64) if self.kinds is None else self.kinds

    @property
    def kind_count(self) -> int:
        """Counts the kinds, those without a request included."""
        return int(self.request_kinds.max(initial=0)) + 1

    def steps_per_request(self, drafter: str, gammas: Sequence[int]) -> NDArray[np.int64]:
        """Returns [gammas, requests] steps until each request is finished, replayed alone.

        A step starts where the last one ended, so positions within an accepted draft are skipped.
        Raises KeyError for an unknown drafter.
        """

        def replay_gamma(gamma: int) -> NDArray[np.int64]:
            gained = np.minimum(self.accepted[drafter], gamma).astype(np.int64) + 1
            return self.replay_steps(lambda cursor, _: gained[cursor])

        return np.array([replay_gamma(gamma) for gamma in gammas])

    def replay_steps(
        self, tokens_gained: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Returns [requests] steps until each request is finished, if all begin together.

        tokens_gained: the tokens of a step at these positions of the pool, and of these requests.
        """
        steps = np.zeros(self.requests, dtype=np.int64)
        request = np.flatnonzero(self.output_tokens > 0)
        cursor = self.offsets[request]
        end = cursor + self.output_tokens[request]
        step = 0
        while len(request):
            step += 1
            cursor = cursor + tokens_gained(cursor, request)
            running = cursor < end
            if not running.all():
                steps[request[~running]] = step
                request, cursor, end = request[running], cursor[running], end[running]
        return steps

    def tokens_per_step(self, drafter: str, gammas: Sequence[int]) -> NDArray[np.float64]:
        """Returns [gammas] mean tokens that a sequence gains in a step; see `steps_per_request`.

        Tokens past the end of a request do not count.  Raises KeyError for an unknown drafter.
        """
        mean: NDArray[np.float64] = self.output_tokens.sum() / self.steps_per_request(
            drafter, gammas
        ).sum(axis=1)
        return mean


class AcceptanceSource(Protocol):
    """Provides acceptance from a curve, or from a recorded trace."""

    @property
    def name(self) -> str:
        """Short name for tables."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that the source knows."""

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """Draws `requests` requests.

        If no lengths ([requests] of int64) are given, the source's own are used.  A recorded
        sequence shorter than the output is repeated from its beginning.
        """


class PhaseStart(Enum):
    """Names what happens to the running requests when a phase begins.

    DRAINED: they finish first, and the phase's requests replace them one by one.
    CHANGED: at the phase's first step they switch to its acceptance at their position (pools of
    equal shape only).  REPLACED: at the phase's first step they are suspended and replaced by
    requests of the phase: new ones, or those that were suspended when a phase of the same pool and
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

    tokens None: every request of the pool once.  The phase ends when its last request was admitted;
    the next phase starts while its requests still run, and the last phase ends with its last
    request.  Every token counts in the phase in which it was gained.
    """

    name: str
    pool: RequestPool
    concurrency: int
    tokens: int | None
    begins: PhaseStart = PhaseStart.DRAINED

    @property
    def is_sudden(self) -> bool:
        """Whether the traffic changes within one step, instead of request by request."""
        return self.begins is not PhaseStart.DRAINED


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Phases one after the other; every phase is one segment of the oracle's."""

    phases: tuple[WorkloadPhase, ...]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests with arrival times; at most `max_concurrency` run, the others wait.

    arrival_seconds: [requests], ascending, from 0.  window_seconds: length of an oracle segment.
    """

    pool: RequestPool
    arrival_seconds: NDArray[np.float64]
    max_concurrency: int
    window_seconds: float


Workload = ClosedLoop | OpenLoop


def distinct_pools(workload: Workload) -> tuple[RequestPool, ...]:
    """Lists the pools in the order of their first phase; phases that share a pool have it once.

    The kinds of a workload are numbered through in this order: those of the first pool, then those
    of the second one, and so on.
    """
    pools = (
        [phase.pool for phase in workload.phases]
        if isinstance(workload, ClosedLoop)
        else [workload.pool]
    )
    return tuple({id(pool): pool for pool in pools}.values())
