"""Checks that names say what they stand for, by the rules in scripts/names.yaml.

A variable names its content, and a function is a verb with a noun.  What a rule forbids is
forbidden everywhere: no file and no name is exempt.  Only definitions are checked (of attributes,
those of `self`), and not those fields of a class that mirror a field of the contract (proto/),
which names them.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
RULES = Path(__file__).with_suffix(".yaml")
_GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
_CONTRACT_FIELD = re.compile(r"^\s*(?:repeated |optional )?[\w.<>, ]+ (\w+) = \d+", re.MULTILINE)


def main() -> int:
    """Prints each forbidden name; returns 1 if there is any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="by default every tracked Python file")
    options = parser.parse_args()
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    forbidden = {
        kind: {re.compile(pattern): hint for pattern, hint in patterns.items()}
        for kind, patterns in rules.items()
    }
    contract = {
        name
        for path in (ROOT / "proto").rglob("*.proto")
        for name in _CONTRACT_FIELD.findall(path.read_text(encoding="utf-8"))
    }
    findings = 0
    for path in options.files or _tracked_files():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError) as error:
            findings += 1
            print(f"{_shown(path)}: cannot be parsed: {error}")
            continue
        for line, kind, name in _defined_names(tree, contract):
            hint = _hint(forbidden[kind], name)
            if hint is not None:
                findings += 1
                print(f"{_shown(path)}:{line}: {kind} {name!r}: {hint}")
    print(f"names: {findings} findings")
    return int(findings > 0)


def _tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not _GENERATED.search(path.name)]


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _defined_names(tree: ast.AST, contract: Collection[str]) -> Iterator[tuple[int, str, str]]:
    """Yields line, kind (a key of the rules) and name of everything that a module defines."""
    mirrored = {
        field.target
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and field.target.id in contract
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name() if node in mirrored:
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, "function", node.name
            case ast.ClassDef():
                yield node.lineno, "class", node.name
            case ast.arg():
                yield node.lineno, "variable", node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, "variable", node.id
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store(), attr=name):
                yield node.lineno, "variable", name
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
                | ast.alias(asname=str(name))
            ):
                yield node.lineno, "variable", name


def _hint(rules: Mapping[re.Pattern[str], str], name: str) -> str | None:
    return next(
        (
            hint
            for rule, hint in rules.items()
            if rule.fullmatch(name.strip("_").lower() if name.isupper() else name.strip("_"))
        ),
        None,
    )


if __name__ == "__main__":
    sys.exit(main())
