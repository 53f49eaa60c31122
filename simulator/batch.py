"""The running batch: its requests, the position of each, and the requests that wait."""

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import MAX_GAMMA
from controller.core.plan import MixtureRule
from simulator.errors import InvalidInputError
from simulator.policy import IdleCounts, RowEvidence
from simulator.results import RequestTimes
from simulator.row_drafters import RowDrafterChooser
from simulator.surface import CostSurface
from simulator.workload import (
    ClosedLoop,
    PhaseStart,
    RequestPool,
    Workload,
    WorkloadPhase,
    distinct_pools,
)

_ACCEPTED_LENGTHS = range(MAX_GAMMA + 1)


class _PoolArrays:
    """A pool's arrays for the batch; `base`: offsets in the joint acceptance arrays."""

    def __init__(
        self, pool: RequestPool, start: int, first_kind: int, label_names: list[str]
    ) -> None:
        labels = np.array([label_names.index(name) for name in pool.label_names])[pool.labels]
        self.base: NDArray[np.int64] = pool.offsets + start
        self.label: NDArray[np.int64] = labels
        self.kind: NDArray[np.int64] = pool.request_kinds + first_kind
        # Plain lists: requests are admitted one by one.
        self.context: list[int] = pool.context_tokens.tolist()
        self.output: list[int] = pool.output_tokens.tolist()


@dataclass(frozen=True, slots=True)
class _SuspendedPhase:
    """Suspended sequences of a phase that may return, and the next request of its pool.

    rows: [8, sequences], as in `Batch`.  prefilling: requests whose prompts have not been read yet.
    """

    rows: NDArray[np.int64]
    kv_tokens: int
    prefilling: tuple[list[int], ...]
    next_request: int


