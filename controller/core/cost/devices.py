"""Lists GPUs by the two numbers that bound a step, as their makers publish them."""

import re
from dataclasses import dataclass, replace

from controller.core.model_shapes import (
    InvalidShapeError,
    require_not_negative,
    require_positive,
)

# What an engine of unknown speed adds.  A step: the overhead fitted for vLLM with
# Llama-3.1-8B on an H100 (SpecDecode-Bench, arXiv 2601.11580).  A pass: the median of the four D_0
# in TIDE, Table 5, where kernel launches and not the drafter's weights take the time.
TYPICAL_STEP_OVERHEAD_SECONDS = 1.2e-3
TYPICAL_PASS_OVERHEAD_SECONDS = 0.36e-3


@dataclass(frozen=True, slots=True)
class Device:
    """Describes one GPU, or several under tensor parallelism as if they were one.

    peak_flops: dense bf16 FLOP/s.  bandwidth: memory bytes/s.  step_overhead_seconds: what
    scheduling and launching take once a step; pass_overhead_seconds: once a pass of the drafter.
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
        """Returns the same GPU with what a serving engine adds to every step and pass."""
        return replace(
            self,
            step_overhead_seconds=TYPICAL_STEP_OVERHEAD_SECONDS,
            pass_overhead_seconds=TYPICAL_PASS_OVERHEAD_SECONDS,
        )

    def tensor_parallel(self, gpus: int) -> "Device":
        """Returns `gpus` of them as one, without their communication.  Raises InvalidShapeError."""
        if gpus < 1:
            raise InvalidShapeError(f"tensor parallelism over {gpus} GPUs: 1 is the least")
        return replace(self, peak_flops=gpus * self.peak_flops, bandwidth=gpus * self.bandwidth)


# Words of the driver's name -> (dense bf16 FLOP/s, bytes/s), from the makers' data sheets.
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


def device(driver_name: str) -> Device:
    """Returns the GPU of this driver name ("NVIDIA H100 80GB HBM3"), without overheads.

    Of the entries whose words are all in the name, the longest is taken.  Raises InvalidShapeError
    for a GPU that is not in the table.
    """
    words = set(re.split(r"[^A-Z0-9]+", driver_name.upper()))
    known = [key for key in DATA_SHEETS if set(key.split()) <= words]
    if not known:
        raise InvalidShapeError(
            f"no data sheet is known for the device {driver_name!r}; known are: "
            + ", ".join(DATA_SHEETS)
        )
    key = max(known, key=lambda k: len(k.split()))
    peak, bandwidth = DATA_SHEETS[key]
    return Device(driver_name, peak, bandwidth)
