"""Collects what is specific to SGLang: the names the plugin hooks, and the facts it reads.

All other modules of this package access SGLang through this module, or through attributes that the
contract tests check for each version of `versions.TESTED`.  To support a new SGLang version, run
those tests on it, and write the differences into a module of `versions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from engine_shim.common.checks import Check, make_check
from engine_shim.sglang.api import versions

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_version_api: Any = versions.module_for(versions.sglang_version())

# Algorithms as users write them; NEXTN is an alias of EAGLE once SGLang has resolved it.
ALGORITHMS: Final = ("EAGLE", "EAGLE3", "NEXTN", "DFLASH")
# The algorithm whose engine verifies chains of any length for a drafter that reads hidden states.
CHAIN_ALGORITHM: Final = "EAGLE"
# SGLang's default of the draft length with which adaptive speculation starts.
DEFAULT_GAMMA: Final = 3
# SGLang's default limit of concurrent requests in an engine that speculates.
DEFAULT_MAX_REQUESTS: Final = 48
# Up to this number of requests, a decode server has slots for twice as many further ones.
_FEW_REQUESTS: Final = 32
# Begins the errors of an engine that starts.
_ERROR_LEAD: Final = "SPECULATION_SIDECAR is set, but "
# The largest page size by which SGLang may still replace the configured one.
_MAX_PAGE_TOKENS: Final = 128

_PARAMS: Final = "sglang.srt.speculative.adaptive_spec_params"
_EAGLE: Final = "sglang.srt.speculative.eagle_worker_v2"

# Hooked in every process that resolves or uses the configuration.
CANDIDATE_STEPS: Final = f"{_PARAMS}.resolve_candidate_steps_from_config"
POLICY_CLASS: Final = f"{_PARAMS}.AdaptiveSpeculativeParams"
# MiB that SGLang leaves free for graphs when it chooses the share of memory for its KV cache.
RESERVE_FOR_GRAPHS: Final = "sglang.srt.arg_groups.memory_hook.reserve_for_graph_mb"
# Hooked in the scheduler's process only.
SCHEDULER_MODULE: Final = "sglang.srt.managers.scheduler"
INIT_MODEL_WORKER: Final = f"{SCHEDULER_MODULE}.Scheduler.init_model_worker"
# Requests that rank 0 adds to its broadcast, and what every rank does with each kind.
POLL_TIMEOUT_ABORTS: Final = f"{SCHEDULER_MODULE}.Scheduler._poll_timeout_aborts"
INIT_REQUEST_DISPATCHER: Final = f"{SCHEDULER_MODULE}.Scheduler.init_request_dispatcher"
FORWARD: Final = f"{_EAGLE}.EAGLEWorkerV2.forward_batch_generation"
APPLY_RUNTIME_STATE: Final = f"{_EAGLE}.EAGLEWorkerV2.apply_runtime_state"
INIT_GRAPHS: Final = f"{_EAGLE}.EAGLEWorkerV2.init_cuda_graphs"
BUILD_STATE: Final = f"{_EAGLE}.EAGLEWorkerV2.build_adaptive_runtime_state"
DRAFT_EXTEND: Final = f"{_EAGLE}.EagleDraftWorker._draft_extend_for_decode"
DRAFT: Final = f"{_EAGLE}.EagleDraftWorker.draft"
# Copies a step's results to the host.
COPY_RESULT: Final = "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu"
# Hooked if DFlash is the only drafter.
DRAFT_WORKER: Final = f"{_EAGLE}.EagleDraftWorker"
# Hooked with a second drafter.
DRAFT_CONSTRUCT: Final = f"{_EAGLE}.EagleDraftWorker.__init__"
DRAFT_MEMORY: Final = f"{_EAGLE}.EagleDraftWorker.alloc_memory_pool"
DRAFT_BACKENDS: Final = f"{_EAGLE}.EagleDraftWorker.init_attention_backends"
DRAFT_GRAPHS: Final = f"{_EAGLE}.EagleDraftWorker.init_cuda_graphs"
DRAFT_PREFILL: Final = f"{_EAGLE}.EagleDraftWorker._draft_extend_for_prefill"
_RUNNER: Final = "sglang.srt.model_executor.model_runner"
RESOLVE_CAPTURE: Final = f"{_RUNNER}.resolve_spec_aux_hidden_state_config"
CONFIGURE_CAPTURE: Final = f"{_RUNNER}.configure_aux_hidden_state_capture"
RESOLVE_HIDDEN_SIZE: Final = "sglang.srt.configs.model_config.resolve_spec_hidden_size"
STORE_HIDDEN: Final = (
    "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store"
)
RESOLVE_TOKENS: Final = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens"
)
PROCESS_DECODE_RESULT: Final = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor.process_batch_result_decode"
)
INTERNAL_STATE: Final[str] = _version_api.INTERNAL_STATE
# The hooks around a step of an engine that is ready to serve.
STEP_TARGETS: Final = (
    FORWARD, DRAFT, DRAFT_EXTEND, RESOLVE_TOKENS, PROCESS_DECODE_RESULT, INTERNAL_STATE,
    POLL_TIMEOUT_ABORTS,
    INIT_REQUEST_DISPATCHER,
)  # fmt: skip
# The step of SGLang's configuration pipeline that settles speculation.
RESOLUTION_STEP: Final = "handle_speculative_decoding"

# Source of the log entry that SGLang's own runtime switch writes.
SWITCH_SOURCE: Final = "adaptive_spec.restore"
# If it is set, SGLang skips the draft-extend of every step at gamma 0 and stores nothing of it.
SKIP_VARIABLE: Final = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"


# Returns the state that a call of INTERNAL_STATE has filled in.
internal_state: Final[Callable[[Any, tuple[Any, ...]], dict[str, Any]]] = (
    _version_api.internal_state
)
# The ranks' scope of an `EagleDraftWorker`, for passes of its model.
draft_scope: Final[Callable[[Any], AbstractContextManager[Any]]] = _version_api.draft_scope
# Gives a target this `ModelConfig` as its drafter's, inside the block.
override_draft_config: Final[Callable[[Any, Any], AbstractContextManager[None]]] = (
    _version_api.override_draft_config
)
# Gives a draft worker the rank layout of a `DFlashWorkerV2`.
match_memory_layout: Final[Callable[[Any, Any], None]] = _version_api.match_memory_layout


def resolving_args(args: ServerArgs) -> Any:
    """Returns SGLang's view of its arguments while it resolves them."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(args)


