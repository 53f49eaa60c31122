"""Describes the serving drafter for training: its sizes, its parameters, and what it borrows.

Its parameters are written in place between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from engine_shim.sglang.api.ranks import SINGLE_RANK, Peers
from engine_shim.sglang.api.transfer import protect_from_reuse
from engine_shim.sglang.learning.rank_shares import ParameterGatherer, RankShares
from engine_shim.sglang.training import students
from engine_shim.sglang.training.blocks import Borrowed
from engine_shim.sglang.training.drafter_config import DFLASH, EAGLE3, read_eagle3

MTP: Final = "MiMoMTP"
SUPPORTED_CLASSES: Final = (EAGLE3, DFLASH, MTP)
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
# Parameters of other types are packed by quantization, and cannot be written directly.
_UNPACKED_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

# Elements of each parameter that are compared to detect a change by another writer.
_SAMPLES_PER_PARAMETER: Final = 64


@dataclass(frozen=True, slots=True)
class LiveDrafter:
    """Describes the serving drafter.

    parameters: by name; the live ones, or, if ranks share them, copies of the whole ones on rank 0
    alone.  borrowed: the target's tensors that it references, and its draft vocabulary; they are
    never trained and never written to.  feature_width: numbers of the target's hidden states that
    it reads at a position.  refresh: must be called after parameters were written, to rebuild what
    the engine derives from them.  rank_shares: this rank's share, if ranks share the parameters.
    """

    shape: students.DraftShape
    parameters: dict[str, torch.Tensor]
    borrowed: Borrowed
    feature_width: int
    refresh: Callable[[], None] | None = None
    rank_shares: RankShares | None = None

    @property
    def shares(self) -> RankShares:
        """Returns what this rank holds of the parameters, and writes to."""
        return self.rank_shares or RankShares(self.parameters)

    @property
    def device(self) -> torch.device:
        """Returns the device of the live parameters."""
        return next(iter(self.shares.live.values())).device


def live_drafter(
    worker: Any, peers: Peers = SINGLE_RANK, second_drafter: Any = None
) -> LiveDrafter:
    """Describes the drafter of this `EAGLEWorkerV2` for its student.

    peers: the ranks that share it; this is a collective, which all of them call at their start.
    second_drafter: the `DFlashDrafter` beside the engine's own, if that learns.  Only this function
    decides for which drafter an engine can learn, collect signals and take versions.  Raises
    UnsupportedDrafterError with the reason if a student would differ from this drafter.
    """
    draft = worker.draft_worker
    model = (draft.draft_runner if second_drafter is None else second_drafter.runner).model
    kind = type(model).__name__
    if second_drafter is not None and (
        failure_reason := next(filter(None, peers.all_gather(second_drafter.failure_reason)), "")
    ):
        raise students.UnsupportedDrafterError(f"it no longer drafts: {failure_reason}")
    if kind not in SUPPORTED_CLASSES:
        raise students.UnsupportedDrafterError(
            f"it is a {kind}, not one of {', '.join(SUPPORTED_CLASSES)}"
        )
    gatherer = ParameterGatherer(peers)
    if kind == DFLASH:
        dflash_drafter = draft.dflash_drafter if second_drafter is None else second_drafter
        drafter = _describe_dflash(model, draft.target_worker, dflash_drafter, gatherer)
    else:
        drafter = (
            _describe_eagle3(model, gatherer) if kind == EAGLE3 else _describe_mtp(model, gatherer)
        )
    _require_student_match(drafter)
    return replace(drafter, rank_shares=gatherer.shares(drafter.parameters))


def _describe_eagle3(model: Any, gatherer: ParameterGatherer) -> LiveDrafter:
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
    parameters = gatherer.parameters(model)
    embedding, head = parameters.pop(_EMBEDDING).detach(), None
    if not shape.own_head:
        head = _separate_head(parameters.pop(_HEAD, None), embedding)
    elif len(parameters[_HEAD]) > shape.draft_vocabulary_size:
        # SGLang pads it to a round number of rows.
        parameters[_HEAD] = parameters[_HEAD].detach()[: shape.draft_vocabulary_size]
    tokens = students.draft_tokens(model.hot_token_id, shape)
    if tokens is not None:
        # SGLang leaves the list on the host, where its loader made it.
        tokens = tokens.to(embedding.device)
    width = shape.feature_count * shape.decoder.hidden
    return LiveDrafter(shape, parameters, _trim_borrowed(shape, embedding, head, tokens), width)


def _describe_mtp(model: Any, gatherer: ParameterGatherer) -> LiveDrafter:
    shape = students.mtp_shape(model.config.to_dict())
    parameters = gatherer.parameters(model)
    embedding = parameters.pop(_EMBEDDING).detach()
    head = _separate_head(parameters.pop(_HEAD, None), embedding)
    return LiveDrafter(
        shape, parameters, _trim_borrowed(shape, embedding, head), shape.decoder.hidden
    )


def _describe_dflash(
    model: Any, target_worker: Any, dflash_drafter: Any, gatherer: ParameterGatherer
) -> LiveDrafter:
    """Describes a DFlash drafter.  dflash_drafter: its `DFlashDrafter`."""
    target = target_worker.model_runner.model
    layers: int = target_worker.model_runner.model_config.hf_text_config.num_hidden_layers
    shape = students.dflash_shape(
        model.config.to_dict(), target_layers=layers, unnamed_mask=dflash_drafter.mask_token
    )
    embedding = gatherer.weight(target.get_input_embeddings()).detach()
    head = _separate_head(gatherer.weight(target.lm_head), embedding)
    width = len(shape.feature_layers) * shape.decoder.hidden
    borrowed = _trim_borrowed(shape, embedding, head)
    return LiveDrafter(
        shape, gatherer.parameters(model), borrowed, width, dflash_drafter.refresh_fused_weights
    )


def _separate_head(head: torch.Tensor | None, embedding: torch.Tensor) -> torch.Tensor | None:
    if head is None or head.data_ptr() == embedding.data_ptr():
        return None
    return head.detach()


def _trim_borrowed(
    shape: students.DraftShape,
    embedding: torch.Tensor,
    head: torch.Tensor | None,
    tokens: torch.Tensor | None = None,
) -> Borrowed:
    """Makes `Borrowed` without the rows by which SGLang pads embeddings and heads."""
    rows = shape.decoder.vocabulary
    return Borrowed(embedding[:rows], None if head is None else head[:rows], tokens)


def _require_student_match(drafter: LiveDrafter) -> None:
    """Raises UnsupportedDrafterError unless a student has exactly the drafter's parameters."""
    drafter_shapes = {name: tuple(part.shape) for name, part in drafter.parameters.items()}
    embedding, head, tokens = drafter.borrowed
    with torch.device("meta"):
        empty = Borrowed(
            embedding.to("meta"),
            None if head is None else head.to("meta"),
            None if tokens is None else tokens.to("meta"),
        )
        student = students.make_student(drafter.shape, empty)
    student_shapes = {name: tuple(part.shape) for name, part in student.named_parameters()}
    for name in sorted(student_shapes.keys() | drafter_shapes.keys()):
        if student_shapes.get(name) != drafter_shapes.get(name):
            raise students.UnsupportedDrafterError(
                f"its {name} is {drafter_shapes.get(name, 'missing')}, a student's "
                f"{student_shapes.get(name, 'missing')}"
            )
    for name, part in drafter.parameters.items():
        if part.dtype not in _UNPACKED_DTYPES:
            raise students.UnsupportedDrafterError(
                f"its {name} is stored as {part.dtype}, which is packed"
            )


