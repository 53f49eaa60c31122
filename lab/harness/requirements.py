"""Checks that a command of the lab can import what it needs, which no wheel installs for it."""

from importlib.util import find_spec


def require(command: str, *modules: str) -> None:
    """Ends the program with advice when one of the modules cannot be imported."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{command} needs the modules {', '.join(missing)}, which cannot be imported. Run it "
            "with the environment that `make setup` makes in the clone, or install them beside "
            "SGLang and both wheels."
        )
