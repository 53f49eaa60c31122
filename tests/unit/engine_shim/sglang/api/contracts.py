"""What the plugin relies on in SGLang: see test_contract.py."""

from engine_shim.sglang.api import attention_dp, sglang_api

EAGLE = "sglang.srt.speculative.eagle_worker_v2"
DRAFT_BASE = "sglang.srt.speculative.base_spec_worker.EagleDraftWorkerBase"
ADAPTIVE = "sglang.srt.speculative.adaptive_runtime_state"
DFLASH = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
COMPONENTS = "sglang.srt.model_executor.model_runner_components"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
GATHER = "sglang.srt.managers.scheduler_components.dp_attn"
LAYERS = "sglang.srt.layers"
INTERNAL = "sglang.srt.managers.scheduler_components.internal_state"
HOOKS = {
    sglang_api.CANDIDATE_STEPS: "cfg_path=None",
    sglang_api.RESERVE_FOR_GRAPHS: "server_args",
    sglang_api.INIT_MODEL_WORKER: "self",
    sglang_api.POLL_TIMEOUT_ABORTS: "self",
    sglang_api.INIT_REQUEST_DISPATCHER: "self",
    sglang_api.FORWARD: (
        "self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None"
    ),
    sglang_api.APPLY_RUNTIME_STATE: "self, state",
    sglang_api.DRAFT_EXTEND: "self, batch, batch_result, *, kv_loc_plan=None",
    sglang_api.DRAFT: "self, batch, *, with_topology=False",
    sglang_api.DRAFT_CONSTRUCT: "self, server_args, gpu_id, nccl_port, target_worker",
    sglang_api.DRAFT_MEMORY: (
        "self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None"
    ),
    sglang_api.DRAFT_BACKENDS: "self",
    sglang_api.DRAFT_GRAPHS: "self",
    sglang_api.DRAFT_PREFILL: (
        "self, batch, target_hidden_states, next_token_ids, mm_input_embeds=None, kv_loc_plan=None"
    ),
    sglang_api.STORE_HIDDEN: (
        "self, hidden_states, hidden_states_before_norm, aux_hidden_states, pruned_states, "
        "pruned_states_before_norm, aux_pruned_states, sample_indices, logits_metadata"
    ),
    sglang_api.RESOLVE_HIDDEN_SIZE: "hf_config, hidden_size, hc_mult",
    sglang_api.RESOLVE_TOKENS: "self, result, batch",
    sglang_api.PROCESS_DECODE_RESULT: "self, batch, result",
    sglang_api.INIT_GRAPHS: "self",
    attention_dp.ADAPTIVE_UNSUPPORTED_REASON: "server_args",
    attention_dp.PULL_RAW_REQUESTS: "self",
    attention_dp.UPDATE_GATHER_BATCH: (
        "batch, mlp_sync_info, require_mlp_tp_gather, draft_require_mlp_tp_gather=None, "
        "skip_global_metadata=False"
    ),
}
INTERNAL_STATE = {
    "0.5.22": (f"{INTERNAL}.SchedulerInternalStateController._add_speculative", "self, state"),
    "0.5.23": (f"{INTERNAL}.SchedulerInternalStateController._add_speculative", "self, state"),
    "0.5.21": ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", "self, recv_req"),
}
USED = {
    f"{sglang_api.POLICY_CLASS}.__init__": "self, initial_steps, cfg_path=None",
    f"{COMPONENTS}.spec_aux_hidden_state.resolve_spec_aux_hidden_state_config": (
        "*, server_args, model_config, spec_algorithm, is_draft_worker"
    ),
    f"{COMPONENTS}.attention_backend_setup.configure_aux_hidden_state_capture": (
        "*, model, eagle_use_aux_hidden_state, eagle_aux_hidden_state_layer_ids, "
        "dflash_use_aux_hidden_state, dflash_target_layer_ids, is_dspark"
    ),
    "sglang.srt.speculative.eagle_worker_common.build_eagle_verify_input": (
        "batch, draft_input, parent_list, top_scores_index, draft_tokens, draft_probs, *, "
        "target_worker, topk, num_steps, num_draft_tokens, tree_mask_mode, device"
    ),
    "sglang.srt.speculative.eagle_utils.default_tree_mask_mode": "",
    "sglang.srt.speculative.draft_worker_common.make_draft_input_v2": (
        "*, bonus_tokens, new_seq_lens"
    ),
    "sglang.srt.speculative.dflash_utils.parse_dflash_draft_config": "*, draft_hf_config",
    f"{DFLASH}._append_target_hidden_to_draft_kv_by_loc": (
        "self, *, target_hidden, cache_loc, positions, cache_loc_2d=None, commit_lens=None, "
        "extend_lens=None"
    ),
    f"{DFLASH}._draft_write_ids": "self, plan",
    "sglang.srt.plugins.hook_registry.HookRegistry.register": (
        "cls, target, hook, hook_type=HookType.AFTER, *, source=None"
    ),
    "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks": "cls",
    "sglang.srt.plugins.hook_registry.HookRegistry._apply_target": "cls, target, hooks",
    "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook": "name",
    "sglang.srt.arg_groups.overrides.declare_resolution": "server_args, source, **fields",
    "sglang.srt.runtime_context.attn_dp_enabled_of": "cfg",
    "sglang.srt.runtime_context.max_speculative_num_draft_tokens": "",
    "sglang.srt.runtime_context.RuntimeContext.config_leaf": "self, name",
    "sglang.srt.runtime_context.RuntimeContext.override": "self, source, **fields",
    "sglang.srt.runtime_context._ConfigBag._set": "self, name, value",
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_decode": "self",
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_draft_extend_v2": "self",
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": (
        "self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None, "
        "reinit_attn_backend=False, split_forward_count=1"
    ),
    "sglang.srt.managers.tp_worker.TpModelWorker.init_cuda_graphs": (
        "self, capture_decode_cuda_graph=True"
    ),
    f"{EAGLE}.EAGLEWorkerV2._stub_skipped_draft_extend": "self, batch, batch_output",
    f"{DRAFT_BASE}._rebuild_topk1_chain_buffers": "self",
    "sglang.srt.runtime_context.get_parallel": "",
    "sglang.utils.TypeBasedDispatcher.__iadd__": "self, other",
    "sglang.srt.speculative.spec_utils.draft_tp_context": "layout",
    "sglang.srt.layers.moe.utils.speculative_moe_backend_context": "",
    "sglang.srt.layers.moe.utils.speculative_moe_a2a_backend_context": "",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (
        "cls, batch, model_runner, *, capture_hidden_mode=None, return_hidden_states_before_norm, "
        "extend_position_info=None, spec_mrope_positions=None, kv_loc_plan=None, write_cols=None"
    ),
}
# Written again in the plugin, or relied on step by step: any change of their code counts.
SAME_CODE = {
    "sglang.kernels.ops.speculative.fused_kv_materialize.FusedKVMaterializeHelper.__init__": (
        "dab1916a9495434d",
        "fused_keys.refresh makes the same of weights that have changed",
    ),
    sglang_api.APPLY_RUNTIME_STATE: (
        "be794e7bda48639a",
        "switch.RuntimeSwitch does the same without the log",
    ),
    f"{EAGLE}.EAGLEWorkerV2._stub_skipped_draft_extend": (
        "025c1afc9b2f72ef",
        "what a slept step hands to the next one",
    ),
    f"{DRAFT_BASE}._rebuild_topk1_chain_buffers": (
        "0e406dcd998a5a2b",
        "switch.RuntimeSwitch keeps what it builds",
    ),
    f"{ADAPTIVE}.AdaptiveController": ("d13b6da7c8c51a24", "asks the policy"),
    f"{ADAPTIVE}.AdaptiveSpecPolicy": ("03a153e2b0cd5d73", "policy.SteeredPolicy"),
    f"{EAGLE}.EagleDraftWorker._draft_extend_for_prefill": (
        "4dd19e13911fcc3b",
        "sleep._read catches up like it",
    ),
    sglang_api.DRAFT_EXTEND: ("9a3516355f7badd6", "sleep stands in for it"),
    f"{DFLASH}.forward_batch_generation": (
        "4c408bd514470acd",
        "block_drafter runs its drafting half, and stops it where it verifies",
    ),
    f"{DFLASH}._defer_target_verify_gather": ("3d0a49f10877356b", "block_drafter leaves it out"),
    f"{DFLASH}._maybe_merge_trained_mask_embedding": (
        "82c9d6cd53618400",
        "block_drafter refuses what it would do",
    ),
    f"{sglang_api.SCHEDULER_MODULE}.Scheduler.ingest_requests": (
        "98413e3c46528772",
        "ranks: what rank 0 adds is broadcast, and every rank handles it before its next step",
    ),
    f"{RECEIVER}.recv_requests": (
        "3f96d998d6868be5",
        "ranks: a skipped broadcast is lost on all of them",
    ),
    f"{RECEIVER}._broadcast_reqs_across_ranks": ("a6ee6b687df336eb", "ranks: alike on all of them"),
    f"{EAGLE}.EAGLEWorkerV2.__init__": (
        "567df77571bd40a7",
        "lone_drafter stands for the draft worker it makes",
    ),
    sglang_api.FORWARD: (
        "4e99a1d977d07ce5",
        "lone_drafter answers what it asks of its draft worker",
    ),
    f"{EAGLE}.EAGLEWorkerV2.build_adaptive_runtime_state": (
        "cb9d3c27d93bd3b1",
        "lone_drafter, as well",
    ),
    f"{EAGLE}.EAGLEWorkerV2._override_worker_state": ("715df0ee47878016", "lone_drafter, as well"),
    f"{EAGLE}.EAGLEWorkerV2.spec_v2_attn_backends": ("fe309376caeb9797", "lone_drafter, as well"),
    sglang_api.INIT_GRAPHS: (
        "a38320641e03f0c5",
        "target_scope postpones what it builds in the drafter's scope",
    ),
    attention_dp.PULL_RAW_REQUESTS: (
        "464a502f6c4c4399",
        "attention_dp: what rank 0 adds to it reaches all ranks",
    ),
    f"{GATHER}.prepare_mlp_sync_batch_raw": (
        "c44a14afa5b3eee0",
        "attention_dp: every batch has all sizes",
    ),
    f"{GATHER}.MLPSyncBatchInfo": (
        "825be0cf1c1166eb",
        "attention_dp: the sizes are alike on all ranks",
    ),
    DRAFT_BASE: ("474c8f6cf68136f5", "lone_drafter is one"),
    sglang_api.RESOLVE_TOKENS: ("c2ed08738e6be120", "telemetry reads what it leaves on the result"),
}
ATTRIBUTES = {
    # How the ranks share a layer's parameters (rank_shares.py).
    f"{LAYERS}.linear.ColumnParallelLinear": {
        "output_partition_sizes",
        "output_size_per_partition",
    },
    f"{LAYERS}.linear.MergedColumnParallelLinear": {"output_sizes"},
    f"{LAYERS}.linear.QKVParallelLinear": {
        "head_size",
        "num_heads",
        "num_kv_head_replicas",
        "num_kv_heads",
        "total_num_heads",
        "total_num_kv_heads",
        "v_head_size",
    },
    f"{LAYERS}.linear.RowParallelLinear": {"input_size_per_partition"},
    f"{LAYERS}.linear.LinearBase": {"input_size", "output_size"},
    f"{LAYERS}.vocab_parallel_embedding.VocabParallelEmbedding": {
        "num_added_embeddings",
        "num_embeddings_padded",
        "num_embeddings_per_partition",
    },
    "sglang.srt.managers.utils.GenerationBatchResult": {
        "num_correct_drafts_per_req_cpu",
        "can_run_cuda_graph",
        "logits_output",
        "next_draft_input",
        "next_token_ids",
        "speculative_num_draft_tokens",
    },
    "sglang.srt.managers.schedule_batch.ScheduleBatch": {
        "extend_lens",
        "extend_logprob_start_lens",
        "extend_num_tokens",
        "forward_iter",
        "forward_mode",
        "has_grammar",
        "input_ids",
        "is_extend_in_batch",
        "multimodal_inputs",
        "orig_seq_lens",
        "out_cache_loc",
        "prefix_lens",
        "req_pool_indices",
        "req_to_token_pool",
        "reqs",
        "return_logprob",
        "sampling_info",
        "seq_lens",
        "seq_lens_cpu",
        "seq_lens_sum",
        "spec_info",
        "token_ids_logprobs",
        "top_logprobs_nums",
    },
    "sglang.srt.managers.schedule_batch.Req": {
        "finished_len",
        "finished_reason",
        "is_retracted",
        "kv",
        "lora_id",
        "origin_input_ids",
        "output_ids",
        "rid",
        "sampling_params",
    },
    "sglang.srt.lora.lora_manager.LoRAManager": {"lora_refs"},
    "sglang.srt.lora.lora_registry.LoRARef": {"lora_name"},
    "sglang.srt.speculative.eagle_info.EagleDraftInput": {"topk_p", "topk_index", "hidden_states"},
    "sglang.srt.speculative.eagle_info.EagleDraftExtendInput": {
        "hidden_states",
        "num_tokens_per_req",
        "num_tokens_for_logprob_per_req",
    },
    "sglang.srt.layers.radix_attention.RadixAttention": {
        "layer_id",
        "tp_q_head_num",
        "tp_k_head_num",
        "head_dim",
        "is_cross_attention",
    },
    "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE": {
        "num_experts",
        "num_fused_shared_experts",
        "top_k",
    },
    "sglang.srt.configs.model_config.ModelConfig": {
        "attention_arch",
        "hidden_size",
        "is_draft_model",
        "is_multimodal",
        "num_attention_heads",
        "num_hidden_layers",
        "quantization",
        "vocab_size",
    },
    f"{ADAPTIVE}.AdaptiveController": {"params", "_states"},
    f"{ADAPTIVE}.SpecRuntimeState": {
        "speculative_num_steps",
        "speculative_num_draft_tokens",
        "draft_attn_backend",
        "cuda_graph_runner",
        "target_attn_backend",
        "target_graph_runner",
        "draft_extend_attn_backend",
        "cuda_graph_runner_for_draft_extend",
    },
    f"{EAGLE}.EAGLEWorkerV2": {
        "adaptive_controller",
        "_target_worker",
        "_draft_worker",
        "speculative_num_steps",
        "speculative_num_draft_tokens",
    },
    f"{EAGLE}.EagleDraftWorker": {
        "cuda_graph_runner",
        "cuda_graph_runner_for_draft_extend",
        "draft_attn_backend",
        "draft_extend_attn_backend",
        "draft_runner",
        "parallel_layout",
        "seed_dsa_topk_from_draft_extend",
        "speculative_num_steps",
        "speculative_num_draft_tokens",
    },
    DFLASH: {
        "draft_model_runner",
        "draft_parallel_layout",
        "_draft_block_tokens_buf",
        "_draft_worker",
    },
    DRAFT_BASE: {
        "_topk1_parents_prealloc",
        "_topk1_score_indices_prealloc",
    },
    "sglang.srt.model_executor.model_runner.ModelRunner": {
        "attn_backend",
        "decode_attention_backend_str",
        "kv_cache_dtype",
        "decode_cuda_graph_runner",
        "lora_manager",
        "shared_read_done_event",
    },
    "sglang.srt.model_executor.model_runner.ModelRunnerOutput": {"can_run_graph"},
    "sglang.srt.managers.scheduler.Scheduler": {
        "draft_worker",
        "enable_overlap",
        "max_running_requests",
        "server_args",
        "tp_worker",
    },
    "sglang.srt.plugins.hook_registry.HookRegistry": {"_hooks", "_patched"},
    "sglang.srt.runtime_context.RuntimeContext": {"_overrides_log"},
}


