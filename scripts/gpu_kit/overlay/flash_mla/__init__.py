"""Replaces sgl-flash-mla, which SGLang imports while it captures drafts.

SGLang calls it for latent attention only, and such models are not measured with the kit.
"""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_arguments: object, **_named: object) -> None:
        raise NotImplementedError(f"flash_mla.{name}: the kit has no kernels of latent attention")

    return refuse
