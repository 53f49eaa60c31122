"""The served weights as online updates change them, on every rank that shares the drafter.

    land, keep, adopt, restore, share, end     rank 0 orders them (link/orders.py)
    begin                                      each rank detects it itself when a prefill begins

Every rank calls each of these in the same step.  A decision depends only on facts that are equal on
all ranks, or on a collective.  With one rank there is no collective.

On a GPU, which only an engine of one rank uses, weights are copied on a side stream.  `fetch`
copies the trainer's weights to the device, and `share` copies the serving weights to the trainer.
`look` detects foreign writes some steps later, which `_are_ours` detects at once on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import partial
from math import prod
from typing import Any, Final

import torch

from engine_shim.link.losses import reason_of
from engine_shim.link.orders import OrderKind, Orders
from engine_shim.sglang.api.transfer import SideStream, host_buffer
from engine_shim.sglang.learning.student import DrafterWeights, LiveDrafter, sample_of

# Steps between two checks on a GPU whether another writer (a weight update) has changed weights.
_LOOK_STEPS: Final = 64

Whole = dict[str, torch.Tensor]
_NOT_TOLD: Final[Whole] = {}

_log = logging.getLogger(__name__)


class Outcome(Enum):
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
    whenever the trainer's current work becomes obsolete.  targets: number of times that a weight
    update changed the target.
    """

    def __init__(
        self, drafter: LiveDrafter, *, per_request: bool, side: SideStream | None = None
    ) -> None:
        """Allocates buffers for fetched weights.  side: of the device, None for the CPU."""
        self._per_request = per_request
        self._shares = drafter.shares
        self._ranks = self._shares.peers
        self._side = side
        live, away = self._shares.live, side is not None
        self._weights = DrafterWeights(live, drafter.refresh, yields=away)
        with torch.inference_mode(False):
            # The trainer's weights on the device, after `fetch`.
            self._fetched = {n: torch.empty_like(part) for n, part in live.items()} if away else {}
        self._flags_cpu = None if side is None else host_buffer((2,), torch.bool, side.device)
        self._looked: torch.Event | None = None
        self._unlooked = 0
        # This rank's part of what the drafter borrows, and a sample of it from the last check.
        self._borrowed = [part for part in drafter.borrowed if part is not None]
        if self._ranks.several:
            self._borrowed = [part.held for part in self._shares.borrowed]
        self._borrowed_seen = sample_of(self._borrowed)
        # Changes of the target: the detected ones, and those that rank 0 has copied.
        self.targets = self._targets_copied = 0
        self.generation = 0
        # As in `DrafterWeights`, but equal on all ranks, even if one rank has failed.
        self._has_changed = self._has_kept = False
        self._ended = False
        self._failed = ""
        self._requests: list[str] = []
        # Buffer for the whole weights, concatenated, that rank 0 broadcasts.
        self._flat, self._views = _buffer(drafter.parameters if self._ranks.several else {})

    @property
    def has_changed(self) -> bool:
        """Whether updates have changed what serves."""
        return self._has_changed

    @property
    def are_shared(self) -> bool:
        """Whether this rank holds a share of the weights only."""
        return self._ranks.several

    def copy(self) -> Whole:
        """Returns a copy of the weights that this rank serves."""
        return self._weights.copy()

    def follow(self, orders: Orders) -> None:
        """Registers the handlers of rank 0's orders on another rank."""
        ordered: dict[OrderKind, Callable[[int], object]] = {
            OrderKind.LAND: partial(self.land, _NOT_TOLD),
            OrderKind.KEEP: lambda _: self.keep(),
            OrderKind.RESTORE: lambda _: self.restore(),
            OrderKind.ADOPT: lambda value: self.adopt(others=bool(value)),
            OrderKind.SHARE: lambda _: self.share(_NOT_TOLD),
            OrderKind.END: lambda value: self.end(restores=bool(value)),
        }
        for kind, obey in ordered.items():
            orders.register(kind, partial(_guarded, obey))

    def follow_prefill(self, request_ids: list[str]) -> None:
        """Does on a rank other than rank 0 what `begin` does there."""
        _guarded(self.begin, request_ids)

    def land(self, whole: Mapping[str, torch.Tensor], generation: int) -> Outcome:
        """Serves the trainer's weights; whole: on rank 0 alone."""
        if generation != self.generation:
            return Outcome.NOTHING
        return self._apply(partial(self._land, whole))

    def _land(self, whole: Mapping[str, torch.Tensor]) -> None:
        self._has_changed = True
        weights = self._spread(whole)
        self._write(lambda: self._weights.serve(weights))

    def fetch(self, whole: Mapping[str, torch.Tensor]) -> torch.Event | None:
        """Copies the trainer's weights to the device, for `land`.

        Returns an event that occurs when the copy is complete; None on a CPU.
        """
        if self._side is None:
            return None
        self._look()
        return self._side.copy((room, whole[name]) for name, room in self._fetched.items())

    def look(self) -> bool:
        """Runs when a step begins; returns whether another writer has given the drafter weights.

        On a CPU all other methods check that themselves.
        """
        if self._side is None or self._ended:
            return False
        if self._looked is None:
            self._unlooked += 1
            if self._unlooked >= _LOOK_STEPS:
                self._look()
            return False
        if not self._looked.query():
            return False
        self._looked = None
        assert self._flags_cpu is not None
        replaced, other_target = self._flags_cpu.tolist()
        if other_target:
            self._borrowed_seen = sample_of(self._borrowed)
        return self._continue_from(replaced=replaced, other_target=other_target)

    def keep(self) -> Outcome:
        """Marks the serving weights as good."""
        return self._apply(self._keep)

    def _keep(self) -> None:
        self._has_kept = self._has_changed
        self._write(self._weights.keep)

    def adopt(self, *, others: bool = False) -> Outcome:
        """Makes the serving weights the baseline of further updates.

        others: whether another writer is known to have given the drafter these weights.
        """
        if self._ended:
            # Nothing is written any more, but the serving weights now come from another writer.
            self._has_changed = self._has_kept = False
            return Outcome.NOTHING
        if others and self._side is not None:
            self._looked = None
            self._continue_from(replaced=True, other_target=False)
            return Outcome.REPLACED
        return self._apply(partial(self._begin_with, self._weights.begin_here))

    def restore(self) -> Outcome:
        """Serves the last good weights."""
        return self._apply(self._serve_good)

    def begin(self, request_ids: list[str]) -> Outcome | None:
        """Serves the first weights, if each request begins with them and the requests are new.

        Returns None otherwise, and NOTHING if the first weights already serve.
        """
        if not self._per_request or self._ended or request_ids == self._requests:
            return None
        self._requests = request_ids
        # The trainer is working on the previous requests.
        self.generation += 1
        if not self._has_changed:
            return Outcome.NOTHING
        return self._apply(partial(self._begin_with, self._weights.serve_first))

    def share(self, memory: Mapping[str, torch.Tensor]) -> torch.Event | None:
        """Copies the served weights into the trainer's memory, which rank 0 has.

        Returns an event that occurs when the copy is complete; None if it already is.
        """
        if self._ended:
            return None
        if self._side is not None:
            # The serving weights may change before the copy has read them.
            served = self._weights.copy()
            return self._side.copy((memory[name], part) for name, part in served.items())
        if self._targets_copied != self.targets:
            self._shares.copy_borrowed()
            self._targets_copied = self.targets
        for name, part in self._shares.whole():
            memory[name].copy_(part.detach())
        return None

    def end(self, *, restores: bool) -> None:
        """Ends all changes.  restores: whether to serve the last good weights."""
        if self._ended:
            return
        self._ended = True
        if restores and self._are_ours():
            self._serve_good()

    def _apply(self, change: Callable[[], None]) -> Outcome:
        """Makes a change, unless updates have ended or another writer has changed the weights."""
        if self._ended:
            return Outcome.NOTHING
        if not self._are_ours():
            return Outcome.REPLACED
        change()
        return Outcome.DONE

    def _begin_with(self, write: Callable[[], None]) -> None:
        """Writes weights that no update has changed."""
        self._has_changed = self._has_kept = False
        self._write(write)

    def _are_ours(self) -> bool:
        """Whether all ranks still serve what was written here.  Raises RankFailedError."""
        if self._side is not None:
            # Writes do nothing if another writer came first, and `look` reports that.
            return True
        replaced, is_other_target = self._were_replaced()
        any_replaced, any_other_target, any_failed = self._ranks.any_of(
            replaced, is_other_target, bool(self._failed)
        )
        if any_failed:
            reasons = enumerate(self._ranks.told(self._failed))
            self._serve_good()
            self._ended = True
            raise RankFailedError("; ".join(f"rank {rank}: {why}" for rank, why in reasons if why))
        return not self._continue_from(replaced=any_replaced, other_target=any_other_target)

    def _continue_from(self, *, replaced: bool, other_target: bool) -> bool:
        """Continues from what another writer has written; returns whether there was one."""
        if not replaced and not other_target:
            return False
        self.targets += other_target
        self.generation += 1
        if replaced:
            self._begin_with(self._weights.adopt)
        else:
            # No weights were judged with the new target, so a rollback has no destination.
            self._has_kept = self._has_changed = self._has_changed and not self._per_request
            self._write(self._weights.serve_first if self._per_request else self._weights.keep)
        return True

    def _were_replaced(self) -> tuple[bool, bool]:
        """Returns whether another writer has changed the drafter, and the target."""
        replaced = is_other_target = False

        def look() -> None:
            nonlocal replaced, is_other_target
            borrowed = sample_of(self._borrowed)
            is_other_target = not torch.equal(borrowed, self._borrowed_seen)
            self._borrowed_seen = borrowed
            replaced = bool(self._weights.are_replaced())

        self._write(look)
        return replaced, is_other_target

    def _look(self) -> None:
        """Starts the check on the device whose result `look` reads, if none is running."""
        if self._looked is None and self._side is not None and self._flags_cpu is not None:
            borrowed = (sample_of(self._borrowed) != self._borrowed_seen).any()
            flags = torch.stack([self._weights.are_replaced(), borrowed])
            self._looked, self._unlooked = self._side.copy([(self._flags_cpu, flags)]), 0

    def _serve_good(self) -> None:
        self.generation += 1
        self._has_changed = self._has_kept
        self._write(self._weights.serve_good)

    def _write(self, write: Callable[[], None]) -> None:
        """Runs what may fail on one rank only; all ranks learn of it before the next change."""
        try:
            write()
        except Exception as error:
            if not self._ranks.several:
                raise
            _log.exception("the drafter's weights could not be written")
            self._failed = self._failed or reason_of(error)

    def _spread(self, whole: Mapping[str, torch.Tensor]) -> Whole:
        """Returns this rank's share of rank 0's weights."""
        if self._side is not None:
            return self._fetched
        if not self._ranks.several:
            return self._shares.of(whole)
        for name, part in whole.items():
            self._views[name].copy_(part)
        self._ranks.spread(self._flat)
        return self._shares.of(self._views)


def _buffer(parameters: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Whole]:
    """Allocates one buffer for all parameters; returns it and a view for each parameter.

    The buffer has the parameters' type, or float32 if the types differ.
    """
    types = {part.dtype for part in parameters.values()}
    sizes = [prod(part.shape) for part in parameters.values()]
    with torch.inference_mode(False):
        flat = torch.empty(sum(sizes), dtype=types.pop() if len(types) == 1 else torch.float32)
    parts = zip(parameters.items(), flat.split(sizes), strict=True) if sizes else ()
    return flat, {name: room.view(part.shape) for (name, part), room in parts}


def _guarded(change: Callable[[Any], object], value: Any) -> None:
    """Makes a change on a rank whose errors rank 0 reports."""
    try:
        change(value)
    except RankFailedError as error:
        _log.error("the drafter is no longer updated: %s", error)
