"""TensorRT-LLM's speculation gate: bad acceptance switches speculation off for good.

Restated from the options `acceptance_window`, `acceptance_length_threshold` and `max_concurrency`
of TensorRT-LLM's speculation config: one draft length; the mean of accepted drafts a step over the
last N completed requests; once N have completed and that mean is below the threshold, speculation
is off until the server restarts.  Above `max_concurrency` running requests it pauses.

The simulated engine reports steps, not requests, so the window counts sequence-steps: N requests
of about 100 verify steps each.  Steps without drafts are not counted, which is generous: in the
original they lower a request's mean and so close the gate.  The original ships without a threshold
and a window; the defaults here are those of its own end-to-end test, 0.6 accepted drafts and 5
requests.  Left out: `draft_len_schedule`, which is what `vllm_schedule` compares.
"""

from collections import deque
from collections.abc import Sequence

from controller.core.engine_spec import Arm
from controller.simulation.peers.common import accepted_tokens, on_and_off
from controller.simulation.policy import ArmChoice, StepRecord
from controller.simulation.results import PolicyOrigin

THRESHOLD = 0.6
WINDOW_REQUESTS = 5
STEPS_PER_REQUEST = 100


class SpeculationGate:
    """One arm until the gate closes; plain decoding from then on.

    gamma: the draft length (nearest available, of `drafter`; default: the first one).
    max_concurrency: largest batch that speculates; None = any.  threshold: accepted drafts a
    sequence and step.  window: sequence-steps.
    """

    origin = PolicyOrigin.RESTATED

    def __init__(
        self,
        arms: Sequence[Arm],
        gamma: int = 3,
        max_concurrency: int | None = None,
        *,
        drafter: str | None = None,
        threshold: float = THRESHOLD,
        window: int = WINDOW_REQUESTS * STEPS_PER_REQUEST,
    ) -> None:
        self._on, off = on_and_off(arms, gamma, drafter)
        self._off = off or self._on
        self._limit = float("inf") if max_concurrency is None else max_concurrency
        self._threshold = threshold
        self._window = window
        self._steps: deque[tuple[int, int]] = deque()
        self._sequences = 0
        self._accepted = 0
        self.closed = False

    def choose(self, batch_size: int, now: float) -> ArmChoice:
        """Drafts unless the gate is closed or the batch is past the limit."""
        del now
        return self._off if self.closed or batch_size > self._limit else self._on

    def observe(self, record: StepRecord, now: float) -> None:
        """Moves the window by a drafted step, and closes the gate if its mean is too low."""
        del now
        if self.closed or len(record.counts) < 2:
            return
        accepted = accepted_tokens(record.counts)
        self._steps.append((record.batch_size, accepted))
        self._sequences += record.batch_size
        self._accepted += accepted
        while self._sequences - self._steps[0][0] >= self._window:
            sequences, accepted = self._steps.popleft()
            self._sequences -= sequences
            self._accepted -= accepted
        if self._sequences >= self._window:
            self.closed = self._accepted < self._threshold * self._sequences
