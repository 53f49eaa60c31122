"""Names the parts of the check and reads a choice of them."""

from lab.harness.errors import HarnessError

# Methods of the check, in the order in which they run.
PARTS = ("exact", "learning", "graphs", "costs", "arms", "switches", "asleep", "overhead")
DEFAULT_PARTS = ("exact", "learning", "graphs", "costs")
ALL = "all"
# The name of `costs` in earlier versions.
_ALIASES = {"profile": "costs"}


class UnknownPartError(HarnessError):
    """A part was asked for that does not exist."""


def parse_parts(given: str) -> tuple[str, ...]:
    """Reads names separated by commas, or "all"; returns them in the order in which they run.

    Raises UnknownPartError, also when no part is named.
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    wanted = {_ALIASES.get(name, name) for name in names}
    if ALL in wanted:
        wanted = (wanted - {ALL}) | set(PARTS)
    if not wanted or wanted - set(PARTS):
        unknown = ", ".join(sorted(wanted - set(PARTS))) or repr(given)
        raise UnknownPartError(
            f"--parts {unknown} is unknown: choose from {', '.join(PARTS)}, or {ALL}"
        )
    return tuple(part for part in PARTS if part in wanted)
