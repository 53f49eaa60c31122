"""Draws how many drafts each sequence accepts, by (request, position, drafter).

Dummy weights have no acceptance of their own, so it is drawn.  A request's id names its
class, and its draws depend on nothing but the id, the position and the drafter: every policy gets
the same draws.  The seed of a stream is in its requests' numbers.  `accepted` is what the request
pools of the simulator hold, so the two can be compared.

The arithmetic of dummy models' layers, whose outputs are noise, is left out.  Everything around it
stays: embeddings, norms, heads, the drafters' serial passes, sampling, slots of the caches,
batching.  A step then leaves the machine more room below its pace.
"""

import importlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.curves import IndependentCurves

# The token id written at every accepted position; all vocabularies have it.
_TOKEN = 100
# Requests that are in no class, such as SGLang's own health probe.
_NO_CLASS_TOKENS = 1
_ATTENTION = (
    ("sglang.srt.models.qwen3", "Qwen3Attention"),
    ("sglang.srt.models.qwen2", "Qwen2Attention"),
    ("sglang.srt.models.llama", "LlamaAttention"),
    ("sglang.srt.models.dflash", "DFlashAttention"),
)
_MLP = (
    ("sglang.srt.models.qwen2", "Qwen2MLP"),
    ("sglang.srt.models.llama", "LlamaMLP"),
    ("sglang.srt.models.dflash", "DFlashMLP"),
)


@dataclass(frozen=True, slots=True)
class RequestId:
    """A request's id in a paced engine: class, number and output tokens, as CLASS.NUMBER.TOKENS."""

    kind: str
    number: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.kind}.{self.number}.{self.output_tokens}"

    @classmethod
    def parse(cls, text: str) -> "RequestId | None":
        """Reads an id; None for one of another form."""
        kind, _, remainder = text.partition(".")
        number, _, tokens = remainder.partition(".")
        if not (number.isdecimal() and tokens.isdecimal()):
            return None
        return cls(kind, int(number), int(tokens))


class DrawnAcceptance:
    """The draws of all requests.

    curves: class -> drafter -> conditional acceptance a_1, a_2, ...
    """

    def __init__(self, curves: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        self._curves = {
            kind: IndependentCurves(kind, drafter_curves) for kind, drafter_curves in curves.items()
        }
        self._draws: dict[tuple[str, str], NDArray[np.uint8]] = {}

    @property
    def kinds(self) -> Collection[str]:
        """The classes that have curves."""
        return self._curves.keys()

    def require(self, drafters: Sequence[str]) -> None:
        """Raises ValueError for a class that lacks the curve of one of the drafters."""
        for kind, drafter_curves in self._curves.items():
            missing = sorted(set(drafters) - drafter_curves.curves.keys())
            if missing:
                raise ValueError(f"class {kind!r} has no acceptance curve for {missing}")

    def accepted(self, request: RequestId, drafter: str) -> NDArray[np.uint8]:
        """[positions] drafts accepted if drafting starts there; position 0 follows the prefill.

        Raises KeyError for a class or a drafter that has no curve.
        """
        rng = np.random.default_rng([0, zlib.crc32(f"{request}/{drafter}".encode())])
        return self._curves[request.kind].draw(drafter, rng, max(request.output_tokens, 1))

    def accepted_at(self, rid: str, drafter: str, position: int) -> int:
        """Drafts accepted at a position of a request; 0 for a request without class."""
        key = (rid, drafter)
        accepted_counts = self._draws.get(key)
        if accepted_counts is None:
            request = RequestId.parse(rid)
            accepted_counts = (
                np.zeros(_NO_CLASS_TOKENS, dtype=np.uint8)
                if request is None or request.kind not in self._curves
                else self.accepted(request, drafter)
            )
            self._draws[key] = accepted_counts
        return int(accepted_counts[position]) if position < len(accepted_counts) else 0

    def forget(self, rid: str) -> None:
        """Drops what was drawn for a request that has ended."""
        for key in [key for key in self._draws if key[0] == rid]:
            del self._draws[key]


def accept(
    accept_index: Any, predict: Any, num_correct_drafts: Any, accepted_counts: list[int], gamma: int
) -> Any:
    """Writes a step's acceptance where SGLang's `generate_simulated_accept_index` would.

    accepted_counts: [B] drafts that each sequence accepts.  The host does not wait for a GPU.
    Further arguments, and what is returned: see `write_accepted`.
    """
    import torch

    device = accept_index.device
    # From pageable memory the copy would wait for everything that was launched before it.
    lengths = torch.tensor(accepted_counts, pin_memory=device.type == "cuda")
    correct = lengths.to(device, non_blocking=True).clamp(max=gamma)
    return write_accepted(accept_index, predict, num_correct_drafts, correct, gamma)


def write_accepted(
    accept_index: Any, predict: Any, num_correct_drafts: Any, correct: Any, gamma: int
) -> Any:
    """Writes an acceptance that is on the device already.

    correct: [B] drafts that each sequence accepts.  predict, num_correct_drafts: filled in place.
    Returns [B, gamma + 1]: each row's tokens in `predict` from its first one on, and -1 behind what
    was accepted.
    """
    import torch

    offsets = torch.arange(gamma + 1, device=accept_index.device)
    index = torch.where(offsets <= correct[:, None], accept_index[:, :1] + offsets, -1)
    num_correct_drafts.copy_(correct)
    predict.fill_(_TOKEN)
    return index.to(torch.int32)


def leave_out_layers() -> None:
    """Replaces the forward passes of attention and MLP in this process."""
    for module, name in _ATTENTION:
        getattr(importlib.import_module(module), name).forward = _skip_attention
    for module, name in _MLP:
        getattr(importlib.import_module(module), name).forward = _skip_mlp


def _skip_attention(
    layer: Any, positions: Any, hidden_states: Any, forward_batch: Any, **_: Any
) -> Any:
    del positions, forward_batch
    # An EAGLE3 drafter's is twice as wide as what it returns.
    return hidden_states[..., : layer.hidden_size]


def _skip_mlp(layer: Any, states: Any, *_: Any, **__: Any) -> Any:
    del layer
    return states
