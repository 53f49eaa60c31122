"""Online updates of a drafter (test-time speculation) inside a serving engine.

    after_verify    copies what the step has verified to the host (windows.py), keeps what has
                    arrived there, and every `stride` rounds sends it to the trainer; restores the
                    last good weights if acceptance fell
    before_step     between two steps: copies the trainer's weights into the serving drafter

The trainer is a separate process (engine_shim.sglang.training.trainer).  Nothing here waits for it
or for a GPU: copies to and from the GPU run on a side stream, and are used after their event has
occurred.

If ranks share the drafter, this module runs on rank 0, and online_weights.py on every rank.  Each
change of the weights is an order that all ranks carry out in the same step (link/rank_commands.py).
The target is never changed, nor its embedding, which the drafter shares.  So the output stays the
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

from engine_shim.link.lost_capabilities import error_reason
from engine_shim.link.rank_commands import RankCommandKind, RankCommands
from engine_shim.sglang.api.transfer import make_side_stream
from engine_shim.sglang.learning.online_weights import ChangeOutcome, OnlineWeights
from engine_shim.sglang.learning.rollback_guard import GuardVerdict, RollbackGuard
from engine_shim.sglang.learning.trainer_process import TrainerProcess, make_ring_shape
from engine_shim.sglang.learning.verified_step import UpdateStatus, Verification
from engine_shim.sglang.learning.windows import (
    MAX_JUDGED_REQUESTS,
    HostRound,
    Readback,
    RequestWindows,
    WeightChanges,
)
from engine_shim.sglang.training.dflash import DFlashShape
from engine_shim.sglang.training.exchange import Message, MessageKind

if TYPE_CHECKING:
    from engine_shim.sglang.api.settings import PluginSettings
    from engine_shim.sglang.learning.student import LiveDrafter

# Steps without drafts after which a drafter counts as unused.
_UNUSED_STEPS: Final = 64
# Draft positions for which a round without drafts (gamma = 0) is trained.
_UNDRAFTED_DEPTH: Final = 3

# The trainer's end of the socket closes a moment before its exit status can be read.  The status is
# polled in each step for at most so long.
_EXIT_SECONDS: Final = 10.0
# Value of an ADOPT order for weights that a trainer's version or a weight update has written.
_EXTERNAL_WEIGHTS: Final = 1

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
        rank_commands: RankCommands | None = None,
    ) -> None:
        self.counters = OnlineCounters()
        self._per_request = settings.online_scope == "request"
        self._rank_commands = rank_commands or RankCommands()
        self._target_changes, self._is_borrowed_head_stale = 0, False
        side = make_side_stream(drafter.device)
        self._weights = OnlineWeights(drafter, per_request=self._per_request, side=side)
        rings = make_ring_shape(drafter, settings, largest_gamma)
        self._windows = RequestWindows(rings, settings.online.window)
        self._readback = Readback(rings, largest_gamma + 1, side)
        self._rollback_guard = RollbackGuard()
        self._stride = self._rounds_since_update = 0
        self._undrafted_steps = 0
        self._is_trainer_stale = False
        self._is_trainer_idle = False
        self._is_learning = False
        self._must_report_reset = False
        self._unreported_update_seconds = 0.0
        # Draft length for which a round is trained if the learner has not drafted it: that of the
        # last step that it drafted.
        self._draft_depth = min(_UNDRAFTED_DEPTH, largest_gamma)
        if isinstance(drafter.shape, DFlashShape):
            self._draft_depth = min(self._draft_depth, drafter.shape.block - 1)
        # The trainer's last answer, until its weights are applied.
        self._trainer_answer = Message(MessageKind.READY)
        # Deadline for the exit status of a trainer whose socket has closed, and the reason.
        self._trainer_exit: tuple[float, str] | None = None
        # A copy on the side stream, and its continuation; the trainer is idle in the meantime.
        self._pending_copy: tuple[torch.Event, Callable[[], None]] | None = None
        # Requests of the step that was judged last.
        self._judged_requests: list[str] = []
        # The weight changes at the time of the last copy for storage.
        self._copied_changes = self._weight_changes
        # Requests whose drafter cache was filled with weights that are no longer served.
        self._tainted_requests: set[str] = set()
        for kind, execute in {
            RankCommandKind.LAND: self._apply_trained,
            RankCommandKind.KEEP: self._mark_good,
            RankCommandKind.RESTORE: self._restore,
            RankCommandKind.ADOPT: self._adopt,
            RankCommandKind.SHARE: self._share,
            RankCommandKind.END: self._end,
        }.items():
            self._rank_commands.register(kind, partial(self._execute_command, execute))
        self._trainer = TrainerProcess(drafter, rings, settings.online, settings.online_device)

    @property
    def end_reason(self) -> str:
        """Explains why nothing is learnt any longer; "" while learning is on."""
        return "" if self._trainer.is_open else self.counters.state

    @property
    def has_learnt(self) -> bool:
        """Whether updates have changed the weights that serve."""
        return self._weights.has_changed

    @property
    def can_be_stored(self) -> bool:
        """Whether the weights were changed, no update is in progress, and none is unjudged.

        If ranks share them, rank 0 has the whole weights in the trainer's memory, while the trainer
        is idle.
        """
        is_whole = not self._weights.are_shared or (self._trainer.is_open and self._is_trainer_idle)
        is_under_way = (
            self._is_learning or self._pending_copy is not None or self._rank_commands.has_pending
        )
        is_pending = is_under_way or self._rollback_guard.has_unjudged
        return self.has_learnt and is_whole and not is_pending

    @property
    def _weight_changes(self) -> WeightChanges:
        counters = self.counters
        return WeightChanges(
            counters.updates, counters.restored, counters.resets, counters.replaced
        )

    def learnt_weights(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the whole serving weights; only while `can_be_stored` is true."""
        self._copied_changes = self._weight_changes
        if self._weights.are_shared:
            return {name: part.clone() for name, part in self._trainer.weights.items()}
        return self._weights.copy()

    def mark_stored(self) -> bool:
        """Makes the weights that were last copied and stored the baseline of further updates.

        Returns False and changes nothing if they no longer serve.
        """
        if self._copied_changes != self._weight_changes or self._rank_commands.has_pending:
            return False
        self._rank_commands.propose(RankCommandKind.ADOPT)
        return self._copied_changes == self._weight_changes

    def on_external_weights(self) -> None:
        """Runs after a trainer's version has replaced the learnt weights."""
        self._rank_commands.propose(RankCommandKind.ADOPT, _EXTERNAL_WEIGHTS)

    def before_prefill(self, request_ids: list[str]) -> None:
        """Runs when a prefill begins, before the drafter reads it."""
        outcome = self._weights.start_requests(request_ids)
        if outcome is None:
            return
        # Reported even if nothing was learnt, because the set of requests is new.
        self._must_report_reset = True
        self._windows.clear()
        if outcome is ChangeOutcome.REPLACED:
            self._on_replaced()
        elif outcome is ChangeOutcome.DONE:
            self._rollback_guard.on_other_weights()
            self._resync_trainer()
            self.counters.resets += 1
        elif not self._is_trainer_idle:
            # The trainer may be learning from the previous requests.
            self._resync_trainer()

    def before_step(self) -> None:
        """Runs when a decode step begins, before drafting."""
        if not self._trainer.is_open:
            return
        if self._weights.check_replaced():
            self._on_replaced()
        if self._pending_copy is not None and self._pending_copy[0].query():
            (_, continuation), self._pending_copy = self._pending_copy, None
            continuation()
        message = self._receive()
        if message is not None:
            self._process_answer(message)

    def _receive(self) -> Message | None:
        """Returns the trainer's answer, if any; closes after the trainer has ended."""
        if self._trainer_exit is None:
            try:
                return self._trainer.receive()
            except EOFError as error:
                self._trainer_exit = monotonic() + _EXIT_SECONDS, str(error)
        deadline, reason = self._trainer_exit
        status = self._trainer.status
        if status is not None:
            self.close(f"the trainer has ended with status {status}")
        elif monotonic() >= deadline:
            self.close(f"the trainer still runs but no longer answers: {reason}")
        return None

    def update_status(self) -> UpdateStatus:
        """Returns the status of the step that begins, after `before_step`."""
        seconds, reset = self._unreported_update_seconds, self._must_report_reset
        self._unreported_update_seconds, self._must_report_reset = 0.0, False
        learnt_from = 0 if self.has_learnt else None
        return UpdateStatus(self._is_learning or seconds > 0, reset, seconds, 0, learnt_from)

    def after_verify(self, verification: Verification, stride: int) -> None:
        """Runs before a step's draft-extend.  stride: rounds between updates, 0 for no updates."""
        if not self._trainer.is_open:
            return
        is_by_learner = verification.gamma > 0 and verification.by_learner
        self._undrafted_steps = 0 if is_by_learner else self._undrafted_steps + 1
        self._stride = stride
        if not stride:
            self._windows.clear()
        if is_by_learner or stride:
            request_ids = verification.request_ids[:MAX_JUDGED_REQUESTS]
            kept_rows = (
                self._windows.reserve_rings(request_ids, verification.undrafted) if stride else []
            )
            self._readback.put(verification, kept_rows, self._weight_changes)
            self.counters.unread = self._readback.dropped
        for host_round in self._readback.arrived_rounds():
            self._process_round(host_round)

    def _process_round(self, host_round: HostRound) -> None:
        """Processes a step that has arrived on the host, the current or an earlier one."""
        facts = host_round.facts
        if facts.is_by_learner:
            self._draft_depth = facts.gamma
            # Drafts of other weights are no evidence about the weights that serve now.
            if facts.weight_changes == self._weight_changes:
                self._judge_round(host_round)
        if not self._stride or facts.weight_changes.replaced != self.counters.replaced:
            return
        ready = self._windows.add_round(host_round)
        self._rounds_since_update += 1
        if (
            ready
            and self._rounds_since_update >= self._stride
            and self._can_learn(len(facts.request_ids))
        ):
            self._send_round(facts.gamma, self._draft_depth)

    def _can_learn(self, batch_size: int) -> bool:
        is_allowed_batch = batch_size == 1 or not self._per_request
        # Updates cannot harm the acceptance of a drafter that is not used.
        is_unused = self._undrafted_steps >= _UNUSED_STEPS and self._rollback_guard.has_no_baseline
        return (
            self._is_trainer_idle
            and (self._rollback_guard.can_learn or is_unused)
            and is_allowed_batch
        )

    def _send_round(self, gamma: int, trained_gamma: int) -> None:
        requests = self._windows.write_round(self._trainer.tensors, gamma)
        if not requests:
            return
        self._rounds_since_update = 0
        self.counters.rounds += 1
        self._is_learning = True
        self._send(Message(MessageKind.LEARN, requests=requests, gamma=trained_gamma))

    def _process_answer(self, message: Message) -> None:
        self._is_learning = False
        self.counters.state = "ready"
        if message.kind is MessageKind.LEARNT and not self._is_trainer_stale:
            # The trainer stays idle until these weights are applied.
            self._trainer_answer = message
            generation = self._weights.generation
            self._run_after_copy(
                self._weights.fetch(self._trainer.weights),
                lambda: self._rank_commands.propose(RankCommandKind.LAND, generation),
            )
            return
        self._is_trainer_idle = True
        if self._is_trainer_stale:
            # It has started from weights that are no longer served.
            self._resync_trainer()
        elif message.kind is MessageKind.REFUSED:
            self.counters.refused += 1
            _log.warning("an update of the drafter failed: %s", message.text)

    def _judge_round(self, host_round: HostRound) -> None:
        if self._rank_commands.has_pending:
            # Other weights may serve the next step, or a verdict has not been carried out yet.
            return
        facts = host_round.facts
        first_accepted = [
            length > 1
            for row, (rid, length) in enumerate(
                zip(facts.request_ids, host_round.accepted, strict=False)
            )
            if rid not in self._tainted_requests and row not in facts.undrafted_rows
        ]
        verdict = self._rollback_guard.observe(
            sum(first_accepted), len(first_accepted), updates_rest=not self._stride
        )
        self._judged_requests = facts.request_ids
        if verdict is GuardVerdict.GOOD:
            self._rank_commands.propose(RankCommandKind.KEEP)
        elif verdict is GuardVerdict.WORSE:
            self._rank_commands.propose(RankCommandKind.RESTORE)

    def _execute_command(self, execute: Callable[[int], None], value: int) -> None:
        """Carries out an order; after an error, on this rank or another one, nothing is learnt."""
        try:
            execute(value)
        except Exception as error:  # noqa: BLE001 - out of memory, say
            _log.exception("an online update of the drafter failed")
            self.close(error_reason(error))

    def _apply_trained(self, generation: int) -> None:
        self._is_trainer_idle = True
        outcome = self._weights.apply_trained(self._trainer.weights, generation)
        if outcome is ChangeOutcome.REPLACED:
            self._on_replaced()
        elif outcome is ChangeOutcome.DONE:
            message = self._trainer_answer
            self._rollback_guard.on_update()
            self.counters.updates += 1
            self.counters.loss, self.counters.seconds = message.loss, message.seconds
            self._unreported_update_seconds = message.seconds
        elif self._is_trainer_stale:
            self._resync_trainer()

    def _mark_good(self, _: int) -> None:
        if self._weights.mark_good() is ChangeOutcome.REPLACED:
            self._on_replaced()

    def _adopt(self, is_external: int) -> None:
        if self._weights.adopt_served(is_external=bool(is_external)) is ChangeOutcome.REPLACED:
            self._on_replaced()

    def _restore(self, _: int) -> None:
        outcome = self._weights.restore()
        if outcome is ChangeOutcome.REPLACED:
            self._on_replaced()
        if outcome is not ChangeOutcome.DONE:
            return
        self.counters.restored += 1
        _log.warning(
            "acceptance fell from %.3f to %.3f after updates of the drafter: the last good "
            "weights are restored, and it learns nothing for %d drafts",
            self._rollback_guard.good.rate, self._rollback_guard.current.rate,
            self._rollback_guard.hold_drafts,
        )  # fmt: skip
        self._must_report_reset = True
        self._rollback_guard.on_other_weights()
        self._tainted_requests = set(self._judged_requests)
        self._resync_trainer()

    def _on_replaced(self) -> None:
        if self._weights.target_changes != self._target_changes:
            self._target_changes, self._is_borrowed_head_stale = self._weights.target_changes, True
            # Positions that the previous target has verified are no longer training data.
            self._windows.clear()
        self._rollback_guard.reset()
        self._must_report_reset = True
        self.counters.replaced += 1
        _log.info("the drafter was given other weights: it continues from those")
        self._resync_trainer()

    def _resync_trainer(self) -> None:
        """Makes the trainer continue from the served weights once its current work is done."""
        self._is_trainer_stale = not self._is_trainer_idle
        if self._is_trainer_idle:
            self._is_trainer_idle = False
            self._rank_commands.propose(RankCommandKind.SHARE)

    def _share(self, _: int) -> None:
        copy_done = self._weights.share_with_trainer(self._trainer.weights)
        if self._is_borrowed_head_stale:
            self._trainer.share_borrowed()
            self._is_borrowed_head_stale = False
        self._run_after_copy(copy_done, lambda: self._send(Message(MessageKind.TAKE_WEIGHTS)))

    def _run_after_copy(
        self, copy_done: torch.Event | None, continuation: Callable[[], None]
    ) -> None:
        """Calls `continuation` after a copy.  copy_done: its event, None if it is complete."""
        if copy_done is None:
            continuation()
        else:
            self._pending_copy = copy_done, continuation

    def _end(self, restores: int) -> None:
        self._weights.end_updates(restores=bool(restores))
        # The weights that serve from now on have been judged, or were never changed.
        self._rollback_guard.on_other_weights()

    def _send(self, message: Message) -> None:
        if not self._trainer.is_open:
            return
        # If the message cannot be sent, the next step detects that the trainer has ended.
        self._is_trainer_idle = not self._trainer.send(message)

    def close(self, reason: str = "closed") -> None:
        """Ends the trainer; nothing is learnt afterwards."""
        if not self._trainer.is_open:
            return
        self.counters.state = reason
        self._trainer.close()
        self._is_learning, self._pending_copy = False, None
        self._windows.clear()
        # Unjudged weights will no longer be judged, so the last good ones are restored.
        self._rank_commands.propose(RankCommandKind.END, int(self._rollback_guard.has_unjudged))
        _log.warning("the drafter is no longer updated: %s", reason)
