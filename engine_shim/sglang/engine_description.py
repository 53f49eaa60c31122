"""Describes an engine to the sidecar: the EngineSpec of a scheduler that is ready to serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import engine_shim
from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.common.naming import default_engine_id, processor_name, revision_of
from engine_shim.sglang.api import sglang_api, versions
from engine_shim.sglang.drafters.dflash_checkpoint import lengths_of_block
from engine_shim.sglang.drafters.row_counts import Role
from engine_shim.sglang.model_shape import set_shapes
from engine_shim.sglang.training.sd2 import STEERED
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine_shim.sglang.api.settings import PluginSettings
    from engine_shim.sglang.drafters.dual import DualDrafter

# The name of a DFlash drafter beside the engine's own.
DFLASH_NAME: Final = "dflash"
# Of a prompt lookup.  A mixture is called after both of its drafters.
LOOKUP_NAME: Final = "ngram"


def introduce(
    scheduler: Any,
    settings: PluginSettings,
    gammas: tuple[int, ...],
    *,
    can_sleep: bool,
    can_update_online: bool = False,
    can_collect: bool = False,
    can_take_versions: bool = False,
    second: DualDrafter | None = None,
    learner: int = 0,
    lost: Iterable[engine_pb2.LostCapability] = (),
) -> engine_pb2.EngineSpec:
    """Describes the engine of a scheduler after its `init_model_worker`.

    learner: place of the drafter that learns.
    """
    spec = engine_pb2.EngineSpec(
        engine_id=settings.engine_id or default_engine_id(scheduler.server_args.port),
        fingerprint=_fingerprint(scheduler),
        drafters=[_drafter(scheduler, gammas)],
        max_batch_size=scheduler.max_running_requests,
        capabilities=engine_pb2.Capabilities(
            can_sleep=can_sleep,
            can_switch_drafter=second is not None,
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
    if second is not None:
        spec.drafters.add(
            name=DFLASH_NAME,
            kind=engine_pb2.DRAFTER_KIND_DFLASH,
            gammas=second.gammas,
            model=second.model_path,
            revision=revision_of(second.model_path, second.revision),
        )
        runners.append(second.block.runner)
    if learner:
        spec.capabilities.learner = spec.drafters[learner].name
    set_shapes(spec, scheduler.tp_worker.model_runner, runners)
    blocks = [sglang_api.dflash_only(scheduler.draft_worker.draft_worker)]
    blocks += [] if second is None else [second.block]
    for drafter, block in zip(spec.drafters, blocks, strict=True):
        if block is not None and drafter.HasField("shape"):
            drafter.shape.block_size = block.block_size
    return spec


def learner_of(scheduler: Any, name: str, *, has_second: bool) -> int:
    """Returns the place of the drafter with this name, of which "" is the engine's own.

    Raises UnsupportedEngineError for another name.
    """
    names = [scheduler.server_args.speculative_algorithm.lower()]
    names += [DFLASH_NAME] if has_second else []
    if name and name not in names:
        raise UnsupportedEngineError(
            f"SPECULATION_LEARNER: {name[:64]!r} is no drafter of this engine that could learn: "
            f"there is {' and '.join(names)}"
        )
    return names.index(name) if name else 0


def add_lookup(spec: engine_pb2.EngineSpec) -> dict[str, Role]:
    """Adds a prompt lookup, and a mixture of it with every drafter of the engine.

    Returns what each drafter of the introduction drafts with, by its name and in its order.
    """
    mains = list(spec.drafters)
    lengths = sorted({gamma for main in mains for gamma in main.gammas if gamma})
    lookup = spec.drafters.add(name=LOOKUP_NAME, kind=engine_pb2.DRAFTER_KIND_NGRAM, gammas=lengths)
    if all(main.HasField("shape") for main in mains):
        lookup.shape.bytes_per_weight = 1.0
    roles = {main.name: Role(index, is_mixed=False) for index, main in enumerate(mains)}
    roles[LOOKUP_NAME] = Role(None, is_mixed=False)
    for index, main in enumerate(mains):
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
    block = sglang_api.dflash_only(scheduler.draft_worker.draft_worker)
    if block is not None:
        gammas = lengths_of_block(gammas, block.block_size)
    return engine_pb2.Drafter(
        name=algorithm.lower(),
        kind=_kind(scheduler, has_block=block is not None),
        gammas=gammas,
        model=model,
        revision=revision_of(model, revision),
    )


def _kind(scheduler: Any, *, has_block: bool) -> engine_pb2.DrafterKind.ValueType:
    if has_block:
        return engine_pb2.DRAFTER_KIND_DFLASH
    model = getattr(scheduler.draft_worker.draft_worker.draft_runner, "model", None)
    architectures = getattr(getattr(model, "config", None), "architectures", None) or ()
    is_sd2 = bool(STEERED.keys() & set(architectures))
    return engine_pb2.DRAFTER_KIND_STANDALONE if is_sd2 else engine_pb2.DRAFTER_KIND_MTP


def _device_name(device: str) -> str:
    """Names the device as the driver reports it, and a CPU as the kernel does."""
    if device == "cpu":
        return processor_name()
    from sglang.srt.utils.common import get_device_name

    name: str = get_device_name()
    return name
