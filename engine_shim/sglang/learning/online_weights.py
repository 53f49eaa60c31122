"""The served weights as online updates change them, on every rank that shares the drafter.

    land, keep, adopt, restore, share, end     rank 0 orders them (link/rank_commands.py)
    begin                                      each rank detects it itself when a prefill begins

Every rank calls each of these in the same step.  A decision depends only on facts that are equal on
all ranks, or on a collective.  With one rank there is no collective.

On a GPU, which only an engine of one rank uses, weights are copied on a side stream.  `fetch`
copies the trainer's weights to the device, and `share_with_trainer` copies the serving weights to
the trainer. `check_replaced` detects foreign writes some steps later, which `_is_unreplaced`
detects at once on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from math import prod
from typing import Any, Final

import torch

from engine_shim.link.lost_capabilities import error_reason
from engine_shim.link.rank_commands import RankCommandKind, RankCommands
from engine_shim.sglang.api.transfer import SideStream, host_buffer
from engine_shim.sglang.learning.student import DrafterWeights, LiveDrafter, sample_values

# Steps between two checks on a GPU whether another writer (a weight update) has changed weights.
_CHECK_STEPS: Final = 64

Weights = dict[str, torch.Tensor]
_NO_WEIGHTS: Final[Weights] = {}

_log = logging.getLogger(__name__)


class ChangeOutcome(Enum):
    """The result of a change, equal on all ranks."""

    DONE = auto()
    # Another writer has given the drafter weights, which stay.
    REPLACED = auto()
    # There was nothing to do, or it was too late.
    NOTHING = auto()


class RankFailedError(RuntimeError):
    """A rank could not write weights.  All ranks raise this; the message names rank and reason."""


class OnlineWeights:
    """Changes one drafter's weights on this rank.

    per_request: whether every request begins with the first weights.  generation: incremented
    whenever the trainer's current work becomes obsolete.  target_changes: number of times that a
    weight update changed the target.
    """

    def __init__(
        self, drafter: LiveDrafter, *, per_request: bool, side: SideStream | None = None
    ) -> None:
        """Allocates buffers for fetched weights.  side: of the device, None for the CPU."""
        self._per_request = per_request
        self._shares = drafter.shares
        self._peers = self._shares.peers
        self._side_stream = side
        live, has_side_stream = self._shares.live, side is not None
        self._weights = DrafterWeights(live, drafter.refresh, yields=has_side_stream)
        with torch.inference_mode(False):
            # The trainer's weights on the device, after `fetch`.
            self._fetched = (
                {n: torch.empty_like(part) for n, part in live.items()} if has_side_stream else {}
            )
        self._flags_cpu = None if side is None else host_buffer((2,), torch.bool, side.device)
        self._check_done: torch.Event | None = None
        self._steps_since_check = 0
        # This rank's part of what the drafter borrows, and a sample of it from the last check.
        self._borrowed = [part for part in drafter.borrowed if part is not None]
        if self._peers.has_other_ranks:
            self._borrowed = [part.rank_tensor for part in self._shares.borrowed]
        self._borrowed_sample = sample_values(self._borrowed)
        # Changes of the target: the detected ones, and those that rank 0 has copied.
        self.target_changes = self._target_changes_copied = 0
        self.generation = 0
        # As in `DrafterWeights`, but equal on all ranks, even if one rank has failed.
        self._has_changed = self._has_good_changes = False
        self._has_ended = False
        self._failure_reason = ""
        self._requests: list[str] = []
        # Buffer for the whole weights, concatenated, that rank 0 broadcasts.
        self._flat_buffer, self._buffer_views = _make_buffer(
            drafter.parameters if self._peers.has_other_ranks else {}
        )

    @property
    def has_changed(self) -> bool:
        """Whether updates have changed what serves."""
        return self._has_changed

    @property
    def are_shared(self) -> bool:
        """Whether this rank holds a share of the weights only."""
        return self._peers.has_other_ranks

    def copy(self) -> Weights:
        """Returns a copy of the weights that this rank serves."""
        return self._weights.copy()

    def register_commands(self, orders: RankCommands) -> None:
        """Registers the handlers of rank 0's orders on another rank."""
        handlers: dict[RankCommandKind, Callable[[int], object]] = {
            RankCommandKind.LAND: partial(self.apply_trained, _NO_WEIGHTS),
            RankCommandKind.KEEP: lambda _: self.mark_good(),
            RankCommandKind.RESTORE: lambda _: self.restore(),
            RankCommandKind.ADOPT: lambda value: self.adopt_served(is_external=bool(value)),
            RankCommandKind.SHARE: lambda _: self.share_with_trainer(_NO_WEIGHTS),
            RankCommandKind.END: lambda value: self.end_updates(restores=bool(value)),
        }
        for kind, handler in handlers.items():
            orders.register(kind, partial(_run_logged, handler))

    def start_prefill(self, request_ids: list[str]) -> None:
        """Does on a rank other than rank 0 what `start_requests` does there."""
        _run_logged(self.start_requests, request_ids)

    def apply_trained(
        self, trained_weights: Mapping[str, torch.Tensor], generation: int
    ) -> ChangeOutcome:
        """Serves the trainer's weights; `trained_weights` is read on rank 0 only."""
        if generation != self.generation:
            return ChangeOutcome.NOTHING
        return self._apply(partial(self._apply_trained, trained_weights))

    def _apply_trained(self, trained_weights: Mapping[str, torch.Tensor]) -> None:
        self._has_changed = True
        weights = self._distribute(trained_weights)
        self._write(lambda: self._weights.serve(weights))

    def fetch(self, trained_weights: Mapping[str, torch.Tensor]) -> torch.Event | None:
        """Copies the trainer's weights to the device, for `apply_trained`.

        Returns an event that occurs when the copy is complete; None on a CPU.
        """
        if self._side_stream is None:
            return None
        self._start_check()
        return self._side_stream.copy(
            (buffer, trained_weights[name]) for name, buffer in self._fetched.items()
        )

    def check_replaced(self) -> bool:
        """Runs when a step begins; returns whether another writer has given the drafter weights.

        On a CPU all other methods check that themselves.
        """
        if self._side_stream is None or self._has_ended:
            return False
        if self._check_done is None:
            self._steps_since_check += 1
            if self._steps_since_check >= _CHECK_STEPS:
                self._start_check()
            return False
        if not self._check_done.query():
            return False
        self._check_done = None
        assert self._flags_cpu is not None
        replaced, other_target = self._flags_cpu.tolist()
        if other_target:
            self._borrowed_sample = sample_values(self._borrowed)
        return self._handle_replacement(replaced=replaced, other_target=other_target)

    def mark_good(self) -> ChangeOutcome:
        """Marks the serving weights as good."""
        return self._apply(self._mark_good)

    def _mark_good(self) -> None:
        self._has_good_changes = self._has_changed
        self._write(self._weights.mark_good)

    def adopt_served(self, *, is_external: bool = False) -> ChangeOutcome:
        """Makes the serving weights the baseline of further updates.

        is_external: whether another writer is known to have given the drafter these weights.
        """
        if self._has_ended:
            # No more is written, but the serving weights now come from another writer.
            self._has_changed = self._has_good_changes = False
            return ChangeOutcome.NOTHING
        if is_external and self._side_stream is not None:
            self._check_done = None
            self._handle_replacement(replaced=True, other_target=False)
            return ChangeOutcome.REPLACED
        return self._apply(partial(self._write_baseline, self._weights.set_baseline))

    def restore(self) -> ChangeOutcome:
        """Serves the last good weights."""
        return self._apply(self._serve_last_good)

    def start_requests(self, request_ids: list[str]) -> ChangeOutcome | None:
        """Serves the first weights, if each request begins with them and the requests are new.

        Returns None otherwise, and NOTHING if the first weights already serve.
        """
        if not self._per_request or self._has_ended or request_ids == self._requests:
            return None
        self._requests = request_ids
        # The trainer is working on the previous requests.
        self.generation += 1
        if not self._has_changed:
            return ChangeOutcome.NOTHING
        return self._apply(partial(self._write_baseline, self._weights.serve_initial))

    def share_with_trainer(self, memory: Mapping[str, torch.Tensor]) -> torch.Event | None:
        """Copies the served weights into the trainer's memory, which rank 0 has.

        Returns an event that occurs when the copy is complete; None if it already is.
        """
        if self._has_ended:
            return None
        if self._side_stream is not None:
            # The serving weights may change before the copy has read them.
            served = self._weights.copy()
            return self._side_stream.copy((memory[name], part) for name, part in served.items())
        if self._target_changes_copied != self.target_changes:
            self._shares.copy_borrowed()
            self._target_changes_copied = self.target_changes
        for name, part in self._shares.gather_whole():
            memory[name].copy_(part.detach())
        return None

    def end_updates(self, *, restores: bool) -> None:
        """Ends all changes.  restores: whether to serve the last good weights."""
        if self._has_ended:
            return
        self._has_ended = True
        if restores and self._is_unreplaced():
            self._serve_last_good()

    def _apply(self, change: Callable[[], None]) -> ChangeOutcome:
        """Makes a change, unless updates have ended or another writer has changed the weights."""
        if self._has_ended:
            return ChangeOutcome.NOTHING
        if not self._is_unreplaced():
            return ChangeOutcome.REPLACED
        change()
        return ChangeOutcome.DONE

    def _write_baseline(self, write: Callable[[], None]) -> None:
        """Writes weights that no update has changed."""
        self._has_changed = self._has_good_changes = False
        self._write(write)

    def _is_unreplaced(self) -> bool:
        """Whether all ranks still serve what was written here.  Raises RankFailedError."""
        if self._side_stream is not None:
            # Writes do nothing if another writer came first, and `check_replaced` reports that.
            return True
        replaced, is_other_target = self._sample_replaced()
        any_replaced, any_other_target, any_failed = self._peers.any_flags(
            replaced, is_other_target, bool(self._failure_reason)
        )
        if any_failed:
            reasons = enumerate(self._peers.all_gather(self._failure_reason))
            self._serve_last_good()
            self._has_ended = True
            raise RankFailedError(
                "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons if reason)
            )
        return not self._handle_replacement(replaced=any_replaced, other_target=any_other_target)

    def _handle_replacement(self, *, replaced: bool, other_target: bool) -> bool:
        """Continues from what another writer has written; returns whether there was one."""
        if not replaced and not other_target:
            return False
        self.target_changes += other_target
        self.generation += 1
        if replaced:
            self._write_baseline(self._weights.adopt_served)
        else:
            # No weights were judged with the new target, so a rollback has no destination.
            self._has_good_changes = self._has_changed = self._has_changed and not self._per_request
            self._write(
                self._weights.serve_initial if self._per_request else self._weights.mark_good
            )
        return True

    def _sample_replaced(self) -> tuple[bool, bool]:
        """Returns whether another writer has changed the drafter, and the target."""
        replaced = is_other_target = False

        def sample() -> None:
            nonlocal replaced, is_other_target
            borrowed = sample_values(self._borrowed)
            is_other_target = not torch.equal(borrowed, self._borrowed_sample)
            self._borrowed_sample = borrowed
            replaced = bool(self._weights.are_replaced())

        self._write(sample)
        return replaced, is_other_target

    def _start_check(self) -> None:
        """Starts the device's check that `check_replaced` reads, unless one is running."""
        if (
            self._check_done is None
            and self._side_stream is not None
            and self._flags_cpu is not None
        ):
            borrowed = (sample_values(self._borrowed) != self._borrowed_sample).any()
            flags = torch.stack([self._weights.are_replaced(), borrowed])
            self._check_done, self._steps_since_check = (
                self._side_stream.copy([(self._flags_cpu, flags)]),
                0,
            )

    def _serve_last_good(self) -> None:
        self.generation += 1
        self._has_changed = self._has_good_changes
        self._write(self._weights.serve_good)

    def _write(self, write: Callable[[], None]) -> None:
        """Runs what may fail on one rank only; all ranks learn of it before the next change."""
        try:
            write()
        except Exception as error:
            if not self._peers.has_other_ranks:
                raise
            _log.exception("the drafter's weights could not be written")
            self._failure_reason = self._failure_reason or error_reason(error)

    def _distribute(self, trained_weights: Mapping[str, torch.Tensor]) -> Weights:
        """Returns this rank's share of rank 0's weights."""
        if self._side_stream is not None:
            return self._fetched
        if not self._peers.has_other_ranks:
            return self._shares.select_share(trained_weights)
        for name, part in trained_weights.items():
            self._buffer_views[name].copy_(part)
        self._peers.broadcast(self._flat_buffer)
        return self._shares.select_share(self._buffer_views)


def _make_buffer(parameters: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Weights]:
    """Allocates one buffer for all parameters; returns it and a view for each parameter.

    The buffer has the parameters' type, or float32 if the types differ.
    """
    types = {part.dtype for part in parameters.values()}
    sizes = [prod(part.shape) for part in parameters.values()]
    with torch.inference_mode(False):
        flat = torch.empty(sum(sizes), dtype=types.pop() if len(types) == 1 else torch.float32)
    parts = zip(parameters.items(), flat.split(sizes), strict=True) if sizes else ()
    return flat, {name: view.view(part.shape) for (name, part), view in parts}


def _run_logged(change: Callable[[Any], object], value: Any) -> None:
    """Makes a change on a rank whose errors rank 0 reports."""
    try:
        change(value)
    except RankFailedError as error:
        _log.error("the drafter is no longer updated: %s", error)
