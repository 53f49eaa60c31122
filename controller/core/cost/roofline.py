"""Estimates the cost of a step from the model's shape and two numbers of the GPU.

    C(B, gamma, kv) = overhead + verify(B, gamma + 1, kv) + passes(gamma) * draft(B, kv)

Every part of a pass takes the longer of its FLOPs over the peak and its bytes over the bandwidth.
With n = B (gamma + 1) tokens to verify, and kv context tokens over all sequences:

    weights   2 P n FLOPs                       P bytes-per-weight, whatever n
    experts   2 (k + shared) w n                (shared + e(n)) w, e(n) = E (1 - (1 - 1/E)^(n k))
    softmax   f (gamma + 1) kv                  m_c kv + m_q n
    linear    token_flops n                     state_bytes B
    LM head   2 V H n                           V H

The formulas follow the appendices of "Adaptive speculative decoding" (F. Finn, Doubleword).  As
there, the state of linear layers is read once and not written, and experts are drawn independently.
Further assumptions: activations, sampling and the communication of parallel GPUs are omitted,
tokens under verification do not attend to each other, a drafter's pass reads its own cache only if
its shape has one, and parts of a pass do not overlap (see Overlap).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controller.core.engine_spec import Arm
from controller.core.model_shapes import (
    DrafterKind,
    DrafterShape,
    Experts,
    InvalidShapeError,
    LinearAttention,
    ModelShape,
    require_not_negative,
    require_positive,
)

# Overheads of an engine of unknown speed.  Of a step: the overhead fitted for vLLM with
# Llama-3.1-8B on an H100 (SpecDecode-Bench, arXiv 2601.11580).  Of a pass: the median of the four
# D_0 in TIDE, Table 5, where kernel launches dominate and not the drafter's weights.
TYPICAL_STEP_OVERHEAD_SECONDS = 1.2e-3
TYPICAL_PASS_OVERHEAD_SECONDS = 0.36e-3
# Peak compute and memory bandwidth by words of the driver's name: (dense bf16 FLOP/s, bytes/s),
# from the manufacturers' data sheets.
DATA_SHEETS: dict[str, tuple[float, float]] = {
    "GB300": (2.5e15, 8.0e12),
    "B300": (2.25e15, 8.0e12),
    "GB200": (2.5e15, 8.0e12),
    "B200": (2.25e15, 8.0e12),
    "GH200": (989e12, 4.0e12),
    "H200": (989e12, 4.8e12),
    "H200 NVL": (835e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "H100 PCIE": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H800": (989e12, 3.35e12),
    "H20": (148e12, 4.0e12),
    "A100": (312e12, 2.039e12),
    "A100 80GB PCIE": (312e12, 1.935e12),
    "A100 40GB": (312e12, 1.555e12),
    "A800": (312e12, 2.039e12),
    "L40S": (362e12, 0.864e12),
    "L40": (181e12, 0.864e12),
    "L4": (121e12, 0.300e12),
    "A10": (125e12, 0.600e12),
    "A10G": (70e12, 0.600e12),
    "RTX 4090": (165e12, 1.008e12),
    "RTX 5090": (209e12, 1.792e12),
    "MI300X": (1307e12, 5.3e12),
    "MI325X": (1307e12, 6.0e12),
    "MI355X": (2.5e15, 8.0e12),
}
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Device:
    """Describes one GPU, or several under tensor parallelism as if they were one.

    peak_flops: dense bf16 FLOP/s.  bandwidth: memory bytes/s.  step_overhead_seconds: scheduling
    and launch overhead of a step; pass_overhead_seconds: the same for a pass of the drafter.
    """

    name: str
    peak_flops: float
    bandwidth: float
    step_overhead_seconds: float = 0.0
    pass_overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, "peak_flops", "bandwidth")
        require_not_negative(self, "step_overhead_seconds", "pass_overhead_seconds")

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which compute is the bound (the roofline's ridge point)."""
        return self.peak_flops / self.bandwidth

    def with_typical_overheads(self) -> "Device":
        """Returns the same GPU with a serving engine's typical overhead per step and pass."""
        return replace(
            self,
            step_overhead_seconds=TYPICAL_STEP_OVERHEAD_SECONDS,
            pass_overhead_seconds=TYPICAL_PASS_OVERHEAD_SECONDS,
        )

    def with_tensor_parallel(self, gpus: int) -> "Device":
        """Returns `gpus` of them as one, without communication costs.  Raises InvalidShapeError."""
        if gpus < 1:
            raise InvalidShapeError(f"tensor parallelism over {gpus} GPUs: at least 1 is needed")
        return replace(self, peak_flops=gpus * self.peak_flops, bandwidth=gpus * self.bandwidth)


