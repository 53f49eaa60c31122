"""Checks that package READMEs are complete: each names every module of its package, and no other.

A package without a README is described by the nearest one above it.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("controller", "simulator", "engine_shim", "trainer", "lab", "tools")
_NAMED = re.compile(r"`([\w./*-]+)`")
_PATH = re.compile(r"`([\w/*]+(?:\.py|/))`")


def main() -> int:
    """Prints what the READMEs lack or name wrongly; returns 1 if there is any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="what to check (this repository)")
    root = parser.parse_args().root
    findings = [finding for tree in TREES for finding in _tree_findings(root / tree, root)]
    print("\n".join([*findings, f"package READMEs: {len(findings)} findings"]))
    return int(bool(findings))


def _tree_findings(tree: Path, root: Path) -> Iterator[str]:
    if not (tree / "README.md").is_file():
        yield f"{tree.relative_to(root)}: there is no README.md"
        return
    for module in sorted(tree.rglob("*.py")):
        if module.name not in ("__init__.py", "__main__.py"):
            readme = next(p / "README.md" for p in module.parents if (p / "README.md").is_file())
            if not _names(readme) & {module.name, module.stem}:
                yield f"{readme.relative_to(root)}: does not name {module.name}"
    for readme in sorted(tree.rglob("README.md")):
        for name in _PATH.findall(readme.read_text(encoding="utf-8")):
            if not (any(readme.parent.rglob(name)) or any((*tree.glob(name), *root.glob(name)))):
                yield f"{readme.relative_to(root)}: {name} does not exist"


def _names(readme: Path) -> set[str]:
    """The last parts of all paths between backticks."""
    return {name.rsplit("/", 1)[-1] for name in _NAMED.findall(readme.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    sys.exit(main())
