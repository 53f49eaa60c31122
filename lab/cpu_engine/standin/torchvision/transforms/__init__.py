"""Stub of ``torchvision.transforms``."""

from __future__ import annotations

from .._placeholder import TorchvisionPlaceholder, placeholder
from . import functional as functional
from . import v2 as v2
from .functional import InterpolationMode as InterpolationMode


def __getattr__(name: str) -> TorchvisionPlaceholder:
    return placeholder(__name__, name)
