"""Run in SGLang's environment: builds SGLang's own attention backends, and measures what they keep.

    python -m tests.unit.engine_shim.sglang.backend_probe ASKED FOUND

ASKED: file with a JSON list of `Case`s.  FOUND: file for a JSON list of [built, captured] in bytes.
All of it is SGLang's own code, on tensors without storage (torch's "meta" device).  Only what is
compiled for GPUs is replaced: kernels by nothing, and FlashInfer's wrappers by stand-ins that
allocate what FlashInfer 0.7.2 allocates in their constructors.
"""

import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypedDict

import torch
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine_shim.sglang.memory import MULTIPROCESSORS

META = "meta"
MODES = {
    "VERIFY": ForwardMode.TARGET_VERIFY,
    "EXTEND": ForwardMode.DRAFT_EXTEND_V2,
    "STEP": ForwardMode.DECODE,
}


class Case(TypedDict):
    """What is to be built.  place: "STEP" are all further passes of a draft of gamma tokens."""

    model: str
    backend: str
    place: str
    gamma: int
    batches: list[int]
    context: int
    page: int
    requests: int


class OnMeta(TorchFunctionMode):
    """Puts on "meta" what SGLang puts on a GPU by name, and copies nothing off it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Changes the arguments."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = META
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and args[1:] == ("cpu",):
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)


class Kept(TorchDispatchMode):
    """Sees every tensor that is allocated on "meta"."""

    def __init__(self) -> None:
        """Sees nothing of what there is already."""
        super().__init__()
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self._foreign: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Remembers the result, if it is no view of what was there before."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == META:
            own = {_storage(seen) for seen in self._alive()}
            viewed = {_storage(arg) for arg in args if isinstance(arg, torch.Tensor)}
            if _storage(result) in own or _storage(result) not in viewed:
                self._seen.append(weakref.ref(result))
        return result

    def bytes(self) -> int:
        """Bytes of all objects that are still referenced."""
        gc.collect()
        return sum({_storage(t): t.untyped_storage().nbytes() for t in self._alive()}.values())

    def _alive(self) -> list[torch.Tensor]:
        tensors = (seen() for seen in self._seen)
        return [tensor for tensor in tensors if tensor is not None]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Ragged:
    """Stands for FlashInfer's wrappers for ragged prefill and for decoding."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Allocates the integer workspace."""
        self.integers = torch.empty(8 * 2**20, dtype=torch.uint8, device=META)


class Paged(Ragged):
    """Stands for FlashInfer's wrapper for paged prefill."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Allocates the lengths, too."""
        super().__init__()
        self.lengths = torch.empty(32768, dtype=torch.int32, device=META)


class Latent:
    """Stands for FlashInfer's wrapper for latent attention, which allocates when it plans."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Allocates nothing."""


class Pool:
    """A KV pool, as far as a backend reads it while it is built.  value_size: as it has them."""

    start_layer = 0

    def __init__(self, value_size: int) -> None:
        """Takes what tells models apart."""
        self._value = torch.empty(1, 1, value_size)

    def get_kv_cache_quant_method(self) -> Any:
        """A cache that is not quantized."""
        access = SimpleNamespace(kind="plain", scale_recipe=None)
        return SimpleNamespace(resolve_attention_access=lambda *_: access, name="none")

    def get_value_buffer(self, _: int) -> torch.Tensor:
        """One value."""
        return self._value