class Batch:
    """Sequences of a workload under continuous batching.  One object per run.

    All per-sequence state is in numpy arrays whose first `size` entries are in use.
    idle_positions: number of draft positions at which idle drafters are evaluated, 0 for no
    evaluation; `idle_counts` holds the result of the last step.  `evidence`: of the last step, if
    it had rules.
    """

    def __init__(self, workload: Workload, surface: CostSurface, idle_positions: int = 0) -> None:
        self._idle_positions = idle_positions
        self.idle_counts: list[IdleCounts] = []
        self.evidence: RowEvidence | None = None
        self._drafters = [d.name for d in surface.drafters if d.mixture is None]
        if isinstance(workload, ClosedLoop):
            self._closed_loop: ClosedLoop | None = workload
            pools = [phase.pool for phase in workload.phases]
            capacity = max(phase.concurrency for phase in workload.phases)
            self._arrivals: list[float] = []
            self._window_seconds = 0.0
        else:
            self._closed_loop = None
            pools = [workload.pool]
            capacity = workload.max_concurrency
            self._arrivals = workload.arrival_seconds.tolist()
            self._window_seconds = workload.window_seconds
        if capacity > surface.max_batch_size:
            raise InvalidInputError(
                surface.name, 0,
                f"a batch of {capacity} is requested, costs reach {surface.max_batch_size}",
            )  # fmt: skip
        self._join_pools(pools, distinct_pools(workload))
        self._row_chooser = self._make_row_chooser(surface, distinct_pools(workload))
        # cursor, end and base: current, last and first position of a sequence in the acceptance
        # arrays.
        self._sequence_state = np.zeros((8, capacity), dtype=np.int64)
        (self._cursor, self._end, self._base, self._context, self._label, self._kind,
         self._request, self._number) = self._sequence_state  # fmt: skip
        self.size = 0
        self.kv_tokens = 0
        self.phase = 0
        self.phase_changed = True
        self._capacity = capacity
        self._next_request = 0
        self._phase_tokens = 0.0
        # A lower bound of the tokens until the next sequence finishes.
        self._min_remaining_tokens = 0
        # For each request: context tokens left to read, its number, its index in the phase's pool,
        # the phase.
        self._prefilling: deque[list[int]] = deque()
        # By pool and concurrency of their phase.
        self._suspended_phases: dict[tuple[int, int], _SuspendedPhase] = {}
        self.times = RequestTimes()
        self._started_count = 0
        self._started_requests: list[int] = []
        self._finished_requests: list[int] = []
        self.done = False

    def _join_pools(self, pools: list[RequestPool], distinct: tuple[RequestPool, ...]) -> None:
        """Makes one array per drafter over all pools, so that a sequence needs only one offset."""
        names = sorted({label for pool in distinct for label in pool.label_names})
        self.label_names = tuple(names)
        accepted_parts: list[list[NDArray[np.uint8]]] = [[] for _ in self._drafters]
        pool_arrays: dict[int, _PoolArrays] = {}
        start = first_kind = 0
        for pool in distinct:
            length = 0
            for d, name in enumerate(self._drafters):
                source = pool.accepted.get(name)
                if source is None:
                    raise InvalidInputError(
                        "acceptance", 0,
                        f"there is no acceptance for drafter {name!r}, "
                        f"only for {sorted(pool.accepted)}",
                    )  # fmt: skip
                accepted_parts[d].append(source)
                length = len(source)
            pool_arrays[id(pool)] = _PoolArrays(pool, start, first_kind, names)
            start += length
            first_kind += pool.kind_count
        self._kind_count = first_kind
        self._pools = [pool_arrays[id(pool)] for pool in pools]
        self._accepted_by_drafter = [np.concatenate(parts) for parts in accepted_parts]

    def _make_row_chooser(
        self, surface: CostSurface, distinct: tuple[RequestPool, ...]
    ) -> RowDrafterChooser | None:
        mixtures = [d.mixture for d in surface.drafters if d.mixture is not None]
        if not mixtures:
            return None
        matches = np.concatenate([pool.known_matches for pool in distinct])
        chooser = RowDrafterChooser(surface.drafters, tuple(self._accepted_by_drafter), matches)
        # Without rules a mixture uses its main drafter.
        self._accepted_by_drafter += [
            self._accepted_by_drafter[self._drafters.index(mixture.main)] for mixture in mixtures
        ]
        return chooser

    @property
    def has_waiting_prefill(self) -> bool:
        """Whether the prompt of an admitted request has not been read yet."""
        return bool(self._prefilling)

    def next_arrival(self) -> float | None:
        """Returns the arrival time of the next request in virtual seconds; None after the last."""
        return next(iter(self._arrivals[self._next_request : self._next_request + 1]), None)

    def segment_at(self, now: float) -> int:
        """Returns the oracle's segment (comparison/oracle.py) of a step that starts now."""
        return self.phase if self._closed_loop is not None else int(now / self._window_seconds)

    def running_by_kind(self) -> NDArray[np.int64]:
        """Counts the running sequences by request kind, which policies cannot see.

        [kinds] as `distinct_pools` numbers them.
        """
        return np.bincount(self._kind[: self.size], minlength=self._kind_count)

    def admit(self, now: float) -> None:
        """Admits the requests that have arrived, up to the limit."""
        closed_loop = self._closed_loop
        if closed_loop is not None:
            phase = closed_loop.phases[self.phase]
            limit = phase.concurrency
            available = (
                limit if phase.tokens is not None else phase.pool.requests - self._next_request
            )
        else:
            limit = self._capacity
            available = bisect.bisect_right(self._arrivals, now) - self._next_request
        admissible_count = min(limit - self.size - len(self._prefilling), available)
        if admissible_count <= 0:
            return
        pool = self._pools[self.phase]
        for _ in range(admissible_count):
            arrival = now if closed_loop is not None else self._arrivals[self._next_request]
            # A closed loop repeats its pool; an open loop never reaches the pool's end.
            i = self._next_request % len(pool.output)
            self._next_request += 1
            number = self.times.add(arrival, pool.output[i])
            self._prefilling.append([pool.context[i], number, i, self.phase])

    def start_all(self) -> None:
        """Starts to decode every admitted request, without a cost for its prompt."""
        while self._prefilling:
            self._start(self._prefilling.popleft())

    def prefill(self, chunk_tokens: int, seconds_per_token: float) -> float:
        """Reads up to `chunk_tokens` of the waiting prompts; returns the seconds that it took."""
        tokens_left = chunk_tokens
        while tokens_left > 0 and self._prefilling:
            request = self._prefilling[0]
            chunk = min(tokens_left, request[0])
            request[0] -= chunk
            tokens_left -= chunk
            if request[0] == 0:
                self._start(self._prefilling.popleft())
        return (chunk_tokens - tokens_left) * seconds_per_token

    def _start(self, request: list[int]) -> None:
        _, number, i, phase = request
        pool = self._pools[phase]
        base, context_tokens = pool.base[i], pool.context[i]
        self._sequence_state[:, self.size] = (
            base, base + pool.output[i], base, context_tokens, pool.label[i], pool.kind[i], i,
            number,
        )  # fmt: skip
        self.size += 1
        self.kv_tokens += context_tokens
        self._min_remaining_tokens = 0
        self._started_count += 1

    def step(
        self,
        drafter: int,
        gamma: int,
        stale_keep_factors: NDArray[np.float64] | None,
        rules: Sequence[MixtureRule] = (),
    ) -> tuple[list[int], list[tuple[str, list[int]]], float]:
        """Runs one decode step; returns (accepted_counts, counts by class, tokens gained)."""
        n = self.size
        cursor = self._cursor[:n]
        start = cursor.copy() if self._idle_positions else None
        accepted: NDArray[np.integer[Any]] | None
        self.evidence = None
        if gamma > 0:
            if rules and self._row_chooser is not None:
                accepted, self.evidence = self._row_chooser.choose_rows(
                    drafter, gamma, cursor, self._number[:n], rules, stale_keep_factors
                )
            else:
                accepted = self._accepted_by_drafter[drafter].take(cursor)
                np.minimum(accepted, gamma, out=accepted)
                if stale_keep_factors is not None:
                    accepted = (accepted * stale_keep_factors).astype(np.uint8)
            counts: list[int] = np.bincount(accepted, minlength=gamma + 1).tolist()
            cursor += accepted
            tokens = n + sum(map(mul, counts, _ACCEPTED_LENGTHS))
        else:
            accepted = None
            counts = [n]
            tokens = n
        cursor += 1
        if start is not None:
            self.idle_counts = self._score_idle_drafters(
                drafter if gamma > 0 else None, start, cursor - start
            )
        classes = self._count_classes(accepted, gamma, n) if len(self.label_names) > 1 else []
        self.kv_tokens += tokens
        if self._started_count:
            self._started_requests = self._number[n - self._started_count : n].tolist()
            self._started_count = 0
        self._min_remaining_tokens -= gamma + 1
        if self._min_remaining_tokens <= 0:
            tokens -= self._remove_finished(n)
        return counts, classes, float(tokens)

    def record_times(self, now: float) -> None:
        """Records the end of the step for requests whose first or last step it was."""
        if self._started_requests:
            for number in self._started_requests:
                self.times.first_token[number] = now
            self._started_requests = []
        if self._finished_requests:
            for number in self._finished_requests:
                self.times.finish[number] = now
            self._finished_requests = []

    def _score_idle_drafters(
        self, running: int | None, start: NDArray[np.int64], verified: NDArray[np.int64]
    ) -> list[IdleCounts]:
        """Evaluates idle drafters.  start, verified: [sequences], first position and tokens."""
        depth = self._idle_positions
        idle_counts = []
        for d, name in enumerate(self._drafters):
            if d != running:
                # Tokens after the last verified one are not known.
                accepted = np.minimum(self._accepted_by_drafter[d][start], verified)
                reached = np.minimum(accepted + 1, verified)
                idle_counts.append(
                    IdleCounts(name, *(_counts_at_least(x, depth) for x in (reached, accepted)))
                )
        return idle_counts

    def _count_classes(
        self, accepted: NDArray[np.integer[Any]] | None, gamma: int, n: int
    ) -> list[tuple[str, list[int]]]:
        """Counts accepted lengths by label; sequences without a label belong to no class."""
        width = gamma + 1
        joint = self._label[:n] * width + (0 if accepted is None else accepted)
        counts = np.bincount(joint, minlength=width * len(self.label_names))
        return [
            (name, row)
            for name, row in zip(self.label_names, counts.reshape(-1, width).tolist(), strict=True)
            if name and any(row)
        ]

    def _remove_finished(self, n: int) -> int:
        """Removes finished sequences; returns the number of tokens past their ends."""
        remaining_tokens = self._end[:n] - self._cursor[:n]
        min_remaining = int(remaining_tokens.min())
        tokens_past_end = 0
        if min_remaining <= 0:
            keep = remaining_tokens > 0
            finished_rows = self._sequence_state[:, :n][:, ~keep]
            cursor, end, base, context = finished_rows[:4]
            tokens_past_end = int((cursor - end).sum())
            self.kv_tokens -= int((context + cursor - base).sum())
            self._finished_requests = finished_rows[-1].tolist()
            staying_count = n - finished_rows.shape[1]
            self._sequence_state[:, :staying_count] = self._sequence_state[:, :n][:, keep]
            self.size = staying_count
            min_remaining = int(remaining_tokens[keep].min()) if staying_count else 0
        self._min_remaining_tokens = min_remaining
        return tokens_past_end

    def count_phase_tokens(self, tokens: float) -> float:
        """Counts tokens in the phase; returns the share of them, in [0, 1], that it needed."""
        if self._closed_loop is None:
            finished = self._next_request >= len(self._arrivals)
            self.done = finished and self.size == 0 and not self._prefilling
            return 1.0
        phase = self._closed_loop.phases[self.phase]
        if phase.tokens is None:
            self._advance_request_phase(self._closed_loop)
            return 1.0
        # Sequences of the last phase finish first; the tokens of this phase count from then on.
        if tokens == 0 or self.size > phase.concurrency:
            return 1.0
        tokens_left = phase.tokens - self._phase_tokens
        self._phase_tokens += tokens
        if tokens < tokens_left:
            return 1.0
        if self.phase + 1 == len(self._closed_loop.phases):
            self.done = True
            return tokens_left / tokens
        self.phase += 1
        self._start_phase(self._closed_loop.phases[self.phase], ended=phase)
        self.phase_changed = True
        self._phase_tokens = 0.0
        return 1.0

    def _start_phase(self, phase: WorkloadPhase, *, ended: WorkloadPhase) -> None:
        """Applies the phase's `PhaseStart` to the running requests."""
        if phase.begins is PhaseStart.CHANGED:
            self._move_to_pool()
        elif phase.begins is PhaseStart.REPLACED:
            self._suspended_phases[id(ended.pool), ended.concurrency] = _SuspendedPhase(
                self._sequence_state[:, : self.size].copy(),
                self.kv_tokens,
                tuple(self._prefilling),
                self._next_request,
            )
            empty_phase = _SuspendedPhase(self._sequence_state[:, :0], 0, (), 0)
            resumed = self._suspended_phases.pop((id(phase.pool), phase.concurrency), empty_phase)
            self.size = resumed.rows.shape[1]
            self._sequence_state[:, : self.size] = resumed.rows
            self.kv_tokens = resumed.kv_tokens
            self._prefilling = deque(resumed.prefilling)
            self._next_request = resumed.next_request
            self._min_remaining_tokens = 0
        else:
            self._next_request = 0

    def _move_to_pool(self) -> None:
        """Moves every request in flight to the same position of the same request in this pool."""
        pool = self._pools[self.phase]
        request = self._request[: self.size]
        shift = pool.base[request] - self._base[: self.size]
        self._sequence_state[:3, : self.size] += shift
        self._label[: self.size] = pool.label[request]
        self._kind[: self.size] = pool.kind[request]
        for request_state in self._prefilling:
            request_state[3] = self.phase

    def _advance_request_phase(self, closed: ClosedLoop) -> None:
        """Starts the next phase once every request of this one has begun."""
        if self._next_request < closed.phases[self.phase].pool.requests:
            return
        if self.phase + 1 < len(closed.phases):
            self.phase += 1
            self._next_request = 0
            self.phase_changed = True
        else:
            self.done = self.size == 0 and not self._prefilling


def _counts_at_least(values: NDArray[np.int64], depth: int) -> list[int]:
    """Returns [depth] counts of the values that are at least 1, 2, ..."""
    counts = np.bincount(np.minimum(values, depth), minlength=depth + 1)
    counts_at_least: list[int] = np.cumsum(counts[:0:-1])[::-1].tolist()
    return counts_at_least
