"""Refuses to publish wheels that do not belong to a tag, or that have reserved names as addresses.

python scripts/release_ready.py v0.2.0 dist
"""

import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

_WHEELS = frozenset(
    f"speculation-controller{suffix}" for suffix in ("", "-shim", "-simulator", "-trainer")
)
# Top-level domains that RFC 2606 reserves for documents and tests.
_RESERVED = (".example", ".invalid", ".test")


def faults(tag: str, folder: Path) -> Iterator[str]:
    """Yields what is wrong with the wheels in a folder, one line for each fault."""
    wheels = [_metadata(path) for path in sorted(folder.glob("*.whl"))]
    names = {str(wheel["Name"]) for wheel in wheels}
    if names != _WHEELS:
        yield f"{folder} has to hold the wheels {sorted(_WHEELS)}, and holds {sorted(names)}"
    for wheel in wheels:
        name, version = wheel["Name"], wheel["Version"]
        if tag != f"v{version}":
            yield f"{name} has version {version}, the tag is {tag}: set the version in __init__.py"
        for address in wheel.get_all("Project-URL", []):
            host = address.partition("://")[2].partition("/")[0]
            if host.endswith(_RESERVED):
                yield f"{name}: {address} is a reserved name: edit [project.urls]"


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def main(arguments: list[str]) -> int:
    """Prints the faults; returns 1 if there are any."""
    tag, folder = arguments
    release_faults = list(faults(tag, Path(folder)))
    for fault in release_faults:
        print(f"release: {fault}", file=sys.stderr)
    return 1 if release_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
