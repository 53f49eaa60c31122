"""Settings of the vLLM plugin."""

from __future__ import annotations

from engine_shim.common.settings import ShimSettings


class VllmSettings(ShimSettings):
    """One field for each SPECULATION_* variable; vLLM has none of its own."""

    def gammas_within(self, most: int) -> tuple[int, ...]:
        """Returns the draft lengths of an engine whose `num_speculative_tokens` is `most`.

        Those that SPECULATION_GAMMAS lists; where it is not set, its default up to `most`.
        """
        if "gammas" in self.model_fields_set:
            return self.gammas
        return (*(gamma for gamma in self.gammas if gamma < most), most)
