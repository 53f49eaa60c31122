"""The link's state in plain values, for an engine's own interfaces."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_shim.link.engine_link import EngineLink


def link_status(link: EngineLink | None) -> dict[str, Any]:
    """Returns every field of `LinkStatus`; nothing without a link.

    An enum by its name; None for what JSON has no number for; anything else as it is.
    """
    fields = {} if link is None else asdict(link.status())
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    return None if isinstance(value, float) and not isfinite(value) else value
