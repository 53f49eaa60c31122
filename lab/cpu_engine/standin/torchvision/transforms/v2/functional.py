"""Stub of ``torchvision.transforms.v2.functional``."""

from __future__ import annotations

from ..._placeholder import Placeholder, placeholder
from ..functional import InterpolationMode as InterpolationMode


def __getattr__(name: str) -> Placeholder:
    return placeholder(__name__, name)
