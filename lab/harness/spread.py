"""Values of repeats."""

from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of the repeats, in order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Middle one."""
        return median(self.values)

    @property
    def low(self) -> float:
        """Smallest one."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Largest one."""
        return max(self.values)

    def as_json(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "median": round(self.median, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "repeats": [round(value, 4) for value in self.values],
        }
