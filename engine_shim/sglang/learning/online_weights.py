"""The served weights as online updates change them, on every rank that shares the drafter.

    land, keep, adopt, restore, share, end     rank 0 orders them (link/orders.py)
    begin                               each rank finds out by itself, as a prefill begins

Every rank calls each of them in the same step: what a rank decides here depends on what all ranks
know alike, or is asked of all of them.  With one rank nobody is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.link.losses import reason_of
from engine_shim.link.orders import OrderKind, Orders
from engine_shim.sglang.learning.weights import DrafterWeights, sample_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_shim.sglang.learning.student import LiveDrafter

Whole = dict[str, torch.Tensor]
_NOT_TOLD: Final[Whole] = {}

_log = logging.getLogger(__name__)


class Outcome(Enum):
    """Names the result of a change, alike on all ranks."""

    DONE = auto()
    # Somebody else has given the drafter weights, which stay.
    REPLACED = auto()
    # There was nothing to do, or it is too late for it.
    NOTHING = auto()


class RankFailedError(RuntimeError):
    """A rank could not write weights; all ranks raise this, and the message says which and why."""


class OnlineWeights:
    """Changes one drafter's weights on this rank.

    per_request: every request begins with the first weights.  generation: counts the times that
    what the trainer was working on became worthless.  targets: counts the times that somebody gave
    the target other weights.
    """

    def __init__(self, drafter: LiveDrafter, *, per_request: bool) -> None:
        self._per_request = per_request
        self._shares = drafter.shares
        self._ranks = self._shares.peers
        self._weights = DrafterWeights(self._shares.live, drafter.refresh)
        # What this rank holds of what the drafter borrows, and its values when it last looked.
        self._borrowed = [part for part in drafter.borrowed if part is not None]
        if self._ranks.several:
            self._borrowed = [part.held for part in self._shares.borrowed]
        self._borrowed_seen = sample_of(self._borrowed)
        # Changes of the target: those that were seen, and those that rank 0 has copies of.
        self.targets = self._targets_copied = 0
        self.generation = 0
        # What `DrafterWeights` knows, too, but here alike on all ranks, whatever failed on one.
        self._has_changed = self._has_kept = False
        self._ended = False
        self._failed = ""
        self._requests: list[str] = []
        # The whole weights, one behind the other, on their way from rank 0.
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
        """Returns what this rank serves."""
        return self._weights.copy()

    def follow(self, orders: Orders) -> None:
        """Has a rank other than rank 0 carry out its orders."""
        ordered: dict[OrderKind, Callable[[int], object]] = {
            OrderKind.LAND: partial(self.land, _NOT_TOLD),
            OrderKind.KEEP: lambda _: self.keep(),
            OrderKind.RESTORE: lambda _: self.restore(),
            OrderKind.ADOPT: lambda _: self.adopt(),
            OrderKind.SHARE: lambda _: self.share(_NOT_TOLD),
            OrderKind.END: lambda value: self.end(restores=bool(value)),
        }
        for kind, obey in ordered.items():
            orders.register(kind, partial(_guarded, obey))

    def follow_prefill(self, request_ids: list[str]) -> None:
        """Does on a rank other than rank 0 what `begin` does there."""
        _guarded(self.begin, request_ids)

    def land(self, whole: Mapping[str, torch.Tensor], generation: int) -> Outcome:
        """Serves what the trainer has made; whole: on rank 0 alone."""
        if self._ended or generation != self.generation:
            return Outcome.NOTHING
        if not self._are_ours():
            return Outcome.REPLACED
        self._has_changed = True
        weights = self._spread(whole)
        self._write(lambda: self._weights.serve(weights))
        return Outcome.DONE

    def keep(self) -> Outcome:
        """Marks what is served as good."""
        if self._ended:
            return Outcome.NOTHING
        if not self._are_ours():
            return Outcome.REPLACED
        self._has_kept = self._has_changed
        self._write(self._weights.keep)
        return Outcome.DONE

    def adopt(self) -> Outcome:
        """Takes what serves for the weights that updates begin from."""
        if self._ended:
            return Outcome.NOTHING
        if not self._are_ours():
            return Outcome.REPLACED
        self._has_changed = self._has_kept = False
        self._write(self._weights.adopt)
        return Outcome.DONE

    def restore(self) -> Outcome:
        """Serves the last good weights."""
        if self._ended:
            return Outcome.NOTHING
        if not self._are_ours():
            return Outcome.REPLACED
        self._serve_good()
        return Outcome.DONE

    def begin(self, request_ids: list[str]) -> Outcome | None:
        """Serves the first weights, if each request begins with them and these are other requests.

        Returns None if not, and NOTHING where the first weights serve already.
        """
        if not self._per_request or self._ended or request_ids == self._requests:
            return None
        self._requests = request_ids
        if not self._has_changed:
            return Outcome.NOTHING
        if not self._are_ours():
            return Outcome.REPLACED
        self.generation += 1
        self._has_changed = self._has_kept = False
        self._write(self._weights.serve_first)
        return Outcome.DONE

    def share(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Copies the served weights into the trainer's memory, which rank 0 has."""
        if self._ended:
            return
        if self._targets_copied != self.targets:
            self._shares.copy_borrowed()
            self._targets_copied = self.targets
        for name, part in self._shares.whole():
            memory[name].copy_(part.detach())

    def end(self, *, restores: bool) -> None:
        """Serves these weights from now on, or the last good ones."""
        if self._ended:
            return
        if restores and self._are_ours():
            self._serve_good()
        self._ended = True

    def _are_ours(self) -> bool:
        """Whether all ranks still serve what was written here.  Raises RankFailedError."""
        replaced, is_other_target = self._were_replaced()
        any_replaced, any_other_target, any_failed = self._ranks.any_of(
            replaced, is_other_target, bool(self._failed)
        )
        if any_failed:
            reasons = enumerate(self._ranks.told(self._failed))
            self._serve_good()
            self._ended = True
            raise RankFailedError("; ".join(f"rank {rank}: {why}" for rank, why in reasons if why))
        self.targets += any_other_target
        if any_replaced:
            if not replaced:
                self._write(self._weights.adopt)
            self._has_changed = self._has_kept = False
        elif any_other_target:
            # Nothing was judged beside this target, so there is nothing better to return to.
            self._has_kept = self._has_changed = self._has_changed and not self._per_request
            self._write(self._weights.serve_first if self._per_request else self._weights.keep)
        self.generation += any_replaced or any_other_target
        return not (any_replaced or any_other_target)

    def _were_replaced(self) -> tuple[bool, bool]:
        """Whether somebody else has given the drafter weights, and the target."""
        replaced = is_other_target = False

        def look() -> None:
            nonlocal replaced, is_other_target
            borrowed = sample_of(self._borrowed)
            is_other_target = not torch.equal(borrowed, self._borrowed_seen)
            self._borrowed_seen = borrowed
            replaced = self._weights.were_replaced()

        self._write(look)
        return replaced, is_other_target

    def _serve_good(self) -> None:
        self.generation += 1
        self._has_changed = self._has_kept
        self._write(self._weights.serve_good)

    def _write(self, write: Callable[[], None]) -> None:
        """Does what may fail on one rank alone; all ranks hear of it before the next change."""
        try:
            write()
        except Exception as error:
            if not self._ranks.several:
                raise
            _log.exception("the drafter's weights could not be written")
            self._failed = self._failed or reason_of(error)

    def _spread(self, whole: Mapping[str, torch.Tensor]) -> Whole:
        """Returns this rank's share of rank 0's weights."""
        if not self._ranks.several:
            return self._shares.of(whole)
        for name, part in whole.items():
            self._views[name].copy_(part)
        self._ranks.spread(self._flat)
        return self._shares.of(self._views)


def _buffer(parameters: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Whole]:
    """Makes room for these, in their type if they have one in common; returns it and its parts."""
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
