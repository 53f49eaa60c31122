"""Declares a setting: its default, unit and range, what it trades, and how it was found."""

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final

_METADATA: Final = "setting"


@dataclass(frozen=True, slots=True)
class SettingText:
    """Describes a setting in documents.

    unit: for example "s", "steps" or "share".  low, high: the range, inclusive; `is_open`: without
    `low` itself.  trades: what a larger value gains and loses.  tuned: how the default was found.
    """

    unit: str
    low: float
    high: float
    trades: str
    tuned: str
    is_open: bool = False

    @property
    def range_text(self) -> str:
        """Returns the range in interval notation."""
        bracket = "(" if self.is_open else "["
        high = "∞)" if math.isinf(self.high) else f"{self.high:g}]"
        return f"{bracket}{self.low:g}, {high}"

    def allows(self, value: float) -> bool:
        """Returns whether a value is in the range."""
        return self.low <= value <= self.high and not (self.is_open and value == self.low)


def setting(
    default: float,
    unit: str,
    low: float,
    high: float,
    trades: str,
    tuned: str,
    *,
    is_open: bool = False,
) -> Any:
    """Returns a dataclass field with its description, for the declaration of a setting."""
    text = SettingText(unit, low, high, trades, tuned, is_open)
    return field(default=default, metadata={_METADATA: text})


def setting_text(declared: "Field[Any]") -> SettingText | None:
    """Returns the description of a dataclass field; None if it is not declared by `setting`."""
    text: SettingText | None = declared.metadata.get(_METADATA)
    return text


def require_ranges(settings: Any) -> None:
    """Raises ValueError for the first setting that is not a finite number in its range."""
    for declared in fields(settings):
        text, value = setting_text(declared), getattr(settings, declared.name)
        if text is None:
            continue
        if not math.isfinite(value):
            raise ValueError(f"{declared.name} must be a finite number, not {value!r}")
        if not text.allows(value):
            raise ValueError(f"{declared.name} must be in {text.range_text}, not {value!r}")
