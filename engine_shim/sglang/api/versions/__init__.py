"""Describes the differences of the tested SGLang versions, in one module for each.

All modules have the same names; the newest one documents them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

TESTED: Final = ("0.5.21", "0.5.22", "0.5.23")


def sglang_version() -> str:
    """Returns the version of the installed SGLang; "" if it is not installed as a distribution."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def module_for(sglang: str) -> Any:
    """Returns the module of a version; the newest module for an untested version."""
    name = sglang if sglang in TESTED else TESTED[-1]
    return import_module(f"{__name__}.v{name.replace('.', '_')}")
