"""Makes the environment variables of an engine's processes.

Steering: the address of its sidecar, its name there, and its draft lengths.

Plugins: SGLang finds them by the entry points of installed distributions.  The lab is in no wheel,
so a run writes the metadata of a distribution into a folder on the engines' path.

Dumps: after a crash SGLang's launcher first waits 5 seconds, runs py-spy on its schedulers, asks
CUDA for a core dump of each, and waits 60 seconds for those.  A run of the lab has its logs
instead, and the next engine needs the memory of the device.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

_CLONE = Path(__file__).resolve().parents[2]
_CRASH_DUMP_DEFAULTS = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}


def without_crash_dumps(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that switch dumps off, but for those that the environment has."""
    return {name: value for name, value in _CRASH_DUMP_DEFAULTS.items() if name not in environment}


def steered_by(address: str, engine_id: str, gammas: Iterable[int] = ()) -> dict[str, str]:
    """Returns the variables of an engine that a sidecar steers, by the name engine_id.

    gammas: its draft lengths; none for those that the plugin chooses.
    """
    variables = {"SPECULATION_SIDECAR": address, "SPECULATION_ENGINE_ID": engine_id}
    lengths = ",".join(map(str, gammas))
    return variables | {"SPECULATION_GAMMAS": lengths} if lengths else variables


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
