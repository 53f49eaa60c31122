"""Dependencies point one way: cli -> service -> core, and the two packages meet only in proto."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE_SIDE = {"engine_shim", "sglang", "torch", "transformers"}


def modules(package: str) -> list[str]:
    """Paths of a package's modules, relative to the repository root."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """Dotted names that a module imports, at its top or anywhere inside.

    A relative import stays inside its package and is left out.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path: str) -> set[str]:
    return {name.split(".")[0] for name in imported((ROOT / path).read_text())}


@pytest.mark.parametrize("path", modules("controller"))
def test_the_sidecar_knows_nothing_of_the_engine_side(path: str):
    assert not packages(path) & ENGINE_SIDE


@pytest.mark.parametrize("path", modules("controller/core"))
def test_the_core_imports_numpy_at_most(path: str):
    names = [
        name
        for name in imported((ROOT / path).read_text())
        if name.split(".")[0] not in {*sys.stdlib_module_names, "numpy"}
    ]
    assert [name for name in names if not name.startswith("controller.core.")] == []


@pytest.mark.parametrize("path", modules("engine_shim"))
def test_the_shim_does_not_import_the_sidecar(path: str):
    assert "controller" not in packages(path)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a.b as c", ["a.b"]),
        ("from a import b, c", ["a.b", "a.c"]),
        ("def f():\n    from a.b import c", ["a.b.c"]),
        ("from . import a\nfrom .b import c", []),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, names: list[str]):
    assert list(imported(source)) == names


@pytest.mark.parametrize("module", ["controller.cli", "controller.service", "controller.core"])
def test_what_the_sidecar_loads_brings_no_engine_in(module: str):
    code = f"import {module}, sys; print(*sorted({ENGINE_SIDE!r} & sys.modules.keys()))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []
