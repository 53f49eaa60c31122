"""The running batch: its requests, the position of each, and the requests that wait.

The state of the sequences is in plain lists: a step of a few sequences takes a tenth of the time
that it takes with numpy arrays of that length.
"""

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, sub

import numpy as np
from numpy.typing import NDArray

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


class _PoolLists:
    """A pool's values by request, for the batch; `base`: offsets in the joint acceptance arrays."""

    def __init__(
        self, pool: RequestPool, start: int, first_kind: int, label_names: list[str]
    ) -> None:
        labels = np.array([label_names.index(name) for name in pool.label_names])[pool.labels]
        self.base: list[int] = (pool.offsets + start).tolist()
        self.label: list[int] = labels.tolist()
        self.kind: list[int] = (pool.request_kinds + first_kind).tolist()
        self.context: list[int] = pool.context_tokens.tolist()
        self.output: list[int] = pool.output_tokens.tolist()


@dataclass(slots=True)
class _Sequence:
    """A running request.

    number: among all admitted requests.  request: its index in its pool.  base: its first position
    in the acceptance arrays.
    """

    number: int
    request: int
    base: int
    context_tokens: int
    label: int
    kind: int


@dataclass(frozen=True, slots=True)
class _SuspendedPhase:
    """Suspended sequences of a phase that may return, and the next request of its pool.

    cursors, ends, sequences: as in `Batch`.  prefilling: requests whose prompts have not been read
    yet.
    """

    cursors: list[int]
    ends: list[int]
    sequences: list[_Sequence]
    kv_tokens: int
    prefilling: deque[list[int]]
    next_request: int


class Batch:
    """Sequences of a workload under continuous batching.  One object per run.

    with_counts: whether `step` counts the accepted drafts, for a report.
    idle_positions: number of draft positions at which idle drafters are evaluated, 0 for no
    evaluation; `idle_counts` holds the result of the last step.  `evidence`: of the last step, if
    it had rules.  `kind_counts`: [kinds] running sequences by request kind, which policies cannot
    see, numbered as by `distinct_pools`.  `admission_seconds`: virtual time before which `admit`
    finds no request.
    """

    def __init__(
        self,
        workload: Workload,
        surface: CostSurface,
        idle_positions: int = 0,
        *,
        with_counts: bool = True,
    ) -> None:
        self._idle_positions, self._with_counts = idle_positions, with_counts
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
        # Position of each sequence in the acceptance arrays, and the position after its last one.
        self._cursors: list[int] = []
        self._ends: list[int] = []
        self._sequences: list[_Sequence] = []
        self.kind_counts = [0] * self._kind_count
        # By (drafter, gamma), [positions] tokens that a step there gains.
        self._gains_by_arm: dict[tuple[int, int], bytes] = {}
        self.size = 0
        self.kv_tokens = 0
        self.phase = 0
        self.phase_changed = True
        self._capacity = capacity
        self._next_request = 0
        self._phase_tokens = 0
        self.admission_seconds = -math.inf
        # A lower bound of the tokens until the next sequence finishes.
        self._min_remaining_tokens = 0
        # For each request: context tokens left to read, its number, its index in the phase's pool,
        # the phase.
        self.prefilling: deque[list[int]] = deque()
        # By pool and concurrency of their phase.
        self._suspended_phases: dict[tuple[int, int], _SuspendedPhase] = {}
        self.times = RequestTimes()
        # Times that are those of the end of the present step: lists of `times`, and indices.
        self.unset_times: list[tuple[list[float], int]] = []
        self.done = False

    def _join_pools(self, pools: list[RequestPool], distinct: tuple[RequestPool, ...]) -> None:
        """Makes one array per drafter over all pools, so that a sequence needs only one offset."""
        names = sorted({label for pool in distinct for label in pool.label_names})
        self.label_names = tuple(names)
        accepted_parts: list[list[NDArray[np.uint8]]] = [[] for _ in self._drafters]
        pool_lists: dict[int, _PoolLists] = {}
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
            pool_lists[id(pool)] = _PoolLists(pool, start, first_kind, names)
            start += length
            first_kind += pool.kind_count
        self._kind_count = first_kind
        self._pools = [pool_lists[id(pool)] for pool in pools]
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

    def next_arrival(self) -> float | None:
        """Returns the arrival time of the next request in virtual seconds; None after the last."""
        return next(iter(self._arrivals[self._next_request : self._next_request + 1]), None)

    def segment_at(self, now: float) -> int:
        """Returns the oracle's segment (comparison/oracle.py) of a step that starts now."""
        return self.phase if self._closed_loop is not None else int(now / self._window_seconds)

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
        places = limit - self.size - len(self.prefilling)
        pool = self._pools[self.phase]
        for _ in range(min(places, available)):
            arrival = now if closed_loop is not None else self._arrivals[self._next_request]
            # A closed loop repeats its pool; an open loop never reaches the pool's end.
            i = self._next_request % len(pool.output)
            self._next_request += 1
            number = self.times.add(arrival, pool.output[i])
            self.prefilling.append([pool.context[i], number, i, self.phase])
        # A sequence that finishes, or another phase, sets it back.
        self.admission_seconds = math.inf
        if places > available and (next_arrival := self.next_arrival()) is not None:
            self.admission_seconds = next_arrival

    def start_all(self) -> None:
        """Starts to decode every admitted request, without a cost for its prompt."""
        while self.prefilling:
            self._start(self.prefilling.popleft())

    def prefill(self, chunk_tokens: int, seconds_per_token: float) -> float:
        """Reads up to `chunk_tokens` of the waiting prompts; returns the seconds that it took."""
        tokens_left = chunk_tokens
        while tokens_left > 0 and self.prefilling:
            request = self.prefilling[0]
            chunk = min(tokens_left, request[0])
            request[0] -= chunk
            tokens_left -= chunk
            if request[0] == 0:
                self._start(self.prefilling.popleft())
        return (chunk_tokens - tokens_left) * seconds_per_token

    def _start(self, request: list[int]) -> None:
        _, number, i, phase = request
        pool = self._pools[phase]
        base, context_tokens, kind = pool.base[i], pool.context[i], pool.kind[i]
        output_tokens = pool.output[i]
        if self.size == 0 or output_tokens < self._min_remaining_tokens:
            self._min_remaining_tokens = output_tokens
        self._cursors.append(base)
        self._ends.append(base + output_tokens)
        self._sequences.append(_Sequence(number, i, base, context_tokens, pool.label[i], kind))
        self.kind_counts[kind] += 1
        self.size += 1
        self.kv_tokens += context_tokens
        self.unset_times.append((self.times.first_token, number))

    def step(
        self,
        drafter: int,
        gamma: int,
        kept_drafts: Sequence[bool] | None,
        rules: Sequence[MixtureRule] = (),
    ) -> tuple[list[int], list[tuple[str, list[int]]], int]:
        """Runs one decode step; returns (accepted_counts, counts by class, tokens gained).

        kept_drafts: [sequences] whether a stale drafter's drafts can be accepted; None: all can.
        The counts are empty without `with_counts`.
        """
        start, self.evidence = self._cursors, None
        if gamma == 0:
            gained = [1] * self.size
        elif rules and self._row_chooser is not None:
            gained = self._gain_by_row(self._row_chooser, drafter, gamma, kept_drafts, rules)
        else:
            gains = self._gains_by_arm.get((drafter, gamma)) or self._make_gains(drafter, gamma)
            gained = [gains[cursor] for cursor in start]
            if kept_drafts is not None:
                gained = [g if kept else 1 for g, kept in zip(gained, kept_drafts, strict=True)]
        self._cursors = list(map(add, start, gained))
        tokens = sum(gained)
        counts, classes = self._count_accepted(gained, gamma) if self._with_counts else ([], [])
        if self._idle_positions:
            self.idle_counts = self._score_idle_drafters(
                drafter if gamma > 0 else None, np.array(start), np.array(gained)
            )
        self.kv_tokens += tokens
        self._min_remaining_tokens -= gamma + 1
        if self._min_remaining_tokens <= 0:
            tokens -= self._remove_finished()
        return counts, classes, tokens

    def _make_gains(self, drafter: int, gamma: int) -> bytes:
        gains = (np.minimum(self._accepted_by_drafter[drafter], gamma) + 1).astype(np.uint8)
        self._gains_by_arm[drafter, gamma] = gains.tobytes()
        return self._gains_by_arm[drafter, gamma]

    def _gain_by_row(
        self,
        chooser: RowDrafterChooser,
        drafter: int,
        gamma: int,
        kept_drafts: Sequence[bool] | None,
        rules: Sequence[MixtureRule],
    ) -> list[int]:
        """Returns [sequences] tokens gained where the rules choose each one's drafter."""
        accepted, self.evidence = chooser.choose_rows(
            drafter,
            gamma,
            np.array(self._cursors),
            np.array([sequence.number for sequence in self._sequences]),
            rules,
            None if kept_drafts is None else np.array(kept_drafts, dtype=np.float64),
        )
        gained: list[int] = (accepted + 1).tolist()
        return gained

    def set_times(self, now: float) -> None:
        """Sets the times of requests whose first or last step ends now."""
        for times, number in self.unset_times:
            times[number] = now
        self.unset_times.clear()

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

    def _count_accepted(
        self, gained: Sequence[int], gamma: int
    ) -> tuple[list[int], list[tuple[str, list[int]]]]:
        """Counts accepted lengths, and by label; sequences without a label belong to no class."""
        counts = list(map(bytes(gained).count, range(1, gamma + 2)))
        if len(self.label_names) == 1:
            return counts, []
        rows = [[0] * (gamma + 1) for _ in self.label_names]
        for sequence, tokens in zip(self._sequences, gained, strict=True):
            rows[sequence.label][tokens - 1] += 1
        labelled_rows = zip(self.label_names, rows, strict=True)
        return counts, [(name, row) for name, row in labelled_rows if name and any(row)]

    def _remove_finished(self) -> int:
        """Removes finished sequences; returns the number of tokens past their ends."""
        remaining_tokens = list(map(sub, self._ends, self._cursors))
        self._min_remaining_tokens = min(remaining_tokens)
        if self._min_remaining_tokens > 0:
            return 0
        tokens_past_end = 0
        for i in range(self.size - 1, -1, -1):
            if remaining_tokens[i] <= 0:
                sequence = self._sequences.pop(i)
                cursor = self._cursors.pop(i)
                tokens_past_end += cursor - self._ends.pop(i)
                self.kv_tokens -= sequence.context_tokens + cursor - sequence.base
                self.kind_counts[sequence.kind] -= 1
                self.unset_times.append((self.times.finish, sequence.number))
        self.size = len(self._cursors)
        self._min_remaining_tokens = min((r for r in remaining_tokens if r > 0), default=0)
        self.admission_seconds = -math.inf
        return tokens_past_end

    def count_phase_tokens(self, tokens: int) -> float:
        """Counts tokens in the phase; returns the share of them, in [0, 1], that it needed."""
        if self._closed_loop is None:
            finished = self._next_request >= len(self._arrivals)
            self.done = finished and self.size == 0 and not self.prefilling
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
        self._enter_phase(self.phase + 1)
        self._start_phase(self._closed_loop.phases[self.phase], ended=phase)
        self._phase_tokens = 0
        return 1.0

    def _enter_phase(self, phase: int) -> None:
        self.phase = phase
        self.phase_changed = True
        self.admission_seconds = -math.inf

    def _start_phase(self, phase: WorkloadPhase, *, ended: WorkloadPhase) -> None:
        """Applies the phase's `PhaseStart` to the running requests."""
        if phase.begins is PhaseStart.CHANGED:
            self._move_to_pool()
        elif phase.begins is PhaseStart.REPLACED:
            self._suspended_phases[id(ended.pool), ended.concurrency] = _SuspendedPhase(
                self._cursors,
                self._ends,
                self._sequences,
                self.kv_tokens,
                self.prefilling,
                self._next_request,
            )
            empty_phase = _SuspendedPhase([], [], [], 0, deque(), 0)
            resumed = self._suspended_phases.pop((id(phase.pool), phase.concurrency), empty_phase)
            self._cursors, self._ends = resumed.cursors, resumed.ends
            self._sequences = resumed.sequences
            self.size = len(self._sequences)
            self.kv_tokens = resumed.kv_tokens
            self.prefilling = resumed.prefilling
            self._next_request = resumed.next_request
            self._min_remaining_tokens = 0
            self._count_kinds()
        else:
            self._next_request = 0

    def _move_to_pool(self) -> None:
        """Moves every request in flight to the same position of the same request in this pool."""
        pool = self._pools[self.phase]
        for i, sequence in enumerate(self._sequences):
            request = sequence.request
            shift = pool.base[request] - sequence.base
            self._cursors[i] += shift
            self._ends[i] += shift
            sequence.base += shift
            sequence.label, sequence.kind = pool.label[request], pool.kind[request]
        self._count_kinds()
        for request_state in self.prefilling:
            request_state[3] = self.phase

    def _count_kinds(self) -> None:
        self.kind_counts = [0] * self._kind_count
        for sequence in self._sequences:
            self.kind_counts[sequence.kind] += 1

    def _advance_request_phase(self, closed: ClosedLoop) -> None:
        """Starts the next phase once every request of this one has begun."""
        if self._next_request < closed.phases[self.phase].pool.requests:
            return
        if self.phase + 1 < len(closed.phases):
            self._enter_phase(self.phase + 1)
            self._next_request = 0
        else:
            self.done = self.size == 0 and not self.prefilling


def _counts_at_least(values: NDArray[np.int64], depth: int) -> list[int]:
    """Returns [depth] counts of the values that are at least 1, 2, ..."""
    counts = np.bincount(np.minimum(values, depth), minlength=depth + 1)
    counts_at_least: list[int] = np.cumsum(counts[:0:-1])[::-1].tolist()
    return counts_at_least
