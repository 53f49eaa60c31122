"""Prices an online update of a drafter, as step_costs.py prices a pass.

No table has it, so it is derived by a roofline, for the EAGLE3 drafter that was published for
Llama-3.1-8B, learning in bfloat16 with AdamW on the H100 that also serves:

  parameters   `fc`, one layer whose attention reads two hidden states, and a head of 32,000 tokens
  arithmetic   6 operations a parameter and token (forward, and twice that backward) for each
               position of the window and each draft position it is unrolled to, at UTILISATION of
               the device's peak
  memory       OPTIMISER_BYTES a parameter, and its weight read twice for each draft position

An update of one request, 48 positions and 3 drafts takes 6.6 ms of the whole device, 0.7 of a step
that drafts; of four requests 8.7 ms, 0.9 of a step.  Fits to the tables of Test-Time Speculation
(arXiv:2605.09329; lab/papers/stride_simulation.py) give 0.5 to 0.7 of a step (Table 3) and 1.2
(Table 8), with the baseline that the fits imply.

The device is shared: beside an update, a step takes 1 + `share` times as long, and the update then
lasts (1 + share) / share times what it would take alone.  Together they lose nothing and gain
nothing by running side by side: an update takes its own seconds from the steps.

`UpdateWatch` imposes the price from outside: the plugin is not asked.  The engine's end of the
trainer's channel is watched.  A round that is handed over takes the seconds of the model that
`UpdateCosts` gives it, and its answer is not shown to the plugin before.  If the trainer takes the
machine longer than that, the pass waits for it while the model's clock stands still: weights land
at the imposed moment, however quick the machine is.  What has no price, such as the trainer's
start, takes no time of the model.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.core.cost.roofline import device_from_data_sheet
from lab.cpu_engine.pace.model_clock import ModelClock

HIDDEN, MLP, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, DRAFT_VOCABULARY = 4096, 14336, 32, 8, 128, 32000
PARAMETERS = (
    3 * HIDDEN * HIDDEN
    + 2 * HIDDEN * (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_SIZE
    + HEADS * HEAD_SIZE * HIDDEN
    + 3 * HIDDEN * MLP
    + DRAFT_VOCABULARY * HIDDEN
)
# Weight and both moments in float32, read and written; the gradient, written and read; the weight
# in bfloat16, written.
OPTIMISER_BYTES = 3 * 8 + 8 + 2
WEIGHT_BYTES = 2
UTILISATION = 0.5
DEVICE = "H100"
# The longest that a pass waits for the trainer: it is slow, or it hangs.
_ANSWER_SECONDS = 120.0
_POLL_SECONDS = 5e-4
# Share of a pass.  A smaller remainder of an update is a rounding error, and counts as 0.
_ROUNDING_SHARE = 1e-9


@dataclass(frozen=True, slots=True)
class UpdateCosts:
    """Imposes what an update costs, in seconds of the model's time.

    scale: cost of the student relative to the published one.  share: by which share a step beside
    an update takes longer.

    Raises ValueError for one that is not a finite number above 0.
    """

    scale: float = 1.0
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("scale", "share"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"an update's {name} is a number above 0, not {value}")

    def work_seconds(self, requests: int, positions: int, drafts: int) -> float:
        """Seconds of an update alone on the device, which are what the steps beside it lose.

        requests, positions: of its round.  drafts: positions that it is unrolled to.
        """
        gpu = device_from_data_sheet(DEVICE)
        operations = 6.0 * PARAMETERS * requests * positions * drafts
        transferred = PARAMETERS * (OPTIMISER_BYTES + 2 * WEIGHT_BYTES * drafts)
        arithmetic = operations / (UTILISATION * gpu.peak_flops)
        memory = transferred / gpu.bandwidth
        return self.scale * (arithmetic + memory)

    def seconds(self, requests: int, positions: int, drafts: int) -> float:
        """Seconds from the hand-over of a round to the landing of its weights."""
        work = self.work_seconds(requests, positions, drafts)
        return work * (1 + self.share) / self.share


if TYPE_CHECKING:
    # The engine may run without the plugin.
    from torch import Tensor

    from engine_shim.sglang.training.exchange import Message


class UpdateWatch:
    """Follows the one update that may be under way.

    costs: None: updates take what they take.  clock: of the passes.  landed: updates so far.
    """

    def __init__(self, costs: UpdateCosts | None, clock: ModelClock) -> None:
        self._costs = costs
        self._clock = clock
        self._dilation = 1.0
        self.landed = 0
        # Seconds of the update under way, and how many of them remain; 0 without one.
        self._update_seconds = self._remaining_seconds = 0.0
        # Seconds of an update that this pass has handed over.  It begins when the pass ends.
        self._next_update_seconds = 0.0
        # Positions of the longest request in the round that was written last.
        self._positions = 0
        # The trainer owes an answer.  Its first message says that it is ready.
        self._is_answer_pending = True

    def begin(self, idle_seconds: float) -> None:
        """Begins a pass.  idle_seconds: of the model, since the one before."""
        self._remaining_seconds = max(0.0, self._remaining_seconds - idle_seconds)

    def end(self, seconds: float, dilation: float) -> float:
        """Ends a pass; returns by how many seconds of the model an update makes it longer.

        seconds: of the pass without the update, in the model's time.  dilation: seconds of the
        machine for each of the model.
        """
        self._dilation = dilation
        lost_seconds = 0.0
        if self._costs is not None and self._remaining_seconds > 0:
            share = self._costs.share
            lost_seconds = min(self._remaining_seconds, seconds * (1 + share)) * share / (1 + share)
            remaining_seconds = self._remaining_seconds - seconds - lost_seconds
            self._remaining_seconds = (
                remaining_seconds if remaining_seconds > _ROUNDING_SHARE * seconds else 0.0
            )
        if self._next_update_seconds:
            self._update_seconds = self._remaining_seconds = self._next_update_seconds
            self._next_update_seconds = 0.0
        return lost_seconds

    def wrap_shim(self) -> None:
        """Has the plugin read this clock and, if updates have a price, ask here for answers."""
        from engine_shim.sglang import step_reports

        vars(step_reports)["perf_counter"] = self._clock.now
        if self._costs is None:
            return
        from engine_shim.sglang.learning.windows import RequestWindows
        from engine_shim.sglang.training.exchange import Channel, Message

        send, receive, write = Channel.send, Channel.receive, RequestWindows.write_round

        def write_and_note(
            windows: RequestWindows, tensors: "Mapping[str, Tensor]", gamma: int
        ) -> int:
            requests = write(windows, tensors, gamma)
            self.note_round(tensors, requests)
            return requests

        def send_and_note(channel: Channel, message: Message) -> bool:
            self.note_message(message)
            return send(channel, message)

        def receive_when_due(channel: Channel, *, wait: bool) -> Message | None:
            return self.receive(lambda: receive(channel, wait=wait))

        setattr(RequestWindows, "write_round", write_and_note)  # noqa: B010
        setattr(Channel, "send", send_and_note)  # noqa: B010
        setattr(Channel, "receive", receive_when_due)  # noqa: B010

    def note_round(self, tensors: "Mapping[str, Tensor]", requests: int) -> None:
        """Notes how long the windows of the round are that the plugin hands over next."""
        from engine_shim.sglang.training.exchange import SPANS

        _, starts, ends = tensors[SPANS][:requests].unbind(-1)
        self._positions = int((ends - starts).max()) if requests else 0

    def note_message(self, message: "Message") -> None:
        """Notes what the plugin asks of the trainer."""
        from engine_shim.sglang.training.exchange import MessageKind

        self._is_answer_pending = True
        if message.kind is MessageKind.LEARN and self._costs is not None:
            self._next_update_seconds = self._costs.seconds(
                message.requests, self._positions, message.gamma
            )

    def receive(self, poll: Callable[[], "Message | None"]) -> "Message | None":
        """Returns the trainer's answer once it is due; None before, or if none is owed.

        poll: asks for it without waiting.  An update's seconds are those imposed, on the machine's
        clock as all that is reported.  Raises EOFError for a trainer that has ended, or hangs.
        """
        from engine_shim.sglang.training.exchange import MessageKind

        if not self._is_answer_pending:
            return poll()
        if self._remaining_seconds > 0 or self._next_update_seconds:
            return None
        with self._clock.paused():
            deadline = time.monotonic() + _ANSWER_SECONDS
            while (message := poll()) is None:
                if time.monotonic() > deadline:
                    raise EOFError(f"the trainer has not answered for {_ANSWER_SECONDS:g} s")
                time.sleep(_POLL_SECONDS)
        self._is_answer_pending = False
        if message.kind is MessageKind.LEARNT:
            self.landed += 1
            message = message._replace(seconds=self._update_seconds * self._dilation)
        return message