# What an older version has otherwise.  None: it is not there, and the plugin does without.
OLDER_PARAMETERS: dict[str, dict[str, str | None]] = {
    "0.5.22": {"sglang.srt.speculative.spec_utils.draft_tp_context": "owns_attention"},
    "0.5.21": {
        sglang_api.DRAFT_EXTEND: "self, batch, batch_result",
        sglang_api.DRAFT_PREFILL: (
            "self, batch, target_hidden_states, next_token_ids, mm_input_embeds=None"
        ),
        f"{DFLASH}._draft_write_ids": None,
        "sglang.srt.runtime_context.attn_dp_enabled_of": None,
        "sglang.srt.speculative.spec_utils.draft_tp_context": "tp_group, *, owns_attention",
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (
            "cls, batch, model_runner, *, capture_hidden_mode=None, "
            "return_hidden_states_before_norm"
        ),
    },
}
OLDER_CODE: dict[str, dict[str, str | None]] = {
    "0.5.22": {
        # Data-parallel attention is not steered there.
        sglang_api.INIT_GRAPHS: None,
        f"{GATHER}.prepare_mlp_sync_batch_raw": None,
        f"{GATHER}.MLPSyncBatchInfo": None,
        f"{EAGLE}.EagleDraftWorker._draft_extend_for_prefill": "7ffff7ee24ecff7e",
        sglang_api.DRAFT_EXTEND: "f32085e49424f9bd",
        f"{DFLASH}.forward_batch_generation": "f5aad24f824460bc",
        f"{DFLASH}._defer_target_verify_gather": None,
        sglang_api.FORWARD: "12f5a5a4c44ce6eb",
        f"{EAGLE}.EAGLEWorkerV2.build_adaptive_runtime_state": "5f7081a276e32104",
        sglang_api.RESOLVE_TOKENS: "8b0833f69aa4202c",
    },
    "0.5.21": {
        # Data-parallel attention is not steered there.
        sglang_api.INIT_GRAPHS: None,
        attention_dp.PULL_RAW_REQUESTS: None,
        f"{GATHER}.prepare_mlp_sync_batch_raw": None,
        f"{GATHER}.MLPSyncBatchInfo": None,
        f"{EAGLE}.EagleDraftWorker._draft_extend_for_prefill": "836b477ccd07b5e2",
        sglang_api.DRAFT_EXTEND: "bd2b0cc8e586c18e",
        f"{DFLASH}.forward_batch_generation": "c6e308ec38da3245",
        f"{DFLASH}._defer_target_verify_gather": None,
        f"{DFLASH}._maybe_merge_trained_mask_embedding": "edeb8bc747f7a8b7",
        f"{sglang_api.SCHEDULER_MODULE}.Scheduler.ingest_requests": "6142b00e28b2a3b4",
        f"{RECEIVER}._broadcast_reqs_across_ranks": "fd46665ec5a421e3",
        sglang_api.FORWARD: "c3c3a54a1a285192",
        f"{EAGLE}.EAGLEWorkerV2.build_adaptive_runtime_state": "5f7081a276e32104",
        sglang_api.RESOLVE_TOKENS: "8b0833f69aa4202c",
    },
}
OLDER_ATTRIBUTES = {
    "0.5.22": {
        f"{EAGLE}.EagleDraftWorker": {
            *(ATTRIBUTES[f"{EAGLE}.EagleDraftWorker"] - {"parallel_layout"}),
            "draft_owns_attention",
        },
        DFLASH: {*(ATTRIBUTES[DFLASH] - {"draft_parallel_layout"}), "draft_owns_attention"},
    },
    "0.5.21": {
        f"{EAGLE}.EagleDraftWorker": {
            *(ATTRIBUTES[f"{EAGLE}.EagleDraftWorker"] - {"parallel_layout"}),
            "draft_owns_attention",
            "draft_tp_context",
        },
        DFLASH: {
            "draft_model_runner",
            "draft_owns_attention",
            "draft_tp_context",
            "_draft_block_tokens_buf",
            "_draft_worker",
        },
    },
}
