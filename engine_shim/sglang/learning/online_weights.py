"""The served weights as online updates change them, on every rank that shares the drafter.

    land, keep, adopt, restore, share, end     rank 0 orders them (link/orders.py)
    begin                                      each rank finds out by itself, as a prefill begins

Every rank calls each of them in the same step: what a rank decides here depends on what all ranks
know alike, or is asked of all of them.  With one rank nobody is asked.

On a GPU, which one rank has, weights travel on a side stream: `fetch` brings what the trainer has
made, `share` takes what serves to it, and `look` finds out some steps later what `_are_ours` finds
out at once on a CPU.
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

# Steps between two looks at whether somebody else has written weights, on a GPU.
_LOOK_STEPS: Final = 64

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

    def __init__(
        self, drafter: LiveDrafter, *, per_request: bool, side: SideStream | None = None
    ) -> None:
        """Makes room for what is fetched.  side: of the device, None for the CPU."""
        self._per_request = per_request
        self._shares = drafter.shares
        self._ranks = self._shares.peers
        self._side = side
        live, away = self._shares.live, side is not None
        self._weights = DrafterWeights(live, drafter.refresh, yields=away)
        with torch.inference_mode(False):
            # What the trainer has made, once it is on the device.
            self._fetched = {n: torch.empty_like(part) for n, part in live.items()} if away else {}
        self._flags_cpu = None if side is None else host_buffer((2,), torch.bool, side.device)
        self._looked: torch.Event | None = None
        self._unlooked = 0
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
        """Serves what the trainer has made; whole: on rank 0 alone."""
        if generation != self.generation:
            return Outcome.NOTHING
        return self._apply(partial(self._land, whole))

    def _land(self, whole: Mapping[str, torch.Tensor]) -> None:
        self._has_changed = True
        weights = self._spread(whole)
        self._write(lambda: self._weights.serve(weights))

    def fetch(self, whole: Mapping[str, torch.Tensor]) -> torch.Event | None:
        """Brings what the trainer has made to the device, where `land` finds it.

        Returns an event that has occurred once it is there; None where it is there already.
        """
        if self._side is None:
            return None
        self._look()
        return self._side.copy((room, whole[name]) for name, room in self._fetched.items())

    def look(self) -> bool:
        """Runs as a step begins: whether somebody else has given the drafter weights.

        On a CPU everything else here asks that by itself.
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
        """Marks what is served as good."""
        return self._apply(self._keep)

    def _keep(self) -> None:
        self._has_kept = self._has_changed
        self._write(self._weights.keep)

    def adopt(self, *, others: bool = False) -> Outcome:
        """Takes what serves for the weights that updates begin from.

        others: somebody else is known to have given the drafter these weights.
        """
        if self._ended:
            # Nothing is written any more, but what serves is no longer what only updates have made.
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
        """Serves the first weights, if each request begins with them and these are other requests.

        Returns None if not, and NOTHING where the first weights serve already.
        """
        if not self._per_request or self._ended or request_ids == self._requests:
            return None
        self._requests = request_ids
        # What the trainer is working on is of the requests before.
        self.generation += 1
        if not self._has_changed:
            return Outcome.NOTHING
        return self._apply(partial(self._begin_with, self._weights.serve_first))

    def share(self, memory: Mapping[str, torch.Tensor]) -> torch.Event | None:
        """Copies the served weights into the trainer's memory, which rank 0 has.

        Returns an event that has occurred once they are there; None where they are there already.
        """
        if self._ended:
            return None
        if self._side is not None:
            # What serves may change before it has been read.
            served = self._weights.copy()
            return self._side.copy((memory[name], part) for name, part in served.items())
        if self._targets_copied != self.targets:
            self._shares.copy_borrowed()
            self._targets_copied = self.targets
        for name, part in self._shares.whole():
            memory[name].copy_(part.detach())
        return None

    def end(self, *, restores: bool) -> None:
        """Serves these weights from now on, or the last good ones."""
        if self._ended:
            return
        self._ended = True
        if restores and self._are_ours():
            self._serve_good()

    def _apply(self, change: Callable[[], None]) -> Outcome:
        """Makes a change, unless it is over or somebody else has given the drafter weights."""
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
            # What is written yields, and `look` tells.
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
        """Continues from what somebody else has written; returns whether anybody has."""
        if not replaced and not other_target:
            return False
        self.targets += other_target
        self.generation += 1
        if replaced:
            self._begin_with(self._weights.adopt)
        else:
            # Nothing was judged beside this target, so there is nothing better to return to.
            self._has_kept = self._has_changed = self._has_changed and not self._per_request
            self._write(self._weights.serve_first if self._per_request else self._weights.keep)
        return True

    def _were_replaced(self) -> tuple[bool, bool]:
        """Whether somebody else has given the drafter weights, and the target."""
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
        """Asks the device what `look` will tell, if it was not asked yet."""
        if self._looked is None and self._side is not None and self._flags_cpu is not None:
            borrowed = (sample_of(self._borrowed) != self._borrowed_seen).any()
            flags = torch.stack([self._weights.are_replaced(), borrowed])
            self._looked, self._unlooked = self._side.copy([(self._flags_cpu, flags)]), 0

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
        if self._side is not None:
            return self._fetched
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
