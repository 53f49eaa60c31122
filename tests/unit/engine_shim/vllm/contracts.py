"""What the plugin reads and writes of vLLM's objects."""

from collections.abc import Mapping
from typing import Final

from engine_shim.vllm import vllm_api

# Fields of a dataclass, names that its methods assign, methods and properties.
FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "vllm.v1.core.sched.output.SchedulerOutput": frozenset({
        "num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens",
        "finished_req_ids", "preempted_req_ids", "num_spec_tokens_to_schedule",
    }),
    "vllm.v1.outputs.ModelRunnerOutput": frozenset({"sampled_token_ids", "req_id_to_index"}),
    "vllm.v1.outputs.DraftTokenIds": frozenset({"req_ids", "draft_token_ids"}),
    "vllm.v1.request.Request": frozenset({
        "num_computed_tokens", "num_tokens", "num_output_tokens", "num_output_placeholders",
        "spec_token_ids", "is_prefill_chunk", "is_finished", "use_structured_output",
        "sampling_params", "request_id",
    }),
    "vllm.sampling_params.SamplingParams": frozenset({"extra_args"}),
    "vllm.config.speculative.SpeculativeConfig": frozenset({
        "method", "model", "revision", "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size", "draft_model_config", "parallel_drafting",
    }),
    vllm_api.CONFIG: frozenset({"use_v2_model_runner"}),
    vllm_api.SCHEDULER: frozenset({"kv_cache_config", "dynamic_sd_lookup"}),
    "vllm.config.model.ModelConfig": frozenset({
        "is_hybrid", "is_attention_free", "has_inner_state",
    }),
    "vllm.v1.kv_cache_interface.KVCacheConfig": frozenset({"kv_cache_groups"}),
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": frozenset({"kv_cache_spec"}),
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": frozenset({"kv_cache_specs"}),
    # Base of the caches of recurrent layers.
    "vllm.v1.kv_cache_interface.MambaSpec": frozenset({"shapes"}),
}  # fmt: skip
