"""Published step costs as surfaces: measured tables, a fitted model, and a roofline.

TIDE (arXiv 2602.05145), Table 5: T(n) of four models on H100 nodes and D_0 of their EAGLE-3
drafters.  The paper does not state the context, so it has no cost here.

SpecDecode-Bench (arXiv 2601.11580), Llama-3.1-8B on an H100: a fit, linear in n, gamma B and kv.

"Adaptive speculative decoding" (F. Finn, Doubleword), Qwen3.6-35B-A3B on a B200: the shapes are
published, the costs are a roofline, as there (a whole pass overlaps, no engine overhead).

Unpublished costs are derived.  A token of a prompt costs what one more token adds to the largest
known pass, which is compute-bound.  A token that a drafter missed costs the drafter's share of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.roofline import Overlap, device_from_data_sheet, step_seconds
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.errors import InvalidEngineError
from controller.core.model_shapes import DrafterKind
from simulator import published_qwen
from simulator.errors import InvalidInputError
from simulator.surface import CostSurface

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TideModel:
    """One column of Table 5: EAGLE-3 in front of a target on H100 GPUs under tensor parallelism.

    target_ms: T(n) at n = 1, 2, 4, ... tokens in one pass; it ends where the table does.
    draft_ms: D_0, one pass of the drafter, whatever the batch.  layers: of the target (model card).
    """

    target_ms: tuple[float, ...]
    draft_ms: float
    layers: int

    @property
    def tokens(self) -> NDArray[np.float64]:
        """The n of `target_ms`."""
        return np.exp2(np.arange(len(self.target_ms), dtype=np.float64))

    @property
    def last_slope(self) -> float:
        """Seconds that one more token adds to the largest pass in the table."""
        n = self.tokens
        return float((self.target_ms[-1] - self.target_ms[-2]) / 1e3 / (n[-1] - n[-2]))

    def target_seconds(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Interpolates T(n) linearly; beyond the table it keeps the last slope."""
        n = self.tokens
        inside: NDArray[np.float64] = np.interp(tokens, n, np.array(self.target_ms) / 1e3)
        beyond: NDArray[np.float64] = np.maximum(tokens - n[-1], 0.0) * self.last_slope
        return inside + beyond

    def step_seconds(self, batch_sizes: NDArray[np.float64], gamma: int) -> NDArray[np.float64]:
        """Computes gamma D_0 + T(B (gamma + 1)), as Eq. 3 has it, in the shape of batch_sizes."""
        return gamma * self.draft_ms / 1e3 + self.target_seconds(batch_sizes * (gamma + 1))

    def max_batch_size(self, gamma_max: int) -> int:
        """Largest batch whose passes lie in the table up to gamma_max; 0 if none does."""
        return int(self.tokens[-1]) // (gamma_max + 1)


TIDE_MODELS: Mapping[str, TideModel] = {
    "tide-gpt-oss-120b": TideModel(
        (3.416, 3.844, 4.341, 5.236, 6.123, 7.637, 9.345, 11.79, 15.50, 21.50), 0.393, 36
    ),
    "tide-qwen3-235b": TideModel(
        (9.057, 10.07, 11.86, 14.68, 17.84, 23.47, 26.68, 31.46), 0.137, 94
    ),
    "tide-llama4-scout": TideModel(
        (6.461, 7.953, 8.932, 11.01, 13.61, 16.82, 19.58, 23.82, 27.89, 40.86), 0.330, 48
    ),
    "tide-llama3.3-70b": TideModel(
        (15.50, 16.00, 16.11, 16.36, 17.10, 18.45, 19.00, 21.38, 27.54, 64.76), 0.843, 80
    ),
}


# Context tokens per sequence for which the surfaces hold.
KV_REFERENCE = published_qwen.MEAN_CONTEXT

# The fit to Llama-3.1-8B, in seconds: a pass, a token in it, a context token; EAGLE's whole draft,
# a token of it, a context token.
_VERIFY = (5.88590713e-3, 2.10103129e-5, 3.92645679e-8)
_EAGLE = (2.13526175e-3, 8.41429603e-7, 2.37768493e-9)
_NGRAM_SHARE_OF_VERIFY = 0.005875
_STEP_OVERHEAD = 1.20683946e-3


