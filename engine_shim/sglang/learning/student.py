"""Describes the serving drafter for training: its sizes, its parameters, and what it borrows.

Its parameters are written in place between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from engine_shim.sglang.api.ranks import ALONE, Peers
from engine_shim.sglang.api.transfer import keep_for_this_stream
from engine_shim.sglang.learning.rank_shares import Gathering, RankShares
from engine_shim.sglang.training import students
from engine_shim.sglang.training.blocks import Borrowed
from engine_shim.sglang.training.drafter_config import DFLASH, EAGLE3, read_eagle3

MTP: Final = "MiMoMTP"
LEARN: Final = (EAGLE3, DFLASH, MTP)
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
# Parameters of other types are packed by quantization, and cannot be written directly.
_PLAIN: Final = (torch.float32, torch.bfloat16, torch.float16)

# Elements of each parameter that are compared to detect a change by another writer.
_SAMPLED: Final = 64


@dataclass(frozen=True, slots=True)
class LiveDrafter:
    """Describes the serving drafter.

    parameters: by name; the live ones, or, if ranks share them, copies of the whole ones on rank 0
    alone.  borrowed: the target's tensors that it references, and its draft vocabulary; they are
    never trained and never written to.  feature_width: numbers of the target's hidden states that
    it reads at a position.  refresh: must be called after parameters were written, to rebuild what
    the engine derives from them.  ranked: this rank's share, if ranks share the parameters.
    """

    shape: students.DraftShape
    parameters: dict[str, torch.Tensor]
    borrowed: Borrowed
    feature_width: int
    refresh: Callable[[], None] | None = None
    ranked: RankShares | None = None

    @property
    def shares(self) -> RankShares:
        """Returns what this rank holds of the parameters, and writes to."""
        return self.ranked or RankShares(self.parameters)

    @property
    def device(self) -> torch.device:
        """Returns the device of the live parameters."""
        return next(iter(self.shares.live.values())).device


def live_drafter(worker: Any, ranks: Peers = ALONE, second: Any = None) -> LiveDrafter:
    """Describes the drafter of this `EAGLEWorkerV2` for its student.

    ranks: the ranks that share it; this is a collective, which all of them call at their start.
    second: the `DFlashDrafter` beside the engine's own, if that learns.  Only this function decides
    for which drafter an engine can learn, collect signals and take versions.  Raises
    UnsupportedDrafterError with the reason if a student would differ from this drafter.
    """
    draft = worker.draft_worker
    model = (draft.draft_runner if second is None else second.runner).model
    kind = type(model).__name__
    if second is not None and (over := next(filter(None, ranks.told(second.over)), "")):
        raise students.UnsupportedDrafterError(f"it no longer drafts: {over}")
    if kind not in LEARN:
        raise students.UnsupportedDrafterError(f"it is a {kind}, not one of {', '.join(LEARN)}")
    whole = Gathering(ranks)
    if kind == DFLASH:
        block = draft.block if second is None else second
        found = _dflash(model, draft.target_worker, block, whole)
    else:
        found = _eagle3(model, whole) if kind == EAGLE3 else _mtp(model, whole)
    _require_same(found)
    return replace(found, ranked=whole.shares(found.parameters))


def _eagle3(model: Any, whole: Gathering) -> LiveDrafter:
    config = model.config.to_dict()
    if model.load_lm_head_from_target:
        # SGLang has filled in the target's vocabulary size.
        config["draft_vocab_size"] = None
    # A model without a window need not have the method.
    window = getattr(model, "get_attention_sliding_window_size", lambda: None)()
    if window is not None:
        raise students.UnsupportedDrafterError(
            f"it sees the last {window} positions only (--speculative-draft-window-size)"
        )
    shape = students.eagle3_shape(config)
    # SGLang ignores a list of layers outside eagle_config when it makes the target emit states.
    shape = replace(shape, feature_layers=read_eagle3(config).captured_layers or ())
    parameters = whole.parameters(model)
    embedding, head = parameters.pop(_EMBEDDING).detach(), None
    if not shape.own_head:
        head = _unless_same(parameters.pop(_HEAD, None), embedding)
    elif len(parameters[_HEAD]) > shape.drafts:
        # SGLang pads it to a round number of rows.
        parameters[_HEAD] = parameters[_HEAD].detach()[: shape.drafts]
    tokens = students.draft_tokens(model.hot_token_id, shape)
    if tokens is not None:
        # SGLang leaves the list on the host, where its loader made it.
        tokens = tokens.to(embedding.device)
    width = shape.features * shape.decoder.hidden
    return LiveDrafter(shape, parameters, _cut(shape, embedding, head, tokens), width)


def _mtp(model: Any, whole: Gathering) -> LiveDrafter:
    shape = students.mtp_shape(model.config.to_dict())
    parameters = whole.parameters(model)
    embedding = parameters.pop(_EMBEDDING).detach()
    head = _unless_same(parameters.pop(_HEAD, None), embedding)
    return LiveDrafter(shape, parameters, _cut(shape, embedding, head), shape.decoder.hidden)


def _dflash(model: Any, target_worker: Any, block: Any, whole: Gathering) -> LiveDrafter:
    """Describes a DFlash drafter.  block: its `DFlashDrafter`."""
    target = target_worker.model_runner.model
    layers: int = target_worker.model_runner.model_config.hf_text_config.num_hidden_layers
    shape = students.dflash_shape(
        model.config.to_dict(), target_layers=layers, unnamed_mask=block.mask_token
    )
    embedding = whole.weight(target.get_input_embeddings()).detach()
    head = _unless_same(whole.weight(target.lm_head), embedding)
    width = len(shape.feature_layers) * shape.decoder.hidden
    borrowed = _cut(shape, embedding, head)
    return LiveDrafter(shape, whole.parameters(model), borrowed, width, block.refresh)


def _unless_same(head: torch.Tensor | None, embedding: torch.Tensor) -> torch.Tensor | None:
    if head is None or head.data_ptr() == embedding.data_ptr():
        return None
    return head.detach()


def _cut(
    shape: students.DraftShape,
    embedding: torch.Tensor,
    head: torch.Tensor | None,
    tokens: torch.Tensor | None = None,
) -> Borrowed:
    """Makes `Borrowed` without the rows by which SGLang pads embeddings and heads."""
    rows = shape.decoder.vocabulary
    return Borrowed(embedding[:rows], None if head is None else head[:rows], tokens)


def _require_same(found: LiveDrafter) -> None:
    """Raises UnsupportedDrafterError unless a student has exactly the drafter's parameters."""
    live = {name: tuple(part.shape) for name, part in found.parameters.items()}
    embedding, head, tokens = found.borrowed
    with torch.device("meta"):
        empty = Borrowed(
            embedding.to("meta"),
            None if head is None else head.to("meta"),
            None if tokens is None else tokens.to("meta"),
        )
        student = students.student_of(found.shape, empty)
    ours = {name: tuple(part.shape) for name, part in student.named_parameters()}
    for name in sorted(ours.keys() | live.keys()):
        if ours.get(name) != live.get(name):
            raise students.UnsupportedDrafterError(
                f"its {name} is {live.get(name, 'missing')}, a student's "
                f"{ours.get(name, 'missing')}"
            )
    for name, part in found.parameters.items():
        if part.dtype not in _PLAIN:
            raise students.UnsupportedDrafterError(
                f"its {name} is stored as {part.dtype}, which is packed"
            )


