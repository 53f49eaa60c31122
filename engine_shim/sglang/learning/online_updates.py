"""Online updates of a drafter (test-time speculation) inside a serving engine.

    after_verify    copies what the step has verified to the host (windows.py), keeps what has
                    arrived there, and every `stride` rounds sends it to the trainer; restores the
                    last good weights if acceptance fell
    before_step     between two steps: copies the trainer's weights into the serving drafter

The trainer is a separate process (engine_shim.sglang.training.trainer).  Nothing here waits for it
or for a GPU: copies to and from the GPU run on a side stream, and are used after their event has
occurred.

If ranks share the drafter, this module runs on rank 0, and online_weights.py on every rank.  Each
change of the weights is an order that all ranks carry out in the same step (link/orders.py).  The
target is never changed, nor its embedding, which the drafter shares.  So the output stays the
target's, whatever the drafter becomes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

import torch

from engine_shim.link.losses import reason_of
from engine_shim.link.orders import OrderKind, Orders
from engine_shim.sglang.api.transfer import side_stream
from engine_shim.sglang.learning.online_weights import OnlineWeights, Outcome
from engine_shim.sglang.learning.rollback_guard import GuardVerdict, RollbackGuard
from engine_shim.sglang.learning.trainer_process import TrainerProcess, rings_for
from engine_shim.sglang.learning.verified_step import UpdateStatus, Verification
from engine_shim.sglang.learning.windows import JUDGED, HostRound, Readback, WeightChanges, Windows
from engine_shim.sglang.training.dflash import DFlashShape
from engine_shim.sglang.training.exchange import Message, MessageKind

if TYPE_CHECKING:
    from engine_shim.sglang.api.settings import PluginSettings
    from engine_shim.sglang.learning.student import LiveDrafter

# Steps without drafts after which a drafter counts as unused.
_UNUSED_STEPS: Final = 64
# Draft positions for which a round without drafts (gamma = 0) is trained.
_UNDRAFTED: Final = 3

# The trainer's end of the socket closes a moment before its exit status can be read.  The status is
# polled in each step for at most so long.
_EXIT_SECONDS: Final = 10.0
# Value of an ADOPT order for weights that a trainer's version or a weight update has written.
_OTHERS: Final = 1

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OnlineCounters:
    """Counts since the engine started.

    rounds: sent to the trainer; updates: weights that were copied in; refused: rounds without a
    usable result; restored: rollbacks to the last good weights; resets: returns to the first ones;
    replaced: times that another writer (a trainer's version, a weight update) gave the drafter
    weights.  unread: steps that were left out, because the GPU was too far behind.
    loss (nats), seconds: of the last update.  state: "ready", or why nothing is learnt.
    """

    rounds: int = 0
    updates: int = 0
    refused: int = 0
    restored: int = 0
    resets: int = 0
    replaced: int = 0
    unread: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    state: str = "starting"


class OnlineUpdates:
    """Updates the drafter of one engine, on rank 0.  orders: of this rank."""

    def __init__(
        self,
        drafter: LiveDrafter,
        settings: PluginSettings,
        largest_gamma: int,
        orders: Orders | None = None,
    ) -> None:
        self.counters = OnlineCounters()
        self._per_request = settings.online_scope == "request"
        self._orders = orders or Orders()
        self._targets, self._borrowed_stale = 0, False
        side = side_stream(drafter.device)
        self._weights = OnlineWeights(drafter, per_request=self._per_request, side=side)
        rings = rings_for(drafter, settings, largest_gamma)
        self._windows = Windows(rings, settings.online.window)
        self._readback = Readback(rings, largest_gamma + 1, side)
        self._rollback_guard = RollbackGuard()
        self._stride = self._since = 0
        self._undrafted = 0
        self._stale = False
        self._idle = False
        self._learning = False
        self._reset = False
        self._landed_seconds = 0.0
        # Draft length for which a round is trained if the learner has not drafted it: that of the
        # last step that it drafted.
        self._depth = min(_UNDRAFTED, largest_gamma)
        if isinstance(drafter.shape, DFlashShape):
            self._depth = min(self._depth, drafter.shape.block - 1)
        # The trainer's last answer, until its weights are applied.
        self._answer = Message(MessageKind.READY)
        # Deadline for the exit status of a trainer whose socket has closed, and the reason.
        self._gone: tuple[float, str] | None = None
        # A copy on the side stream, and its continuation; the trainer is idle in the meantime.
        self._copying: tuple[torch.Event, Callable[[], None]] | None = None
        # Requests of the step that was judged last.
        self._judged: list[str] = []
        # The weight changes at the time of the last copy for storage.
        self._copied = self._changes
        # Requests whose drafter cache was filled with weights that are no longer served.
        self._tainted: set[str] = set()
        for kind, obey in {
            OrderKind.LAND: self._land,
            OrderKind.KEEP: self._keep,
            OrderKind.RESTORE: self._restore,
            OrderKind.ADOPT: self._adopt,
            OrderKind.SHARE: self._share,
            OrderKind.END: self._end,
        }.items():
            self._orders.register(kind, partial(self._obey, obey))
        self._trainer = TrainerProcess(drafter, rings, settings.online, settings.online_device)

    @property
    def over(self) -> str:
        """Explains why nothing is learnt any longer; "" while learning is on."""
        return "" if self._trainer.is_open else self.counters.state

    @property
    def has_learnt(self) -> bool:
        """Whether updates have changed the weights that serve."""
        return self._weights.has_changed

    @property
    def may_be_stored(self) -> bool:
        """Whether the weights were changed, no update is in progress, and none is unjudged.

        If ranks share them, rank 0 has the whole weights in the trainer's memory, while the trainer
        is idle.
        """
        is_whole = not self._weights.are_shared or (self._trainer.is_open and self._idle)
        under_way = self._learning or self._copying is not None or self._orders.are_open
        pending = under_way or self._rollback_guard.unjudged
        return self.has_learnt and is_whole and not pending

    @property
    def _changes(self) -> WeightChanges:
        counters = self.counters
        return WeightChanges(
            counters.updates, counters.restored, counters.resets, counters.replaced
        )

    def learnt_weights(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the whole serving weights; only while `may_be_stored` is true."""
        self._copied = self._changes
        if self._weights.are_shared:
            return {name: part.clone() for name, part in self._trainer.weights.items()}
        return self._weights.copy()

    def were_stored(self) -> bool:
        """Makes the weights that were last copied and stored the baseline of further updates.

        Returns False and changes nothing if they no longer serve.
        """
        if self._copied != self._changes or self._orders.are_open:
            return False
        self._orders.propose(OrderKind.ADOPT)
        return self._copied == self._changes

    def others_serve(self) -> None:
        """Runs after a trainer's version has replaced the learnt weights."""
        self._orders.propose(OrderKind.ADOPT, _OTHERS)

    def before_prefill(self, request_ids: list[str]) -> None:
        """Runs when a prefill begins, before the drafter reads it."""
        begun = self._weights.begin(request_ids)
        if begun is None:
            return
        # Reported even if nothing was learnt, because the set of requests is new.
        self._reset = True
        self._windows.clear()
        if begun is Outcome.REPLACED:
            self._were_replaced()
        elif begun is Outcome.DONE:
            self._rollback_guard.restart()
            self._tell_weights()
            self.counters.resets += 1
        elif not self._idle:
            # The trainer may be learning from the previous requests.
            self._tell_weights()

    def before_step(self) -> None:
        """Runs when a decode step begins, before drafting."""
        if not self._trainer.is_open:
            return
        if self._weights.look():
            self._were_replaced()
        if self._copying is not None and self._copying[0].query():
            (_, follow), self._copying = self._copying, None
            follow()
        message = self._receive()
        if message is not None:
            self._take(message)

    def _receive(self) -> Message | None:
        """Returns the trainer's answer, if any; closes after the trainer has ended."""
        if self._gone is None:
            try:
                return self._trainer.receive()
            except EOFError as error:
                self._gone = monotonic() + _EXIT_SECONDS, str(error)
        until, reason = self._gone
        status = self._trainer.status
        if status is not None:
            self.close(f"the trainer has ended with status {status}")
        elif monotonic() >= until:
            self.close(f"the trainer still runs but no longer answers: {reason}")
        return None

    def update_status(self) -> UpdateStatus:
        """Returns the status of the step that begins, after `before_step`."""
        seconds, reset = self._landed_seconds, self._reset
        self._landed_seconds, self._reset = 0.0, False
        learnt_from = 0 if self.has_learnt else None
        return UpdateStatus(self._learning or seconds > 0, reset, seconds, 0, learnt_from)

    def after_verify(self, found: Verification, stride: int) -> None:
        """Runs before a step's draft-extend.  stride: rounds between updates, 0 for no updates."""
        if not self._trainer.is_open:
            return
        drafted = found.gamma > 0 and found.by_learner
        self._undrafted = 0 if drafted else self._undrafted + 1
        self._stride = stride
        if not stride:
            self._windows.clear()
        if drafted or stride:
            asked = found.request_ids[:JUDGED]
            kept = self._windows.reserve(asked, found.undrafted) if stride else []
            self._readback.put(found, kept, self._changes)
            self.counters.unread = self._readback.dropped
        for one in self._readback.taken():
            self._take_in(one)

    def _take_in(self, found: HostRound) -> None:
        """Processes a step that has arrived on the host, the current or an earlier one."""
        facts = found.facts
        if facts.drafted:
            self._depth = facts.gamma
            # Drafts of other weights are no evidence about the weights that serve now.
            if facts.weights == self._changes:
                self._observe(found)
        if not self._stride or facts.weights.replaced != self.counters.replaced:
            return
        ready = self._windows.add(found)
        self._since += 1
        if ready and self._since >= self._stride and self._may_learn(len(facts.request_ids)):
            self._hand_over(facts.gamma, self._depth)

    def _may_learn(self, batch_size: int) -> bool:
        alone = batch_size == 1 or not self._per_request
        # Updates cannot harm the acceptance of a drafter that is not used.
        idle = self._undrafted >= _UNUSED_STEPS and self._rollback_guard.knows_nothing
        return self._idle and (self._rollback_guard.may_learn or idle) and alone

    def _hand_over(self, gamma: int, depth: int) -> None:
        requests = self._windows.write(self._trainer.tensors, gamma)
        if not requests:
            return
        self._since = 0
        self.counters.rounds += 1
        self._learning = True
        self._send(Message(MessageKind.LEARN, requests=requests, gamma=depth))

    def _take(self, message: Message) -> None:
        self._learning = False
        self.counters.state = "ready"
        if message.kind is MessageKind.LEARNT and not self._stale:
            # The trainer stays idle until these weights are applied.
            self._answer = message
            generation = self._weights.generation
            self._after(
                self._weights.fetch(self._trainer.weights),
                lambda: self._orders.propose(OrderKind.LAND, generation),
            )
            return
        self._idle = True
        if self._stale:
            # It has started from weights that are no longer served.
            self._tell_weights()
        elif message.kind is MessageKind.REFUSED:
            self.counters.refused += 1
            _log.warning("an update of the drafter failed: %s", message.text)

    def _observe(self, found: HostRound) -> None:
        if self._orders.are_open:
            # Other weights may serve the next step, or a verdict has not been carried out yet.
            return
        facts = found.facts
        counted = [
            length > 1
            for row, (rid, length) in enumerate(
                zip(facts.request_ids, found.accepted, strict=False)
            )
            if rid not in self._tainted and row not in facts.undrafted
        ]
        verdict = self._rollback_guard.add(sum(counted), len(counted), rests=not self._stride)
        self._judged = facts.request_ids
        if verdict is GuardVerdict.GOOD:
            self._orders.propose(OrderKind.KEEP)
        elif verdict is GuardVerdict.WORSE:
            self._orders.propose(OrderKind.RESTORE)

    def _obey(self, obey: Callable[[int], None], value: int) -> None:
        """Carries out an order; after an error, on this rank or another one, nothing is learnt."""
        try:
            obey(value)
        except Exception as error:  # noqa: BLE001 - out of memory, say
            _log.exception("an online update of the drafter failed")
            self.close(reason_of(error))

    def _land(self, generation: int) -> None:
        self._idle = True
        outcome = self._weights.land(self._trainer.weights, generation)
        if outcome is Outcome.REPLACED:
            self._were_replaced()
        elif outcome is Outcome.DONE:
            message = self._answer
            self._rollback_guard.updated()
            self.counters.updates += 1
            self.counters.loss, self.counters.seconds = message.loss, message.seconds
            self._landed_seconds = message.seconds
        elif self._stale:
            self._tell_weights()

    def _keep(self, _: int) -> None:
        if self._weights.keep() is Outcome.REPLACED:
            self._were_replaced()

    def _adopt(self, others: int) -> None:
        if self._weights.adopt(others=bool(others)) is Outcome.REPLACED:
            self._were_replaced()

    def _restore(self, _: int) -> None:
        outcome = self._weights.restore()
        if outcome is Outcome.REPLACED:
            self._were_replaced()
        if outcome is not Outcome.DONE:
            return
        self.counters.restored += 1
        _log.warning(
            "acceptance fell from %.3f to %.3f after updates of the drafter: the last good "
            "weights are restored, and it learns nothing for %d drafts",
            self._rollback_guard.before.rate, self._rollback_guard.found.rate,
            self._rollback_guard.hold,
        )  # fmt: skip
        self._reset = True
        self._rollback_guard.restart()
        self._tainted = set(self._judged)
        self._tell_weights()

    def _were_replaced(self) -> None:
        if self._weights.targets != self._targets:
            self._targets, self._borrowed_stale = self._weights.targets, True
            # Positions that the previous target has verified are no longer training data.
            self._windows.clear()
        self._rollback_guard.forget()
        self._reset = True
        self.counters.replaced += 1
        _log.info("the drafter was given other weights: it continues from those")
        self._tell_weights()

    def _tell_weights(self) -> None:
        """Makes the trainer continue from the served weights once its current work is done."""
        self._stale = not self._idle
        if self._idle:
            self._idle = False
            self._orders.propose(OrderKind.SHARE)

    def _share(self, _: int) -> None:
        copied = self._weights.share(self._trainer.weights)
        if self._borrowed_stale:
            self._trainer.share_borrowed()
            self._borrowed_stale = False
        self._after(copied, lambda: self._send(Message(MessageKind.TAKE_WEIGHTS)))

    def _after(self, copied: torch.Event | None, follow: Callable[[], None]) -> None:
        """Calls `follow` after a copy is complete.  copied: its event, None if it is complete."""
        if copied is None:
            follow()
        else:
            self._copying = copied, follow

    def _end(self, restores: int) -> None:
        self._weights.end(restores=bool(restores))
        # The weights that serve from now on have been judged, or were never changed.
        self._rollback_guard.restart()

    def _send(self, message: Message) -> None:
        if not self._trainer.is_open:
            return
        # If the message cannot be sent, the next step detects that the trainer has ended.
        self._idle = not self._trainer.send(message)

    def close(self, why: str = "closed") -> None:
        """Ends the trainer; nothing is learnt afterwards."""
        if not self._trainer.is_open:
            return
        self.counters.state = why
        self._trainer.close()
        self._learning, self._copying = False, None
        self._windows.clear()
        # Unjudged weights will not be judged any more, so the last good ones are restored.
        self._orders.propose(OrderKind.END, int(self._rollback_guard.unjudged))
        _log.warning("the drafter is no longer updated: %s", why)
