"""Registers the modules of the check that are plugins of the engines that it starts.

Each acts only in an engine that has its variable.
"""

from pathlib import Path

from lab.gpu_check import acceptance, float32_rmsnorm, shim_time, syncs
from lab.harness.engine_environment import register_plugins

MODULES = (acceptance, float32_rmsnorm, shim_time, syncs)


def environment(folder: Path) -> dict[str, str]:
    """Registers the plugins in a folder; returns the variable with which engines find them."""
    return register_plugins(folder, *MODULES)