class WeightsDifferError(RuntimeError):
    """The drafter does not have the values that were written; the message names a parameter."""


class DrafterWeights:
    """Writes the weights of the serving model.

    parameters: by name.  good: a copy whose acceptance was good.  first: the weights as loaded, or
    as another writer has set them since.  refresh: called after each write.  yields: whether writes
    do nothing after another writer has changed the weights.  The device evaluates that itself, so
    the host does not wait; `are_replaced` returns it.
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
        """Returns a copy of the serving weights."""
        return {name: live.detach().clone() for name, live in self.parameters.items()}

    def serve(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes weights in place, because graphs read that memory.

        weights: may come from another stream (a thread that reads files), and may be dropped
        afterwards.  Raises WeightsDifferError.
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
        """Raises WeightsDifferError if the drafter does not have these values.

        This detects two names for the same memory, after both were written.  Only checked on the
        CPU, because an engine would have to wait for another device.
        """
        for name, live in self.parameters.items():
            if live.device.type != "cpu":
                continue
            if not torch.equal(live, weights[name].to(live.dtype)):
                raise WeightsDifferError(
                    f"{name} has other values in the drafter than were written to it"
                )

    def serve_first(self) -> None:
        """Serves the first weights, as if nothing had been learnt."""
        self.serve(self.first)
        self.good, self.changed = self.first, False

    def serve_good(self) -> None:
        """Rolls back to the last good weights."""
        self.serve(self.good)
        self.changed = self.good is not self.first

    def keep(self) -> None:
        """Marks the serving weights as good."""
        self.good = self.copy()

    def are_replaced(self) -> torch.Tensor:
        """Returns whether another writer (a weight update) has written since.

        The result is a bool [] on the weights' device.
        """
        return (self._sample() != self._served).any()

    def adopt(self) -> None:
        """Makes the serving weights the first ones, including those of another writer."""
        self.begin_here()
        self._served = self._sample()

    def begin_here(self) -> None:
        """Makes the weights that were written here the first ones.

        `are_replaced` still detects what another writer has written since.
        """
        self.first = self.good = self.copy()
        self.changed = False

    def _sample(self) -> torch.Tensor:
        return sample_of(self.parameters.values())


def sample_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns some values of each tensor, float32; a write of whole tensors changes them."""
    parts = [tensor.detach().flatten() for tensor in tensors]
    return torch.cat([part[:: max(1, len(part) // _SAMPLED)].float() for part in parts])
