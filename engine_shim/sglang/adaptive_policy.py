"""The policy object that SGLang's AdaptiveController asks for a draft length.

SGLang constructs it (in place of its own `AdaptiveSpeculativeParams`) before anything else of the
plugin exists in the scheduler's process; the session then says whom to ask.  One decision is made
at the start of each decode step and asked for once inside it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from engine_shim.link.plan_follower import Source, StepChoice, safe_choice
from engine_shim.sglang import hook_check, sglang_api
from engine_shim.sglang.settings import load_settings

if TYPE_CHECKING:
    from engine_shim.link.ranks import Ranks

_log = logging.getLogger(__name__)


class SteeredPolicy:
    """SGLang's `AdaptiveSpecPolicy` protocol, answered by the sidecar's plan."""

    def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
        """Starts with the draft length `initial_steps`.  Raises PluginError."""
        hook_check.require_hooks(sglang_api.CANDIDATE_STEPS, sglang_api.INIT_MODEL_WORKER)
        settings = load_settings()
        self._gammas = settings.gammas
        self._limits = settings.graph_limits
        self._graph_batch_sizes: list[int] | None = None
        self._ranks: Ranks | None = None
        self.startup_gamma = initial_steps
        self.choice = safe_choice(initial_steps)

    @property
    def candidate_steps(self) -> list[int]:
        """Every draft length that SGLang prepares a runtime state for."""
        return list(self._gammas)

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """The batch sizes that the engine captures; None without graphs."""
        self._graph_batch_sizes = cuda_graph_bs

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Returns the batch sizes to capture for a draft length; None: all of them."""
        if step not in self._limits or self._graph_batch_sizes is None:
            return None
        return [size for size in self._graph_batch_sizes if size <= self._limits[step]]

    @property
    def batch_limits(self) -> dict[int, int]:
        """Draft lengths that are prepared for small batches only, and for how large ones."""
        graphs = self._graph_batch_sizes
        if graphs is None:
            return dict(self._limits)
        return {
            gamma: max((size for size in graphs if size <= limit), default=0)
            for gamma, limit in self._limits.items()
            if limit < max(graphs)
        }

    def steer_by(self, ranks: Ranks) -> None:
        """Decides from now on by what all ranks have adopted."""
        self._ranks = ranks

    def decide(self, batch_size: int) -> StepChoice:
        """The choice for the decode step that begins now; kept until the next one."""
        if self._ranks is None:
            return self.choice
        choice = self._ranks.choose(batch_size)
        if choice.source is not self.choice.source:
            _note_source(self.choice.source, choice.source)
        self.choice = choice
        return choice

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Draft length of the step that was decided last."""
        return self.choice.gamma

    def on_verify_complete(
        self, num_correct_drafts_per_req: list[int], batch_size: int
    ) -> int | None:
        """Returns None always: acceptance is reported, and gamma changes only as a step begins."""
        return None


def _note_source(old: Source, new: Source) -> None:
    if new is Source.PLAN:
        _log.info("the sidecar steers (before: %s)", old.value)
    else:
        _log.warning("the sidecar does not steer: %s (before: %s)", new.value, old.value)
