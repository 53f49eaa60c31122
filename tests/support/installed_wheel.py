"""A version of an engine as text: what it says, without importing (or running) any of it."""

import ast
import copy
import hashlib
import subprocess
import sys
import zipfile
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from engine_shim.sglang.api.versions import sglang_version
from tests.support.engine import ROOT

Definition = ast.FunctionDef | ast.ClassDef


@cache
def unpack_sglang(version: str) -> Path:
    """The folder that holds `sglang` of a version: installed, or fetched from the package index."""
    if version == sglang_version():
        spec = find_spec("sglang")
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).parents[1]
    return fetch_wheel("sglang", version)


def fetch_wheel(package: str, version: str) -> Path:
    """The unpacked wheel of a package, from the package index; once for a checkout."""
    folder = ROOT / "build" / f"{package}-{version}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as place:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--dest", place, f"{package}=={version}"], check=True)
            (archive,) = Path(place).glob("*.whl")
            unpacked_folder = Path(place) / "unpacked"
            zipfile.ZipFile(archive).extractall(unpacked_folder)
            with suppress(OSError):  # another worker may have been quicker
                unpacked_folder.rename(folder)
    return folder


class Wheel:
    """One version's source: SGLang's, or what lies in a folder."""

    def __init__(self, version: str, folder: Path | None = None) -> None:
        self._folder = folder or unpack_sglang(version)
        self._modules: dict[str, ast.Module] = {}

    def module(self, name: str) -> ast.Module:
        """A module by its dotted name."""
        if name not in self._modules:
            path = self._folder.joinpath(*name.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._modules[name] = ast.parse(file.read_text())
        return self._modules[name]

    def definition(self, target: str) -> Definition:
        """A function, method or class by its dotted name."""
        parts = target.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                body: list[ast.stmt] = self.module(".".join(parts[:cut])).body
            except FileNotFoundError:
                continue
            node: Definition | None = None
            for name in parts[cut:]:
                node = next(
                    (n for n in body if isinstance(n, Definition) and n.name == name),
                    None,
                )
                assert node is not None, f"{target}: {name} no longer exists"
                body = node.body
            assert node is not None
            return node
        raise AssertionError(f"{target}: this module no longer exists")

    def parameters(self, target: str) -> str:
        """The parameters of a function as Python writes them, without annotations."""
        function = self.definition(target)
        assert isinstance(function, ast.FunctionDef)
        arguments = copy.deepcopy(function.args)
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return ast.unparse(arguments)

    def fields(self, target: str) -> set[str]:
        """Annotated names in a class's body (a dataclass's fields) and names its methods assign."""
        names: set[str] = set()
        for node in ast.walk(self.definition(target)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
        return names

    def digest(self, target: str) -> str:
        """Fingerprint of a definition's code; comments and docstrings do not count."""
        tree = copy.deepcopy(self.definition(target))
        for node in ast.walk(tree):
            if isinstance(node, Definition) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]

    def calls(self, target: str) -> set[str]:
        """Everything a function calls, by the last part of its name."""
        names: set[str] = set()
        for node in ast.walk(self.definition(target)):
            if isinstance(node, ast.Call):
                function = node.func
                if isinstance(function, ast.Attribute):
                    names.add(function.attr)
                elif isinstance(function, ast.Name):
                    names.add(function.id)
        return names
