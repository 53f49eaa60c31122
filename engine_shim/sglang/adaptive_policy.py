"""The policy object that SGLang's AdaptiveController asks for a draft length.

SGLang constructs it (in place of its own `AdaptiveSpeculativeParams`) before anything else of the
plugin exists in the scheduler's process.  `EngineHooks` decides at the start of each decode step;
SGLang asks for the decision once inside it.
"""

from __future__ import annotations

from engine_shim.common.source_log import log_source
from engine_shim.link.plan_follower import StepChoice, safe_choice
from engine_shim.sglang.api import hook_check, sglang_api
from engine_shim.sglang.api.settings import load_settings


class SteeredPolicy:
    """SGLang's `AdaptiveSpecPolicy` protocol, answered by the sidecar's plan."""

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
        """Starts with the draft length `initial_steps`.  Raises PluginError."""
        hook_check.require_hooks(sglang_api.CANDIDATE_STEPS, sglang_api.INIT_MODEL_WORKER)
        settings = load_settings()
        self._gammas = settings.gammas
        self.startup_gamma = initial_steps
        self.choice = safe_choice(initial_steps)

    @property
    def candidate_steps(self) -> list[int]:
        """Every draft length that SGLang prepares a runtime state for."""
        return list(self._gammas)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Ignores the sizes, because `GraphStates` limits them where captures read them."""

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Returns None always, for all sizes: no capture reads what SGLang would do with others."""
        return None

    def run(self, choice: StepChoice) -> None:
        """Keeps the choice for the decode step that begins now; logs a change of its source."""
        if choice.source is not self.choice.source:
            log_source(self.choice.source, choice.source)
        self.choice = choice

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Draft length of the step that was decided last."""
        return self.choice.gamma

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """Returns None always: acceptance is reported, and gamma changes only as a step begins."""
        return None