@dataclass(frozen=True, slots=True)
class _DrafterLimits:
    """Describes a drafter.

    gammas_shown: its draft lengths end here unless asked for; gamma_max: here at the latest.
    """

    kind: DrafterKind
    gammas_shown: int
    gamma_max: int


@dataclass(frozen=True, slots=True)
class _PublishedSource:
    """Describes one publication.

    arm_seconds(arm, B): [batch sizes] at KV_REFERENCE.  kv_seconds(arm): of a context token.
    measured(gamma_max): batch sizes, ascending; empty without measurements.
    prefill, catch_up: seconds a token.
    """

    drafters: Mapping[str, _DrafterLimits]
    arm_seconds: Callable[[Arm, Floats], Floats]
    kv_seconds: Callable[[Arm], float]
    measured: Callable[[int], tuple[int, ...]]
    prefill: float
    catch_up: float
    curves: Mapping[str, tuple[float, ...]]


def surface_names() -> tuple[str, ...]:
    """Returns the names of all published surfaces."""
    return tuple(_SOURCES)


def acceptance_curves(name: str) -> Mapping[str, tuple[float, ...]]:
    """Returns drafter -> survival curve s_1, s_2, ...; empty if none was published.

    Positions deeper than the curve were never accepted.  Raises InvalidInputError: unknown name.
    """
    return _source(name).curves


def measured_batch_sizes(name: str, gamma_max: int) -> tuple[int, ...]:
    """The batch sizes at which, up to gamma_max, nothing is extrapolated: ascending, never empty.

    Those that were measured or, for a table over tokens, the powers of two that it covers and the
    largest batch that it does.  Raises InvalidInputError for an unknown name, and for a gamma_max
    that leaves no batch.
    """
    source = _source(name)
    deepest = max(drafter.gamma_max for drafter in source.drafters.values())
    sizes = source.measured(gamma_max) if 0 <= gamma_max <= deepest else ()
    if not sizes:
        raise InvalidInputError(name, 0, f"no step is known at a draft length of {gamma_max}")
    return sizes


def published_surface(
    name: str,
    gammas: Sequence[int] | None = None,
    max_batch_size: int | None = None,
    *,
    extrapolate: bool = False,
) -> CostSurface:
    """The surface of that name with all its drafters.

    gammas: draft lengths (0 is added), of which every drafter takes those that it can do; by
    default 0..5 (TIDE), 0..8, and 0..16 (DFlash).  max_batch_size: by default the largest of
    `measured_batch_sizes`; a larger one has to be meant: `extrapolate`.

    Raises InvalidInputError for an unknown name, and for sizes that are not known or cannot be.
    """
    source = _source(name)
    specs = _specs(name, source, gammas)
    deepest = max(spec.gammas[-1] for spec in specs)
    measured = measured_batch_sizes(name, deepest)[-1]
    largest = measured if max_batch_size is None else max_batch_size
    if largest < 1 or (largest > measured and not extrapolate):
        raise InvalidInputError(
            name, 0,
            f"max_batch_size {largest}: with draft lengths up to {deepest}, batches of 1 to "
            f"{measured} are known",
        )  # fmt: skip
    batch = np.maximum(np.arange(largest + 1, dtype=np.float64), 1.0)
    arms = [Arm(spec.name, gamma) for spec in specs for gamma in spec.gammas]
    return CostSurface(
        name,
        specs,
        np.vstack([source.arm_seconds(arm, batch) for arm in arms]),
        np.array([source.kv_seconds(arm) for arm in arms]),
        KV_REFERENCE,
        source.prefill,
        source.catch_up,
    )


def _source(name: str) -> _PublishedSource:
    source = _SOURCES.get(name)
    if source is None:
        raise InvalidInputError(
            "surface", 0, f"{name!r} is not one; there are: {', '.join(_SOURCES)}"
        )
    return source


