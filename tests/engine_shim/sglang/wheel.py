"""The installed SGLang as text: what it says, without importing (or running) any of it."""

import ast
import copy
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def folder() -> Path:
    """Where the wheel was installed."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def module(name: str) -> ast.Module:
    """A module by its dotted name."""
    path = folder().joinpath(*name.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


Definition = ast.FunctionDef | ast.ClassDef


def definition(target: str) -> Definition:
    """A function, method or class by its dotted name."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            body: list[ast.stmt] = module(".".join(parts[:cut])).body
        except FileNotFoundError:
            continue
        found: Definition | None = None
        for name in parts[cut:]:
            found = next(
                (n for n in body if isinstance(n, Definition) and n.name == name),
                None,
            )
            assert found is not None, f"{target}: SGLang has no {name} any more"
            body = found.body
        assert found is not None
        return found
    raise AssertionError(f"{target}: SGLang has no such module any more")


def parameters(target: str) -> str:
    """The parameters of a function as Python writes them, without annotations."""
    function = definition(target)
    assert isinstance(function, ast.FunctionDef)
    arguments = copy.deepcopy(function.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def fields(target: str) -> set[str]:
    """Annotated names in a class's body (a dataclass's fields) and names its methods assign."""
    found: set[str] = set()
    for node in ast.walk(definition(target)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def digest(target: str) -> str:
    """Fingerprint of a definition's code; comments and docstrings do not count."""
    tree = copy.deepcopy(definition(target))
    for node in ast.walk(tree):
        if isinstance(node, Definition) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def calls(target: str) -> set[str]:
    """Everything a function calls, by the last part of its name."""
    names: set[str] = set()
    for node in ast.walk(definition(target)):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                names.add(function.attr)
            elif isinstance(function, ast.Name):
                names.add(function.id)
    return names
