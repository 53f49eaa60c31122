"""Stub of ``torchvision.io``."""

from __future__ import annotations

from ._placeholder import Placeholder, placeholder


def __getattr__(name: str) -> Placeholder:
    return placeholder(__name__, name)
