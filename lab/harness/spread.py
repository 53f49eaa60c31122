"""The spread of a figure over repeats."""

from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of one figure, one for each repeat, in order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)

    def as_json(self) -> dict[str, Any]:
        """The spread as it stands in a result file."""
        return {
            "median": round(self.median, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "repeats": [round(value, 4) for value in self.values],
        }
