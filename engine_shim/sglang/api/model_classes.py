"""Finds the class by which SGLang runs a checkpoint, and by which of its methods that can draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

# How SGLang names classes that draft from the target's hidden states.
_DRAFT_NAMES: Final = ("Eagle", "NextN", "MTP")
_OWN_MODELS: Final = "sglang.srt.models."
# What SGLang drafts with by the algorithm, in its order of flags; "" drafts by none.
EAGLE3, EAGLE, DFLASH, DSPARK, NONE = "EAGLE3", "EAGLE", "DFLASH", "DSPARK", ""


def model_class(architectures: Sequence[str]) -> type | None:
    """Returns the class that SGLang's registry has for the first architecture that it knows."""
    from sglang.srt.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    found: Any = next((ModelRegistry.models[name] for name in architectures if name in known), None)
    return found if isinstance(found, type) else None


def is_declared(architectures: Sequence[str]) -> bool:
    """Whether SGLang's package has a class that this machine lacks a library for."""
    from sglang.srt import models

    declarations = tuple(f"class {name}(" for name in architectures)
    return any(
        declaration in file.read_text(encoding="utf-8")
        for folder in models.__path__
        for file in Path(folder).rglob("*.py")
        for declaration in declarations
    )


def drafts_by(model: type) -> str | None:
    """Returns the algorithm that SGLang drafts by with a class, NONE for a language model.

    None for a class from elsewhere (SGLANG_EXTERNAL_MODEL_PACKAGE), of which nothing is known.
    """
    from sglang.srt.models.dflash import DFlashDraftModel

    # Its classes build on DFlash's.
    if "DSpark" in model.__name__:
        return DSPARK
    if issubclass(model, DFlashDraftModel):
        return DFLASH
    if hasattr(model, "get_hot_token_id"):
        return EAGLE3
    if not model.__module__.startswith(_OWN_MODELS):
        return None
    return EAGLE if any(part in model.__name__ for part in _DRAFT_NAMES) else NONE


def drafters_of(algorithm: str) -> list[str]:
    """Returns the names of SGLang's classes that draft by an algorithm."""
    from sglang.srt.models.registry import ModelRegistry

    return sorted(
        name
        for name in ModelRegistry.get_supported_archs()
        if isinstance(found := ModelRegistry.models[name], type) and drafts_by(found) == algorithm
    )
