"""The policy object that SGLang's AdaptiveController asks for a draft length, and the change to it.

SGLang constructs the policy (in place of its own `AdaptiveSpeculativeParams`) before anything else
of the plugin exists in the scheduler's process.  `EngineHooks` decides at the start of each decode
step; SGLang asks for the decision once inside it.

A switch between two steps writes no log line and builds nothing.  SGLang's own
`apply_runtime_state` writes a log line and an entry of an unbounded log at each switch, and
rebuilds two constant tensors.  That is cheap for one switch a minute, but here every step may
switch.  Everything else is as in SGLang 0.5.23; a contract test fails when that changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_shim.common.status import log_source_change
from engine_shim.link.plan_follower import StepChoice, make_safe_default
from engine_shim.sglang.api import hook_check, sglang_api
from engine_shim.sglang.api.settings import load_settings

if TYPE_CHECKING:
    import torch

    ChainBuffers = tuple["torch.Tensor | None", "torch.Tensor | None"]


_STEPS_FIELD: Final = "speculative_num_steps"
_TOKENS_FIELD: Final = "speculative_num_draft_tokens"


class SteeredPolicy:
    """SGLang's `AdaptiveSpecPolicy` protocol, answered by the sidecar's plan."""

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
        """Starts with the draft length `initial_steps`.  Raises PluginError."""
        hook_check.require_hooks(sglang_api.CANDIDATE_STEPS, sglang_api.INIT_MODEL_WORKER)
        settings = load_settings()
        self._gammas = settings.gammas
        self.startup_gamma = initial_steps
        self.choice = make_safe_default(initial_steps)

    @property
    def candidate_steps(self) -> list[int]:
        """Every draft length that SGLang prepares a runtime state for."""
        return list(self._gammas)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Ignores the sizes: `GraphStates` limits them in the configuration that captures read."""

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Always returns None, which means all sizes: no capture reads a limit from here."""
        return None

    def set_choice(self, choice: StepChoice) -> None:
        """Sets the choice of the decode step that begins now; logs a change of its source."""
        if choice.source is not self.choice.source:
            log_source_change(self.choice.source, choice.source)
        self.choice = choice

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Draft length of the step that was decided last."""
        return self.choice.gamma

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """Always returns None: gamma changes only when a step begins."""
        return None


class RuntimeSwitch:
    """Switches draft lengths instead of `EAGLEWorkerV2.apply_runtime_state`; one per worker."""

    def __init__(self) -> None:
        self._chain_buffers: dict[int, ChainBuffers] = {}
        self._spec: Any = None
        self._logged_overrides: dict[str, int] = {}

    def prepare(self, worker: Any, gammas: tuple[int, ...]) -> None:
        """Builds the constant tensors of every draft length, and leaves the worker unchanged."""
        draft = worker.draft_worker
        steps, tokens = draft.speculative_num_steps, draft.speculative_num_draft_tokens
        for gamma in gammas:
            draft.speculative_num_steps, draft.speculative_num_draft_tokens = gamma, gamma + 1
            draft._rebuild_topk1_chain_buffers()
            self._chain_buffers[gamma] = (
                draft._topk1_parents_prealloc,
                draft._topk1_score_indices_prealloc,
            )
        draft.speculative_num_steps, draft.speculative_num_draft_tokens = steps, tokens
        self._use_chain_buffers(draft, steps)

    def apply_runtime_state(self, worker: Any, state: Any) -> None:
        """Puts a prepared `SpecRuntimeState` into use."""
        gamma: int = state.speculative_num_steps
        if worker.speculative_num_steps == gamma:
            return
        tokens: int = state.speculative_num_draft_tokens
        worker.speculative_num_steps = gamma
        worker.speculative_num_draft_tokens = tokens

        draft = worker._draft_worker
        runner = draft.draft_runner
        draft.speculative_num_steps = gamma
        draft.speculative_num_draft_tokens = tokens
        draft.draft_attn_backend = state.draft_attn_backend
        runner.draft_attn_backend = state.draft_attn_backend
        draft.cuda_graph_runner = state.cuda_graph_runner
        draft.draft_extend_attn_backend = state.draft_extend_attn_backend
        if state.draft_extend_attn_backend is not None:
            runner.attn_backend = state.draft_extend_attn_backend
        draft.cuda_graph_runner_for_draft_extend = state.cuda_graph_runner_for_draft_extend
        if gamma in self._chain_buffers:
            self._use_chain_buffers(draft, gamma)
        else:
            draft._rebuild_topk1_chain_buffers()

        target = worker._target_worker.model_runner
        target.attn_backend = state.target_attn_backend
        target.decode_cuda_graph_runner = state.target_graph_runner
        self._publish_draft_length(gamma, tokens)

    def _use_chain_buffers(self, draft: Any, gamma: int) -> None:
        parents, scores = self._chain_buffers[gamma]
        draft._topk1_parents_prealloc = parents
        draft._topk1_score_indices_prealloc = scores

    def _publish_draft_length(self, gamma: int, tokens: int) -> None:
        """Writes both values into SGLang's configuration.

        The first call uses SGLang's `override`, which adds a log entry.  Later calls update that
        entry in place, so that `/server_info` shows the current values.
        """
        if self._spec is None:
            from sglang.srt.runtime_context import get_context, get_spec

            context: Any = get_context()
            context.override(
                sglang_api.SWITCH_SOURCE, **{_STEPS_FIELD: gamma, _TOKENS_FIELD: tokens}
            )
            self._logged_overrides = context._overrides_log[-1][1]
            self._spec = get_spec()
            return
        self._spec._set(_STEPS_FIELD, gamma)
        self._spec._set(_TOKENS_FIELD, tokens)
        self._logged_overrides[_STEPS_FIELD], self._logged_overrides[_TOKENS_FIELD] = gamma, tokens