def replace_kernels() -> None:
    """Has SGLang find what it needs of FlashInfer, of the kernels' packages and of a card."""
    for name in ("sgl_kernel.flash_attn", "flash_mla", "flash_mla.flash_mla_interface"):
        module: Any = ModuleType(name)
        module.__getattr__ = lambda _: None
        sys.modules[name] = module
    from sglang.srt.layers.attention import (
        attention_registry,
        flashattention_backend,
        flashinfer_backend,
        flashinfer_mla_backend,
        triton_backend,
        trtllm_mla_backend,
    )
    from sglang.srt.speculative import eagle_utils

    wrappers = {
        "BatchPrefillWithPagedKVCacheWrapper": Paged,
        "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
        "BatchDecodeWithPagedKVCacheWrapper": Ragged,
        "BatchMLAPagedAttentionWrapper": Latent,
    }
    # As FlashInfer 0.7.2 has them, in `flashinfer/utils.py`.
    utils = SimpleNamespace(
        get_device_sm_count=lambda _: MULTIPROCESSORS,
        get_trtllm_gen_multi_ctas_kv_counter_bytes=lambda rows, heads, sms: (
            (max(rows * heads, sms) + 7) // 8 * 8 * 4
        ),
    )
    card = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    replaced: dict[Any, dict[str, Any]] = {
        flashinfer_backend: wrappers,
        flashinfer_mla_backend: wrappers,
        trtllm_mla_backend: {
            "_jit_fixup_module": lambda _: None,
            "flashinfer": SimpleNamespace(utils=utils),
        },
        triton_backend: {"get_device_core_count": lambda _: MULTIPROCESSORS},
        flashattention_backend: {"get_device_capability": lambda: (9, 0)},
        attention_registry: {"get_device_capability": lambda: (9, 0)},
        eagle_utils: {"_is_cpu": False},
        torch.cuda: {
            "get_device_capability": lambda *_: (10, 0),
            "get_device_properties": lambda *_: card,
        },
    }
    for place, names in replaced.items():
        for name, value in names.items():
            setattr(place, name, value)


def runner(case: Case, *, drafts: bool) -> Any:
    """A `ModelRunner`, as far as backends read it while they are built."""
    config = ModelConfig(case["model"], context_length=case["context"])
    latent = config.attention_arch == AttentionArch.MLA
    return SimpleNamespace(
        model_config=config,
        device=META,
        gpu_id=0,
        dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        page_size=case["page"],
        is_draft_worker=drafts,
        draft_attention_backend=None,
        use_mla_backend=latent,
        sliding_window_size=None,
        # As for every draft length but the first: `EAGLEWorkerV2.build_adaptive_runtime_state`.
        init_new_workspace=not drafts,
        max_running_requests=case["requests"],
        prefill_attention_backend_str=case["backend"],
        decode_attention_backend_str=case["backend"],
        spec_algorithm=SimpleNamespace(is_dspark=bool, is_frozen_kv_mtp=bool),
        server_args=get_context().server_args,
        token_to_kv_pool=Pool(config.kv_lora_rank if latent else config.v_head_dim),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
        req_to_token_pool=SimpleNamespace(
            size=case["requests"],
            req_to_token=torch.zeros(1, case["context"], dtype=torch.int32, device=META),
        ),
        kv_index_translator=SimpleNamespace(is_translating=False),
        model=torch.nn.Module(),
        decode_num_tokens_per_req=lambda: case["gamma"] + 1,
    )


def measured(case: Case) -> tuple[int, int]:
    """Builds one backend, or those of a draft's passes, as SGLang does.

    Returns the bytes that were built, and those that captures add.
    """
    gamma, batches, place = case["gamma"], case["batches"], case["place"]
    # What the engine's first backend leaves to be shared.
    ATTENTION_BACKENDS[case["backend"]](runner(case, drafts=False))
    model_runner = runner(case, drafts=place != "VERIFY")
    factory = DraftBackendFactory(model_runner, 1, gamma)
    make = {
        "VERIFY": lambda: ATTENTION_BACKENDS[case["backend"]](model_runner),
        "EXTEND": factory.create_draft_extend_backend,
        "STEP": factory.create_decode_backend,
    }[place]
    width = 1 if place == "STEP" else gamma + 1
    with Kept() as kept:
        attention_backend = make()
        built = kept.bytes()
        attention_backend.init_cuda_graph_state(max(batches), max(batches) * width)
        if case["backend"] == "flashinfer" and not model_runner.use_mla_backend:
            for part in getattr(attention_backend, "attn_backends", [attention_backend]):
                for size in batches:
                    part._prepare_cuda_graph_metadata(size, size * width, MODES[place], None)
        return built, kept.bytes() - built


def main() -> None:
    """Measures every case."""
    replace_kernels()
    asked, answers = map(Path, sys.argv[1:])
    results = []
    for case in json.loads(asked.read_text()):
        fields = {
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": case["gamma"],
            "speculative_num_draft_tokens": case["gamma"] + 1,
            "speculative_eagle_topk": 1,
            "attention_backend": case["backend"],
            "page_size": case["page"],
        }
        ranks = {"attn_tp_size": 1, "attn_tp_rank": 0, "attn_dcp_size": 1, "attn_dcp_rank": 0}
        with (
            get_context().override_server_args(**fields),
            get_parallel().override(**ranks),
            OnMeta(),
        ):
            results.append(measured(case))
    answers.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
