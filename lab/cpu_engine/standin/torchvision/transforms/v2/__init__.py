"""Stub of ``torchvision.transforms.v2``."""

from __future__ import annotations

from ..._placeholder import TorchvisionPlaceholder, placeholder
from ..functional import InterpolationMode as InterpolationMode
from . import functional as functional


def __getattr__(name: str) -> TorchvisionPlaceholder:
    return placeholder(__name__, name)
