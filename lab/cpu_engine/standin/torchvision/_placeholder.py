"""What every name of the stub is bound to."""

from __future__ import annotations

from typing import NoReturn


class MissingTorchvisionError(NotImplementedError):
    """Something of torchvision was used where only the import-time stub is installed."""


class TorchvisionPlaceholder:
    """Can be imported and passed around; using it raises ``MissingTorchvisionError``."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def _refuse(self) -> NoReturn:
        raise MissingTorchvisionError(
            f"{self.__name__} is a stub: images are not supported here; install torchvision"
        )

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith(
            "__"
        ):  # introspection (inspect, pickle, doctest) asks and expects AttributeError
            raise AttributeError(name)
        self._refuse()


def placeholder(module: str, name: str) -> TorchvisionPlaceholder:
    """What ``module.__getattr__(name)`` answers; dunder names stay absent."""
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return TorchvisionPlaceholder(f"{module}.{name}")
