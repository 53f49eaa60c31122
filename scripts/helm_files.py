"""Copies what the Helm chart shares with the other manifests into it; with --check, only compares.

A chart can hold no links out of its own folder.
"""

import argparse
import sys
from pathlib import Path

_DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
_SIDECAR = _DEPLOY / "kubernetes" / "components" / "sidecar"
SHARED = (
    _SIDECAR / "pod.yaml",
    _SIDECAR / "controller.yaml",
    _DEPLOY / "monitoring" / "alerts.yml",
)
FILES = _DEPLOY / "helm" / "speculation-controller" / "files"


def main() -> int:
    """Copies or compares the files; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--folder", type=Path, default=FILES, help="by default that of the chart")
    arguments = parser.parse_args()
    different = []
    for source in SHARED:
        copy: Path = arguments.folder / source.name
        content = source.read_bytes()
        if not arguments.check:
            copy.write_bytes(content)
        elif not copy.is_file() or copy.read_bytes() != content:
            different.append(copy.name)
    if different:
        print(f"{', '.join(different)} of the chart differ: run python scripts/helm_files.py")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
