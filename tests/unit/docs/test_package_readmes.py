"""Every package has a short README whose modules and folders are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Their contents are described one level up.
INSIDE = {
    "simulator/commands", "simulator/peers", "simulator/report", "api/versions", "lab/standin",
}  # fmt: skip


def packages() -> list[Path]:
    folders = {ROOT / "tests", ROOT / "controller" / "page"}
    for top in ("controller", "simulator", "engine_shim", "trainer", "lab"):
        folders |= {path.parent for path in (ROOT / top).rglob("__init__.py")}
    return sorted(path for path in folders if not any(inside in str(path) for inside in INSIDE))


@pytest.mark.parametrize("package", packages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_has_a_readme_that_names_what_is_there(package: Path):
    text = (package / "README.md").read_text(encoding="utf-8")
    if package.name != "models":
        assert len(text.splitlines()) <= 30
    places = (package, ROOT / "controller", ROOT)
    modules = re.findall(r"`([\w/*]+\.py)`", text)
    folders = re.findall(r"`([\w/]+/)`", text)
    for name in [*modules, *folders]:
        assert any(list(place.glob(name)) for place in places), name
