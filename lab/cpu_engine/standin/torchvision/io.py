"""Stub of ``torchvision.io``."""

from __future__ import annotations

from ._placeholder import TorchvisionPlaceholder, placeholder


def __getattr__(name: str) -> TorchvisionPlaceholder:
    return placeholder(__name__, name)