def resolved_args(args: ServerArgs) -> Any:
    """Returns SGLang's view of arguments that it has resolved."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(args)


def draft_moe_scopes() -> tuple[AbstractContextManager[Any], ...]:
    """Returns the scopes in which SGLang runs a drafter's experts."""
    from sglang.srt.layers.moe import utils

    return utils.speculative_moe_backend_context(), utils.speculative_moe_a2a_backend_context()


@contextmanager
def draft_pass(draft: Any) -> Iterator[None]:
    """Enters the scopes that SGLang uses around a pass of an `EagleDraftWorker`'s model."""
    with ExitStack() as stack:
        for scope in (draft_scope(draft), *draft_moe_scopes()):
            stack.enter_context(scope)
        yield


def flag_checks(args: ServerArgs) -> tuple[Check, ...]:
    """Checks the flags that decide how an engine runs.

    Reads what SGLang has resolved so far; must run after its speculation step.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend

    view = resolved_args(args)
    graphs = view.cuda_graph_config
    prefill_graphs = None if graphs is None else graphs.prefill.backend
    has_lora = bool(view.enable_lora or (view.enable_lora is None and view.lora_paths))
    has_attention_dp = _version_api.has_attention_dp(view)
    return (
        _flag_check(
            "pipeline parallelism",
            view.pp_size,
            f"--pipeline-parallel-size {view.pp_size}: only 1 is supported; share the model with "
            "--tensor-parallel-size instead",
            view.pp_size != 1,
        ),
        _flag_check(
            "data parallelism",
            f"{view.dp_size}, of attention" if has_attention_dp else view.dp_size,
            f"--data-parallel-size {view.dp_size}: only 1 is supported; run one server each",
            view.dp_size != 1 and not has_attention_dp,
        ),
        _flag_check(
            "context parallelism",
            view.attn_cp_size,
            "context-parallel attention is not supported; leave it out",
            view.attn_cp_size != 1,
        ),
        _flag_check(
            "disaggregation",
            "none" if view.disaggregation_mode == "null" else view.disaggregation_mode,
            "a prefill-only server never drafts: leave SPECULATION_SIDECAR unset there",
            view.disaggregation_mode == "prefill",
        ),
        # These graphs are captured with the attention backend of the first draft length, and a
        # change of the draft length gives the target another backend.
        _flag_check(
            "prefill graphs",
            prefill_graphs or "not settled",
            "--cuda-graph-backend-prefill is full: these graphs belong to one draft length, and "
            "the first prefill after a change of it would fail; breakable or disabled is needed",
            prefill_graphs == Backend.FULL,
        ),
        # SGLang itself would refuse later, and would name --speculative-adaptive, which the user
        # has not set.  It builds LoRA's metadata for graphs for one draft length only.
        _flag_check(
            "adapters",
            "LoRA" if has_lora else "none",
            "LoRA is on (--enable-lora, --lora-paths): SGLang prepares adapters for one draft "
            "length only; serve without adapters, or unset SPECULATION_SIDECAR",
            has_lora,
        ),
    )


def sglang_conditions_check(args: ServerArgs) -> Check:
    """Checks SGLang's own conditions for an engine whose draft length changes.

    Must run after the speculation step.
    """
    from sglang.srt.speculative.adaptive_spec_params import adaptive_unsupported_reason

    reason: str | None = adaptive_unsupported_reason(args)
    return Check(
        "SGLang's own conditions", "met" if reason is None else "not met", reason or "", _ERROR_LEAD
    )


def _flag_check(topic: str, value: object, obstacle: str, is_obstacle: object) -> Check:
    return make_check(topic, value, {obstacle: is_obstacle}, _ERROR_LEAD)


def dflash_options_check(args: ServerArgs) -> Check:
    """Checks the options that prevent steering an engine with a DFlash drafter.

    Must run after the speculation step and after the other checks.
    """
    view = resolved_args(args)
    obstacles = {
        "--enable-hierarchical-cache does not back up its cache; leave it out": (
            view.enable_hierarchical_cache
        ),
        "--disaggregation-mode does not hand over its cache; use another drafter": (
            view.disaggregation_mode != "null"
        ),
        "--speculative-use-rejection-sampling needs the distribution it drafts from; leave that "
        "option out": view.speculative_use_rejection_sampling,
    }
    return make_check(
        "options beside DFlash",
        "conflict" if any(obstacles.values()) else "fit",
        obstacles,
        "a DFlash drafter cannot be steered: ",
    )


def lora_adapters(model_runner: Any) -> Mapping[str, Any]:
    """Returns the live mapping from adapter id to the `LoRARef` of each adapter of a target."""
    lora_refs: Mapping[str, Any] = getattr(
        getattr(model_runner, "lora_manager", None), "lora_refs", {}
    )
    return lora_refs


def copy_to_host(tensor: Any) -> Any:
    """Copies a tensor to the host like SGLang's step results: without waiting for the device."""
    from sglang.srt.utils.common import async_d2h

    return async_d2h(tensor)


