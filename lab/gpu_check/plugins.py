"""Registers modules of the check as SGLang plugins of the engines that it starts.

SGLang finds plugins by the entry points of installed distributions; the check is in no wheel, so it
writes the metadata of one into a folder on the engine's path.  Each module acts only in an engine
that has its variable.
"""

import os
from pathlib import Path

from lab.gpu_check import acceptance, float32_rmsnorm, shim_time, syncs

_MODULES = (acceptance, float32_rmsnorm, shim_time, syncs)
_CLONE = str(Path(__file__).parents[2])


def environment(folder: Path) -> dict[str, str]:
    """Writes the metadata into a folder; returns the variable with which engines find it."""
    info = folder / "gpu_check_plugins-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ("Metadata-Version: 2.1", "Name: gpu-check-plugins", "Version: 0")
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    names = [module.__name__ for module in _MODULES]
    entries = [f"{name.replace('.', '_')} = {name}:register" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *entries]) + "\n")
    parts = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep), _CLONE]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, parts)))}