def _specs(
    name: str, source: _PublishedSource, gammas: Sequence[int] | None
) -> tuple[DrafterSpec, ...]:
    specs = []
    for drafter, limits in source.drafters.items():
        if gammas is None:
            selected_gammas = set(range(limits.gammas_shown + 1))
        else:
            selected_gammas = {0} | {gamma for gamma in gammas if gamma <= limits.gamma_max}
        try:
            specs.append(DrafterSpec(drafter, limits.kind, tuple(sorted(selected_gammas))))
        except InvalidEngineError as error:
            raise InvalidInputError(name, 0, str(error)) from error
    unsupported_gammas = set(gammas or ()) - {gamma for spec in specs for gamma in spec.gammas}
    if unsupported_gammas:
        raise InvalidInputError(
            name, 0, f"no drafter of it drafts {max(unsupported_gammas)} tokens"
        )
    return tuple(specs)


def _tide_source(model: TideModel) -> _PublishedSource:
    def measured_sizes(gamma_max: int) -> tuple[int, ...]:
        largest = model.max_batch_size(gamma_max)
        return tuple(sorted({2**i for i in range(largest.bit_length())} | {largest} - {0}))

    return _PublishedSource(
        {"eagle3": _DrafterLimits(DrafterKind.MTP, 5, 64)},
        lambda arm, batch: model.step_seconds(batch, arm.gamma),
        lambda _: 0.0,
        measured_sizes,
        prefill=model.last_slope,
        # An EAGLE-3 drafter is one layer.
        catch_up=model.last_slope / model.layers,
        curves={},
    )


def _llama_arm_seconds(arm: Arm, batch: Floats) -> Floats:
    kv = batch * KV_REFERENCE
    fixed, token, context = _VERIFY
    verify = fixed + token * batch * (arm.gamma + 1) + context * kv
    total: Floats = verify + _STEP_OVERHEAD
    if arm.gamma > 0 and arm.drafter == "eagle":
        fixed, token, context = _EAGLE
        total += fixed + token * arm.gamma * batch + context * kv
    elif arm.gamma > 0:
        total += _NGRAM_SHARE_OF_VERIFY * verify
    return total


def _llama_kv_seconds(arm: Arm) -> float:
    draft = _EAGLE[2] if arm.drafter == "eagle" else _NGRAM_SHARE_OF_VERIFY * _VERIFY[2]
    return _VERIFY[2] + (draft if arm.gamma else 0.0)


def _llama_source() -> _PublishedSource:
    return _PublishedSource(
        {
            "eagle": _DrafterLimits(DrafterKind.MTP, 8, 64),
            "ngram": _DrafterLimits(DrafterKind.NGRAM, 8, 64),
        },
        _llama_arm_seconds,
        _llama_kv_seconds,
        # The batch sizes that the fit was made on.
        lambda _: (1, 8, 16, 32, 64),
        prefill=_VERIFY[1],
        catch_up=_EAGLE[1],
        curves={},
    )


def _qwen_source() -> _PublishedSource:
    gpu = device_from_data_sheet("B200")
    kv_seconds = published_qwen.TARGET.kv_bytes_per_token / gpu.bandwidth

    def arm_seconds(arm: Arm, batch: Floats) -> Floats:
        drafter, kv = published_qwen.DRAFTERS[arm.drafter], batch * KV_REFERENCE
        row: Floats = step_seconds(
            published_qwen.TARGET, drafter, gpu, batch, [arm.gamma], kv, Overlap.STEP
        )[0]
        return row

    head_params = published_qwen.TARGET.head_params
    drafter_params = max(
        drafter.active_params - head_params for drafter in published_qwen.DRAFTERS.values()
    )
    return _PublishedSource(
        {
            name: _DrafterLimits(
                drafter.kind, published_qwen.GAMMA_MAX[name], published_qwen.GAMMA_MAX[name]
            )
            for name, drafter in published_qwen.DRAFTERS.items()
        },
        arm_seconds,
        # The read; where compute bounds a step, context is cheaper than this.
        lambda _: kv_seconds,
        lambda _: published_qwen.CONCURRENCIES,
        prefill=2 * (published_qwen.TARGET.active_params - head_params) / gpu.peak_flops,
        catch_up=2 * drafter_params / gpu.peak_flops,
        curves=published_qwen.SURVIVAL,
    )


_SOURCES: Mapping[str, _PublishedSource] = {
    **{name: _tide_source(model) for name, model in TIDE_MODELS.items()},
    "h100-llama3.1-8b": _llama_source(),
    "b200-qwen3.6-35b-a3b": _qwen_source(),
}
