"""The parameters of a drafter that serves, written in place between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.sglang.api.transfer import keep_for_this_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# Elements of each parameter that are looked at for a change by somebody else.
_SAMPLED: Final = 64


class WeightsDifferError(RuntimeError):
    """The drafter does not have the values that were copied into it; the message names a part."""


class DrafterWeights:
    """Writes the weights of the serving model.

    parameters: by name; good: a copy whose acceptance was good.  first: as the drafter was loaded,
    or as somebody else has set it since.  refresh: called after each writing.  yields: nothing is
    written where somebody else has written since.  The device finds that out by itself, so that
    nobody waits for it; `are_replaced` tells.
    """

    first: dict[str, torch.Tensor]
    good: dict[str, torch.Tensor]
    changed: bool
    _served: torch.Tensor

    def __init__(
        self,
        parameters: Mapping[str, Any],
        refresh: Callable[[], None] | None = None,
        *,
        yields: bool = False,
    ) -> None:
        self.parameters = dict(parameters)
        self._refresh = refresh
        self._yields = yields
        self.adopt()

    def copy(self) -> dict[str, torch.Tensor]:
        """Returns what is served now."""
        return {name: live.detach().clone() for name, live in self.parameters.items()}

    def serve(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes them in place: a graph that reads them goes on reading the same memory.

        weights: they may have been made on another stream, by a thread that reads files, and be
        dropped afterwards.  Raises WeightsDifferError.
        """
        ours = ~self.are_replaced() if self._yields else None
        with torch.no_grad():
            for name, live in self.parameters.items():
                new = weights[name]
                live.data.copy_(new if ours is None else torch.where(ours, new, live.data))
                keep_for_this_stream(new)
            if ours is None:
                self._compare(weights)
        if self._refresh is not None:
            self._refresh()
        served = self._sample()
        self._served = served if ours is None else torch.where(ours, served, self._served)
        self.changed = True

    def _compare(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightsDifferError where the drafter does not have these values.

        Two names that stand for the same memory show here, once both are written.  On another
        device than the CPU an engine would have to wait for the answer, and is not asked.
        """
        for name, live in self.parameters.items():
            if live.device.type != "cpu":
                continue
            if not torch.equal(live, weights[name].to(live.dtype)):
                raise WeightsDifferError(
                    f"{name} has other values in the drafter than were written to it"
                )

    def serve_first(self) -> None:
        """Restores the weights as if nothing had been learnt."""
        self.serve(self.first)
        self.good, self.changed = self.first, False

    def serve_good(self) -> None:
        """Takes back what was learnt since."""
        self.serve(self.good)
        self.changed = self.good is not self.first

    def keep(self) -> None:
        """Marks what is served now as good."""
        self.good = self.copy()

    def are_replaced(self) -> torch.Tensor:
        """Returns whether somebody else has written since (a weight update), as a bool [] there."""
        return (self._sample() != self._served).any()

    def adopt(self) -> None:
        """Takes what is served for the first weights, whoever has written it."""
        self.begin_here()
        self._served = self._sample()

    def begin_here(self) -> None:
        """Takes what was written here for the first weights.

        `are_replaced` goes on telling of what somebody else has written meanwhile.
        """
        self.first = self.good = self.copy()
        self.changed = False

    def _sample(self) -> torch.Tensor:
        return sample_of(self.parameters.values())


def sample_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns some values of each tensor, float32: who writes all of them changes these."""
    parts = [tensor.detach().flatten() for tensor in tensors]
    return torch.cat([part[:: max(1, len(part) // _SAMPLED)].float() for part in parts])
