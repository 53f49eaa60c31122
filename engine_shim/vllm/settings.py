"""Settings of the vLLM plugin."""

from __future__ import annotations

from engine_shim.common.settings import ShimSettings


class VllmSettings(ShimSettings):
    """Settings from SPECULATION_* variables; vLLM adds no settings."""

    def prepared_gammas(self, max_gamma: int) -> tuple[int, ...]:
        """Returns the draft lengths of an engine whose `num_speculative_tokens` is `max_gamma`.

        These are the values of SPECULATION_GAMMAS; if it is not set, its default up to `max_gamma`.
        """
        if "gammas" in self.model_fields_set:
            return self.gammas
        return (*(gamma for gamma in self.gammas if gamma < max_gamma), max_gamma)