def device_from_data_sheet(driver_name: str) -> Device:
    """Returns the GPU of this driver name ("NVIDIA H100 80GB HBM3"), without overheads.

    It uses the longest entry whose words are all in the name.  Raises InvalidShapeError for a GPU
    that is not in the table.
    """
    words = set(re.split(r"[^A-Z0-9]+", driver_name.upper()))
    matching_keys = [key for key in DATA_SHEETS if set(key.split()) <= words]
    if not matching_keys:
        raise InvalidShapeError(
            f"no data sheet is known for the device {driver_name!r}; known are: "
            + ", ".join(DATA_SHEETS)
        )
    key = max(matching_keys, key=lambda k: len(k.split()))
    peak_flops, bandwidth = DATA_SHEETS[key]
    return Device(driver_name, peak_flops, bandwidth)


class Overlap(Enum):
    """Selects where compute and memory reads overlap in a verify pass.

    KERNELS: within each part; parts run one after the other, as an engine's kernels do.
    STEP: in the whole pass; no engine is faster.
    """

    KERNELS = "kernels"
    STEP = "step"


def experts_touched(experts: Experts, tokens: ArrayLike) -> Floats:
    """Returns the mean number of routed experts of one layer that `tokens` tokens need, k each.

    Draws are independent (a coupon collector), so that one token needs a little less than k.
    """
    draws = np.asarray(tokens, dtype=np.float64) * experts.experts_per_token
    if experts.experts == 1:
        return np.minimum(draws, 1.0)
    untouched_share: Floats = np.exp(draws * np.log1p(-1.0 / experts.experts))
    return experts.experts * (1.0 - untouched_share)


def step_seconds(
    shape: ModelShape,
    drafter: DrafterShape,
    device: Device,
    batch_sizes: ArrayLike,
    gammas: Sequence[int],
    kv_tokens: ArrayLike = 0.0,
    overlap: Overlap = Overlap.KERNELS,
) -> Floats:
    """Returns [gammas, batch_sizes], the seconds of a step.

    kv_tokens: sum of context lengths, one for all or [batch_sizes].  Raises InvalidShapeError for
    batch sizes, draft lengths or contexts out of range.
    """
    batch = _check_batch_sizes(batch_sizes)
    kv = _check_kv_tokens(kv_tokens, batch)
    for gamma in gammas:
        if gamma < 0:
            raise InvalidShapeError(f"a draft of {gamma} tokens: gamma must not be negative")
    passes = np.array([drafter.passes(gamma) for gamma in gammas], dtype=np.float64)[:, np.newaxis]
    width = np.array(gammas, dtype=np.float64)[:, np.newaxis] + 1.0
    pass_seconds = _pass_seconds(drafter, device, batch, kv) + device.pass_overhead_seconds
    verify = verify_seconds(shape, device, batch, width, kv, overlap)
    total: Floats = device.step_overhead_seconds + verify + passes * pass_seconds
    return total


def verify_seconds(
    shape: ModelShape,
    device: Device,
    batch: Floats,
    width: Floats,
    kv: Floats,
    overlap: Overlap = Overlap.KERNELS,
) -> Floats:
    """Returns the seconds of the target's pass over `width` tokens per sequence; broadcasts."""
    tokens = batch * width
    parts = [
        _weight_work(shape.dense_params, shape.bytes_per_weight, tokens),
        _weight_work(shape.head_params, shape.bytes_per_weight, tokens),
    ]
    if shape.experts is not None:
        parts.append(_expert_work(shape.experts, shape.bytes_per_weight, tokens))
    for kind, layers in shape.attention:
        if isinstance(kind, LinearAttention):
            flops, read_bytes = kind.token_flops * tokens, kind.state_bytes * batch
        else:
            flops = kind.pair_flops * width * kv
            read_bytes = shape.bytes_per_kv * (
                kind.context_elements * kv + kind.query_elements * tokens
            )
        parts.append((layers * flops, layers * read_bytes))
    if overlap is Overlap.STEP:
        compute = sum((flops for flops, _ in parts), np.zeros(1)) / device.peak_flops
        memory = sum((read_bytes for _, read_bytes in parts), np.zeros(1)) / device.bandwidth
        return np.maximum(compute, memory)
    return sum(
        (_bound_seconds(flops, read_bytes, device) for flops, read_bytes in parts), np.zeros(1)
    )