def is_dflash_only(config: Any) -> bool:
    """Whether DFlash is an engine's only drafter, by its arguments as the user wrote them."""
    return (config.speculative_algorithm or "").upper() == "DFLASH"


def dflash_only_drafter(draft: Any) -> Any | None:
    """Returns the `DFlashDrafter` of a draft worker that has no other drafter, else None."""
    return getattr(draft, "dflash_drafter", None)


def config_leaf(name: str) -> Any:
    """Returns a resolved configuration value of this process, by its flat name."""
    from sglang.srt.runtime_context import get_context

    return get_context().config_leaf(name)


def data_parallel_size() -> int:
    """Returns the number of batches that the engine of this process runs in parallel."""
    batch_count: int = config_leaf("dp_size")
    return (
        batch_count * config_leaf("attn_dp_size")
        if _version_api.STEERS_ATTENTION_DP
        else batch_count
    )


def max_step_tokens() -> int:
    """Returns the tokens of one sequence in a step for which SGLang has sized its buffers."""
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens

    return max_speculative_num_draft_tokens() or 0


def max_requests(view: Any) -> int:
    """Returns the most requests that an engine that speculates runs at once.

    view: its arguments.
    """
    return view.max_running_requests or DEFAULT_MAX_REQUESTS


def max_request_rows(view: Any) -> int:
    """Returns the most rows that SGLang's request pool will have; view: the engine's arguments."""
    requests = max_requests(view)
    if view.disaggregation_mode != "decode":
        return requests + 1
    # For requests that the prefill server is still sending.  SGLang resolves the number after it
    # has sized its memory.
    extra_slots = view.disaggregation_decode_extra_slots
    if extra_slots is None:
        extra_slots = 2 * requests if requests <= _FEW_REQUESTS else 0
    return int(requests + extra_slots + 1)


def max_row_tokens(view: Any, context: int, step_tokens: int) -> int:
    """Returns the most tokens for which a row of the request pool has room, one step included.

    context: longest context in tokens.  step_tokens: tokens of one sequence in a step.  Follows
    SGLang's `get_req_to_token_extra_context_len`.
    """
    page_tokens = max(view.page_size or 1, _MAX_PAGE_TOKENS)
    return context + max(4 + step_tokens, 2 * step_tokens + page_tokens - 1) + step_tokens


def captured_batch_sizes(args: ServerArgs) -> tuple[int, ...]:
    """Returns the batch sizes for which decode graphs will be captured, ascending; () for none.

    Follows SGLang's `get_batch_sizes_to_capture` for an engine without data parallelism.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend

    view = resolving_args(args)
    decode = view.cuda_graph_config.decode
    if decode.backend == Backend.DISABLED:
        return ()
    sizes, request_limit = set(decode.bs or [decode.max_bs]), max_requests(view)
    if max(sizes) > request_limit:
        sizes.add(request_limit)
    return tuple(sorted(size for size in sizes if size <= request_limit))


def decode_graphs() -> Any:
    """Returns the `PhaseConfig` of this process that captures of decode graphs read."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().graph.cuda_graph_config.decode


def graph_batch_sizes(model_runner: Any) -> tuple[int, ...]:
    """Returns the batch sizes with a captured decode graph, ascending; () without graphs."""
    return tuple(sorted(getattr(model_runner.decode_cuda_graph_runner, "capture_bs", None) or ()))
