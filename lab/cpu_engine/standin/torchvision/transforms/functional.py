"""Stub of ``torchvision.transforms.functional``."""

from __future__ import annotations

from enum import Enum

from .._placeholder import TorchvisionPlaceholder, placeholder


class InterpolationMode(Enum):
    """The real enumeration: Transformers reads its members while it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> TorchvisionPlaceholder:
    return placeholder(__name__, name)