def kv_token_seconds(shape: ModelShape, drafter: DrafterShape, device: Device, gamma: int) -> float:
    """Returns the seconds that one context token of one sequence adds to a step at gamma."""
    seconds = 0.0
    for kind, layers in shape.attention:
        if not isinstance(kind, LinearAttention):
            compute_seconds = kind.pair_flops * (gamma + 1) / device.peak_flops
            memory_seconds = shape.bytes_per_kv * kind.context_elements / device.bandwidth
            seconds += layers * max(compute_seconds, memory_seconds)
    return seconds + drafter.passes(gamma) * drafter.kv_bytes_per_token / device.bandwidth


def prior_grid(
    arms: Sequence[Arm],
    drafters: Mapping[str, DrafterShape],
    buckets: Sequence[int],
    shape: ModelShape,
    device: Device,
) -> tuple[Floats, float]:
    """Returns [arms, buckets] seconds at kv = 0, and the seconds per KV token.

    The latter is the median over the arms.  Raises InvalidShapeError for an arm whose
    drafter has no shape.
    """
    if not arms:
        raise InvalidShapeError("a prior needs at least one arm")
    grid = np.empty((len(arms), len(buckets)))
    rates = []
    for i, arm in enumerate(arms):
        drafter = drafters.get(arm.drafter)
        if drafter is None:
            raise InvalidShapeError(
                f"no shape is given for drafter {arm.drafter!r}, only for {sorted(drafters)}"
            )
        grid[i] = step_seconds(shape, drafter, device, buckets, [arm.gamma])[0]
        rates.append(kv_token_seconds(shape, drafter, device, arm.gamma))
    return grid, float(np.median(rates))


def _pass_seconds(drafter: DrafterShape, device: Device, batch: Floats, kv: Floats) -> Floats:
    """Returns [batch_sizes], the seconds of one pass of the drafter."""
    if drafter.kind is DrafterKind.NGRAM:
        return np.zeros_like(batch)
    tokens = batch * max(1, drafter.block_size)
    flops, read_bytes = _weight_work(drafter.dense_params, drafter.bytes_per_weight, tokens)
    if drafter.experts is not None:
        expert_flops, expert_bytes = _expert_work(drafter.experts, drafter.bytes_per_weight, tokens)
        flops, read_bytes = flops + expert_flops, read_bytes + expert_bytes
    return _bound_seconds(flops, read_bytes + drafter.kv_bytes_per_token * kv, device)


def _weight_work(params: int, bytes_per_weight: float, tokens: Floats) -> tuple[Floats, Floats]:
    return 2.0 * params * tokens, np.full_like(tokens, params * bytes_per_weight)


def _expert_work(
    experts: Experts, bytes_per_weight: float, tokens: Floats
) -> tuple[Floats, Floats]:
    resident = experts.shared + experts_touched(experts, tokens)
    read = experts.layers * resident * experts.params_per_expert * bytes_per_weight
    return 2.0 * experts.active_params * tokens, read


def _bound_seconds(flops: Floats, read: Floats, device: Device) -> Floats:
    return np.maximum(flops / device.peak_flops, read / device.bandwidth)


def _check_batch_sizes(batch_sizes: ArrayLike) -> Floats:
    batch = np.asarray(batch_sizes, dtype=np.float64)
    if batch.ndim != 1 or batch.size == 0 or not (np.isfinite(batch).all() and batch.min() >= 1):
        raise InvalidShapeError(
            f"batch sizes {batch.tolist()} must be a list of numbers of 1 or more"
        )
    return batch


def _check_kv_tokens(kv_tokens: ArrayLike, batch: Floats) -> Floats:
    kv = np.asarray(kv_tokens, dtype=np.float64)
    if kv.shape not in {(), batch.shape}:
        raise InvalidShapeError(
            f"kv_tokens of shape {kv.shape} do not match {len(batch)} batch sizes"
        )
    if not (np.isfinite(kv).all() and kv.min() >= 0):
        raise InvalidShapeError("kv_tokens must be finite and not negative")
    return np.broadcast_to(kv, batch.shape)
