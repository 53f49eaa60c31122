"""Checks that a command of the lab can import what it needs, which no wheel installs for it."""

from importlib.util import find_spec


def require(command: str, *modules: str) -> None:
    """Ends the program with advice when one of the modules cannot be imported."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{command} needs modules that cannot be imported: {', '.join(missing)}.\n"
            "Either run it with the environment that `make setup` makes in the clone "
            "(.venv/bin/python; PYTHON=.venv/bin/python for make),\n"
            "or install this project beside SGLang, in the root of the clone: "
            "pip install . ./engine_shim aiohttp psutil"
        )
