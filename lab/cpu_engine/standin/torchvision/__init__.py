"""A stub of torchvision: SGLang's modules import it, text models never use it."""

from __future__ import annotations

from . import io as io
from . import transforms as transforms

__version__ = "0.28.0"
