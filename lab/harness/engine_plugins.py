"""Registers SGLang plugins that belong to a run, and not to an installed package."""

import os
from pathlib import Path

# The engine imports a plugin's module, which is in no wheel, from the clone.
_CLONE = Path(__file__).resolve().parents[2]


def register_plugin(folder: Path, name: str, target: str) -> dict[str, str]:
    """Declares an entry point in a folder; returns the variable with which an engine finds it.

    target: MODULE:FUNCTION; SGLang calls it in each of its processes.
    """
    info = folder / f"{name.replace('-', '_')}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ("Metadata-Version: 2.1", f"Name: {name}", "Version: 0")
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys([str(folder), *inherited, str(_CLONE), str(_CLONE / "proto")])
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
