"""Describes an engine to the sidecar: the EngineSpec of a scheduler that is ready to serve.

The sizes of the loaded models are counted from their modules.  The sidecar estimates costs from
them until there is a profile.  A value that is not known exactly is left out.  A model has no shape
here if it has layers other than plain or latent attention, weights packed by quantization, or
several modalities; the sidecar then reports that its costs are guesses.  With several ranks each
holds an equal share of each model.  With data-parallel attention the shares differ, so there is no
shape.  No failure here prevents an engine from starting.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import engine_shim
from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.common.process import default_engine_id, hub_revision, processor_name
from engine_shim.sglang.api import sglang_api, versions
from engine_shim.sglang.drafters.dflash_checkpoint import block_draft_lengths
from engine_shim.sglang.drafters.row_counts import Role
from engine_shim.sglang.training.blocks import SD2_FAMILIES
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_shim.sglang.api.settings import PluginSettings
    from engine_shim.sglang.drafters.dual import DualDrafter


# The name of a DFlash drafter beside the engine's own.
DFLASH_NAME: Final = "dflash"
# The name of the prompt lookup.  A mixture's name joins those of its two drafters.
LOOKUP_NAME: Final = "ngram"

# In these, one stored number is one weight; other quantizations pack several into one.
_UNPACKED_QUANTIZATIONS = ("", "fp8")

_log = logging.getLogger(__name__)


def describe_engine(
    scheduler: Any,
    settings: PluginSettings,
    gammas: tuple[int, ...],
    *,
    can_sleep: bool,
    can_update_online: bool = False,
    can_collect: bool = False,
    can_take_versions: bool = False,
    second_drafter: DualDrafter | None = None,
    learner: int = 0,
    lost: Iterable[engine_pb2.LostCapability] = (),
) -> engine_pb2.EngineSpec:
    """Describes the engine of a scheduler after its `init_model_worker`.

    learner: index of the drafter that learns.
    """
    spec = engine_pb2.EngineSpec(
        engine_id=settings.engine_id or default_engine_id(scheduler.server_args.port),
        fingerprint=_fingerprint(scheduler),
        drafters=[_drafter(scheduler, gammas)],
        max_batch_size=scheduler.max_running_requests,
        capabilities=engine_pb2.Capabilities(
            can_sleep=can_sleep,
            can_switch_drafter=second_drafter is not None,
            can_update_online=can_update_online,
            can_collect=can_collect,
            can_take_versions=can_take_versions,
            drafters_follow=True,
            catch_up_steps=settings.sleep_positions if can_sleep else 0,
            overlap_steps=1 if scheduler.enable_overlap else 0,
        ),
        lost=lost,
    )
    runners = [scheduler.draft_worker.draft_worker.draft_runner]
    if second_drafter is not None:
        spec.drafters.add(
            name=DFLASH_NAME,
            kind=engine_pb2.DRAFTER_KIND_DFLASH,
            gammas=second_drafter.gammas,
            model=second_drafter.model_path,
            revision=hub_revision(second_drafter.model_path, second_drafter.revision),
        )
        runners.append(second_drafter.dflash_drafter.runner)
    if learner:
        spec.capabilities.learner = spec.drafters[learner].name
    set_shapes(spec, scheduler.tp_worker.model_runner, runners)
    dflash_drafters = [sglang_api.dflash_only_drafter(scheduler.draft_worker.draft_worker)]
    dflash_drafters += [] if second_drafter is None else [second_drafter.dflash_drafter]
    for drafter, dflash_drafter in zip(spec.drafters, dflash_drafters, strict=True):
        if dflash_drafter is not None and drafter.HasField("shape"):
            drafter.shape.block_size = dflash_drafter.block_size
    return spec


def learner_index(scheduler: Any, name: str, *, has_second: bool) -> int:
    """Returns the index of the drafter with this name; "" means the engine's own.

    Raises UnsupportedEngineError for another name.
    """
    names = [scheduler.server_args.speculative_algorithm.lower()]
    names += [DFLASH_NAME] if has_second else []
    if name and name not in names:
        raise UnsupportedEngineError(
            f"SPECULATION_LEARNER: {name[:64]!r} is not a drafter of this engine that can learn: "
            f"there is {' and '.join(names)}"
        )
    return names.index(name) if name else 0


def add_lookup(spec: engine_pb2.EngineSpec) -> dict[str, Role]:
    """Adds a prompt lookup, and a mixture of it with every drafter of the engine.

    Returns the role of each drafter in the description, by name and in that order.
    """
    main_drafters = list(spec.drafters)
    lengths = sorted({gamma for main in main_drafters for gamma in main.gammas if gamma})
    lookup = spec.drafters.add(name=LOOKUP_NAME, kind=engine_pb2.DRAFTER_KIND_NGRAM, gammas=lengths)
    if all(main.HasField("shape") for main in main_drafters):
        # An empty shape, which costs nothing, so that the prior knows all shapes.
        lookup.shape.bytes_per_weight = 1.0
    roles = {main.name: Role(index, is_mixed=False) for index, main in enumerate(main_drafters)}
    roles[LOOKUP_NAME] = Role(None, is_mixed=False)
    for index, main in enumerate(main_drafters):
        name = f"{main.name}+{LOOKUP_NAME}"
        spec.drafters.add(
            name=name,
            kind=engine_pb2.DRAFTER_KIND_MIXTURE,
            gammas=[gamma for gamma in main.gammas if gamma],
            mixture=engine_pb2.Mixture(main=main.name, free=LOOKUP_NAME),
        )
        roles[name] = Role(index, is_mixed=True)
    spec.capabilities.can_switch_drafter = True
    return roles


def set_batch_limits(spec: engine_pb2.EngineSpec, limits: Mapping[int, int]) -> None:
    """Adds the draft lengths that are prepared for small batches only.  limits: by gamma."""
    for drafter in spec.drafters:
        drafter.batch_limits.extend(
            engine_pb2.BatchLimit(gamma=gamma, max_batch_size=limits[gamma])
            for gamma in drafter.gammas
            if gamma in limits
        )


def _fingerprint(scheduler: Any) -> engine_pb2.Fingerprint:
    runner = scheduler.tp_worker.model_runner
    return engine_pb2.Fingerprint(
        target_model=sglang_api.config_leaf("model_path"),
        target_revision=sglang_api.config_leaf("revision") or "",
        engine="sglang",
        engine_version=versions.sglang_version(),
        device=_device_name(runner.device),
        dtype=str(runner.model_config.dtype).removeprefix("torch."),
        quantization=sglang_api.config_leaf("quantization") or "",
        tensor_parallel_size=sglang_api.config_leaf("tp_size"),
        data_parallel_size=sglang_api.data_parallel_size(),
        attention_backend=runner.decode_attention_backend_str,
        graph_batch_sizes=sglang_api.graph_batch_sizes(runner),
        shim_version=engine_shim.__version__,
    )


def _drafter(scheduler: Any, gammas: tuple[int, ...]) -> engine_pb2.Drafter:
    # The arguments keep the algorithm as the user wrote it; SGLang resolves NEXTN to EAGLE.
    algorithm: str = scheduler.server_args.speculative_algorithm
    model: str = sglang_api.config_leaf("speculative_draft_model_path") or ""
    revision: str = sglang_api.config_leaf("speculative_draft_model_revision") or ""
    dflash_drafter = sglang_api.dflash_only_drafter(scheduler.draft_worker.draft_worker)
    if dflash_drafter is not None:
        gammas = block_draft_lengths(gammas, dflash_drafter.block_size)
    return engine_pb2.Drafter(
        name=algorithm.lower(),
        kind=_drafter_kind(scheduler, has_dflash=dflash_drafter is not None),
        gammas=gammas,
        model=model,
        revision=hub_revision(model, revision),
    )


def _drafter_kind(scheduler: Any, *, has_dflash: bool) -> engine_pb2.DrafterKind.ValueType:
    if has_dflash:
        return engine_pb2.DRAFTER_KIND_DFLASH
    model = getattr(scheduler.draft_worker.draft_worker.draft_runner, "model", None)
    architectures = getattr(getattr(model, "config", None), "architectures", None) or ()
    is_sd2 = bool(SD2_FAMILIES.keys() & set(architectures))
    return engine_pb2.DRAFTER_KIND_STANDALONE if is_sd2 else engine_pb2.DRAFTER_KIND_MTP


def _device_name(device: str) -> str:
    """Names the device as the driver reports it, and a CPU as the kernel does."""
    if device == "cpu":
        return processor_name()
    from sglang.srt.utils.common import get_device_name

    name: str = get_device_name()
    return name


def set_shapes(
    spec: engine_pb2.EngineSpec, target_runner: Any, draft_runners: Sequence[Any]
) -> None:
    """Adds the shapes of target and drafters to a description, if all are known."""
    if spec.fingerprint.data_parallel_size > 1:
        _log.info("the models' shapes stay unknown to the sidecar: the ranks' shares differ")
        return
    ranks = max(1, spec.fingerprint.tensor_parallel_size)
    try:
        target = _model_shape(target_runner, ranks)
        shapes = [_drafter_shape(runner, ranks) for runner in draft_runners]
    except Exception as error:  # noqa: BLE001  # an unknown model must not stop the engine
        _log.warning("the models' shapes stay unknown to the sidecar: %r", error)
        return
    known_shapes = [shape for shape in shapes if shape is not None]
    if target is None or len(known_shapes) < len(shapes):
        return
    spec.shape.CopyFrom(target)
    for drafter, shape in zip(spec.drafters, known_shapes, strict=True):
        drafter.shape.CopyFrom(shape)


def _model_shape(runner: Any, ranks: int) -> engine_pb2.ModelShape | None:
    config = runner.model_config
    attention = _attention_shapes(runner, ranks)
    weights = _WeightCounts(runner, ranks)
    if attention is None or not weights.is_known or config.is_multimodal:
        return None
    return engine_pb2.ModelShape(
        hidden_size=config.hidden_size,
        vocabulary_size=config.vocab_size,
        attention=attention,
        dense_params=weights.dense_params,
        experts=weights.experts,
        bytes_per_weight=weights.bytes_per_weight,
        bytes_per_kv=runner.kv_cache_dtype.itemsize,
    )


def _drafter_shape(runner: Any, ranks: int) -> engine_pb2.DrafterShape | None:
    attention, weights = _attention_shapes(runner, ranks), _WeightCounts(runner, ranks)
    if attention is None or not weights.is_known:
        return None
    # A head that is borrowed from the target or tied to the embedding is read in each pass, too.
    head = weights.head_params or runner.model_config.hidden_size * runner.model_config.vocab_size
    return engine_pb2.DrafterShape(
        dense_params=weights.dense_params + head,
        experts=weights.experts,
        bytes_per_weight=weights.bytes_per_weight,
        kv_bytes_per_token=runner.kv_cache_dtype.itemsize
        * sum(map(_cached_values_per_token, attention)),
    )


class _WeightCounts:
    """Counts of a model's parameters by kind; `runner` holds one of `ranks` shares.

    is_known: whether the counts are reliable.  dense_params: all parameters but embedding, head and
    routed experts.  head_params: parameters of the LM head.
    """

    def __init__(self, runner: Any, ranks: int) -> None:
        self.dense_params = self.head_params = weight_count = weight_bytes = 0
        self.experts: engine_pb2.ExpertShape | None = None
        moe: list[Any] = []
        counted_ids: set[int] = set()
        for module in runner.model.modules():
            kinds = {base.__name__ for base in type(module).__mro__}
            parameters = [p for p in module.parameters(recurse=False) if id(p) not in counted_ids]
            counted_ids.update(map(id, parameters))
            count = ranks * sum(p.numel() for p in parameters)
            if "ParallelLMHead" in kinds:
                self.head_params += count
                continue
            if "VocabParallelEmbedding" in kinds:
                continue
            weight_count += count
            weight_bytes += ranks * sum(p.numel() * p.element_size() for p in parameters)
            if "FusedMoE" in kinds:
                moe.append(module)
            else:
                self.dense_params += count
        self.bytes_per_weight = weight_bytes / weight_count if weight_count else 0.0
        self.is_known = (
            weight_count > 0 and (runner.model_config.quantization or "") in _UNPACKED_QUANTIZATIONS
        )
        if moe:
            self.experts = _expert_shape(moe, ranks)
            self.is_known = self.is_known and self.experts is not None


def _expert_shape(layers: Sequence[Any], ranks: int) -> engine_pb2.ExpertShape | None:
    """Describes MoE layers that are all alike; returns None when they differ."""
    kinds = {
        (
            moe.num_experts - moe.num_fused_shared_experts,
            moe.top_k - moe.num_fused_shared_experts,
            moe.num_fused_shared_experts,
            ranks * sum(p.numel() for p in moe.parameters(recurse=False)) // moe.num_experts,
        )
        for moe in layers
    }
    if len(kinds) > 1:
        return None
    routed, per_token, shared, params = kinds.pop()
    return engine_pb2.ExpertShape(
        layers=len(layers),
        experts=routed,
        experts_per_token=per_token,
        shared=shared,
        params_per_expert=params,
    )


def _attention_shapes(runner: Any, ranks: int) -> list[engine_pb2.AttentionShape] | None:
    """Returns layers by kind; None if a layer caches anything but keys and values."""
    layers = {
        module.layer_id: module
        for module in runner.model.modules()
        if type(module).__name__ == "RadixAttention" and not module.is_cross_attention
    }
    config = runner.model_config
    if not layers or (len(layers) < config.num_hidden_layers and not config.is_draft_model):
        return None
    if config.attention_arch.name == "MLA":
        latent = engine_pb2.LatentAttention(
            query_heads=config.num_attention_heads,
            latent_dim=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
        )
        return [engine_pb2.AttentionShape(layers=len(layers), latent=latent)]
    layers_by_kind: dict[tuple[int, int, int], int] = {}
    for module in layers.values():
        heads = ranks * module.tp_q_head_num, ranks * module.tp_k_head_num
        kind = (*heads, module.head_dim)
        layers_by_kind[kind] = layers_by_kind.get(kind, 0) + 1
    return [
        engine_pb2.AttentionShape(
            layers=count,
            grouped_query=engine_pb2.GroupedQueryAttention(
                query_heads=query, kv_heads=kv, head_dim=dim
            ),
        )
        for (query, kv, dim), count in layers_by_kind.items()
    ]


def _cached_values_per_token(layers: engine_pb2.AttentionShape) -> int:
    """Returns the numbers that the cache holds for each context token."""
    if layers.HasField("latent"):
        return layers.layers * (layers.latent.latent_dim + layers.latent.rope_dim)
    grouped_query = layers.grouped_query
    return layers.layers * 2 * grouped_query.kv_heads * grouped_query.head_dim