class WeightsDifferError(RuntimeError):
    """The drafter does not have the values that were written; the message names a parameter."""


class DrafterWeights:
    """Writes the weights of the serving model.

    parameters: by name.  good: a copy whose acceptance was good.  initial: the weights as loaded,
    or as another writer has set them since.  refresh: called after each write.  yields: whether
    writes do nothing after another writer has changed the weights.  The device evaluates that
    itself, so the host does not wait; `are_replaced` returns it.
    """

    initial: dict[str, torch.Tensor]
    good: dict[str, torch.Tensor]
    is_changed: bool
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
        self.adopt_served()

    def copy(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the serving weights."""
        return {name: live.detach().clone() for name, live in self.parameters.items()}

    def serve(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Writes weights in place, because graphs read that memory.

        weights: may come from another stream (a thread that reads files), and may be dropped
        afterwards.  Raises WeightsDifferError.
        """
        is_unreplaced = ~self.are_replaced() if self._yields else None
        with torch.no_grad():
            for name, live in self.parameters.items():
                new_values = weights[name]
                live.data.copy_(
                    new_values
                    if is_unreplaced is None
                    else torch.where(is_unreplaced, new_values, live.data)
                )
                protect_from_reuse(new_values)
            if is_unreplaced is None:
                self._require_written(weights)
        if self._refresh is not None:
            self._refresh()
        served = self._sample()
        self._served = (
            served if is_unreplaced is None else torch.where(is_unreplaced, served, self._served)
        )
        self.is_changed = True

    def _require_written(self, weights: Mapping[str, torch.Tensor]) -> None:
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

    def serve_initial(self) -> None:
        """Serves the first weights, as if nothing had been learnt."""
        self.serve(self.initial)
        self.good, self.is_changed = self.initial, False

    def serve_good(self) -> None:
        """Rolls back to the last good weights."""
        self.serve(self.good)
        self.is_changed = self.good is not self.initial

    def mark_good(self) -> None:
        """Marks the serving weights as good."""
        self.good = self.copy()

    def are_replaced(self) -> torch.Tensor:
        """Returns whether another writer (a weight update) has written since.

        The result is a bool [] on the weights' device.
        """
        return (self._sample() != self._served).any()

    def adopt_served(self) -> None:
        """Makes the serving weights the first ones, including those of another writer."""
        self.set_baseline()
        self._served = self._sample()

    def set_baseline(self) -> None:
        """Makes the weights that were written here the first ones.

        `are_replaced` still detects what another writer has written since.
        """
        self.initial = self.good = self.copy()
        self.is_changed = False

    def _sample(self) -> torch.Tensor:
        return sample_values(self.parameters.values())


def sample_values(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns some values of each tensor, float32; a write of whole tensors changes them."""
    parts = [tensor.detach().flatten() for tensor in tensors]
    return torch.cat(
        [part[:: max(1, len(part) // _SAMPLES_PER_PARAMETER)].float() for part in parts]
    )
