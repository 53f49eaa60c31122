"""A stub of torchvision: SGLang's modules import it, text models never use it."""

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

__version__ = "0.28.0"


class MissingTorchvisionError(NotImplementedError):
    """A part of torchvision was used where only the import-time stub is installed."""


class TorchvisionPlaceholder:
    """Can be imported and passed around; using it raises ``MissingTorchvisionError``."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Always raises MissingTorchvisionError."""
        raise MissingTorchvisionError(
            f"{self.__name__} is a stub: images are not supported here; install torchvision"
        )

    def __getattr__(self, name: str) -> NoReturn:
        # Introspection (inspect, pickle, doctest) asks for dunder names and expects this error.
        if name.startswith("__"):
            raise AttributeError(name)
        self()


class InterpolationMode(Enum):
    """The real enumeration: Transformers reads its members while it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Submodule(ModuleType):
    """A submodule in which every other name is a placeholder."""

    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> TorchvisionPlaceholder:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return TorchvisionPlaceholder(f"{self.__name__}.{name}")


for _name in (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _module = _Submodule(f"{__name__}.{_name}")
    _module.__spec__ = ModuleSpec(_module.__name__, None, is_package=True)
    sys.modules[_module.__name__] = _module
    _parent, _, _child = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
