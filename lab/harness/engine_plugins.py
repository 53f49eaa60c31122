"""Registers SGLang plugins that belong to a run, and not to an installed package.

SGLang finds plugins by the entry points of installed distributions.  The lab is in no wheel, so a
run writes the metadata of a distribution into a folder on the engines' path.
"""

import os
from pathlib import Path
from types import ModuleType

_CLONE = Path(__file__).resolve().parents[2]


def register_plugins(folder: Path, *modules: ModuleType) -> dict[str, str]:
    """Registers modules, whose function `register` SGLang then calls in each of its processes.

    Returns the variable of an engine that is to find them.
    """
    info = folder / "lab_plugins-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ("Metadata-Version: 2.1", "Name: lab-plugins", "Version: 0")
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    names = [module.__name__ for module in modules]
    entries = [f"{name.replace('.', '_')} = {name}:register" for name in names]
    (info / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *entries]) + "\n")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys([str(folder), *inherited, str(_CLONE), str(_CLONE / "proto")])
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
