"""Operators that SGLang imports from here and that dense text models never call."""

from __future__ import annotations

from . import __getattr__ as __getattr__
