"""The true cost of a step in the simulated engine, and the profile that measuring it would give."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Arm, DrafterSpec, Fingerprint


@dataclass(frozen=True, slots=True)
class CostSurface:
    """Seconds of a step by arm, batch size and context.

        C = seconds[arm, B] + kv_seconds[arm] * (kv - B * kv_reference)

    arms: one (drafter, gamma) a row, in the order of `drafters` and their gammas (gamma = 0 is
    listed for each).  seconds: [arms, max_batch_size + 1], column B (column 0 repeats column 1).
    kv_seconds: [arms], seconds a KV token.  kv_reference: context tokens a sequence at which
    `seconds` holds.  prefill_seconds_per_token: of a prompt.  catch_up_seconds_per_token: what a
    drafter pays for a token that it missed while it slept or another one ran.
    """

    name: str
    drafters: tuple[DrafterSpec, ...]
    seconds: NDArray[np.float64]
    kv_seconds: NDArray[np.float64]
    kv_reference: float
    prefill_seconds_per_token: float = 0.0
    catch_up_seconds_per_token: float = 0.0

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Rows of `seconds`."""
        return tuple(Arm(d.name, gamma) for d in self.drafters for gamma in d.gammas)

    @property
    def max_batch_size(self) -> int:
        """Largest batch that the surface prices."""
        return int(self.seconds.shape[1]) - 1

    def profile(
        self,
        fingerprint: Fingerprint,
        batch_sizes: Sequence[int],
        factors: NDArray[np.float64] | None = None,
        kv_tokens_per_sequence: float | None = None,
        with_context: bool = True,
    ) -> Profile:
        """Makes the profile that a measurement would give; `factors` [arms, sizes] make it wrong.

        with_context: False leaves the context term out, as a profile at one context does.
        """
        kv = self.kv_reference if kv_tokens_per_sequence is None else kv_tokens_per_sequence
        cells = []
        for i, arm in enumerate(self.arms):
            for j, size in enumerate(batch_sizes):
                shift = self.kv_seconds[i] * size * (kv - self.kv_reference)
                seconds = float(self.seconds[i, size] + shift)
                if factors is not None:
                    seconds *= float(factors[i, j])
                cells.append(ProfileCell(arm.drafter, arm.gamma, size, seconds, 0.0, 20))
        return Profile(
            fingerprint,
            tuple(DrafterIdentity(d.name, d.model, d.revision) for d in self.drafters),
            kv,
            float(np.median(self.kv_seconds)) if with_context else 0.0,
            tuple(cells),
            catch_up_seconds_per_token=self.catch_up_seconds_per_token,
        )
