"""Checks the style of documents and docstrings by the rules in scripts/prose.yaml.

Proselint checks the documents, with the banned phrases as one more check of it. Its other checks do
not fit code, so there only the phrases are looked for, and fragments among the docstrings.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from proselint.checks import __register__ as proselint_checks
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckFlags, Padding, types
from proselint.registry.checks.engine import Fast, RegexOptions
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parent.parent
RULES = Path(__file__).with_suffix(".yaml")
_PHRASES = "house.phrases"
_CODE = re.compile(r"^ *```.*?^ *```|<!--.*?-->|`[^`\n]+`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL)
_Finding = tuple[int, str]


def main() -> int:
    """Prints what is wrong; returns 1 if more is wrong than the rules accept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="print accepted findings, too")
    parser.add_argument("--root", type=Path, default=ROOT, help="what to check (this repository)")
    parser.add_argument("--rules", type=Path, default=RULES, help="by default scripts/prose.yaml")
    options = parser.parse_args()
    rules = yaml.safe_load(options.rules.read_text(encoding="utf-8"))
    _register(rules["phrases"])
    failed = False
    for kind, findings in _findings(options.root, rules).items():
        accepted = rules["accepted"][kind]
        print(f"prose: {kind}: {len(findings)} findings, {accepted} accepted")
        if len(findings) > accepted or options.all:
            print("\n".join(findings))
        failed = failed or len(findings) > accepted
    return int(failed)


def _register(phrases: dict[str, str]) -> None:
    spaced = {phrase.replace(" ", r"\s+"): better for phrase, better in phrases.items()}
    CheckRegistry().register_many(
        (
            *proselint_checks,
            Check(
                types.PreferredForms(spaced, Padding.RAW),
                Fast(RegexOptions(case_insensitive=False)),
                _PHRASES,
                "instead of '{1}' write {0}",
                CheckFlags(allow_quotes=True),
            ),
        )
    )


def _findings(root: Path, rules: dict[str, Any]) -> dict[str, list[str]]:
    """Findings by kind, each as `path:line: what is wrong`."""
    findings_by_kind: dict[str, list[str]] = {"documents": [], "phrases": [], "docstrings": []}

    def add_findings(kind: str, path: Path, findings: Iterable[_Finding]) -> None:
        place = path.relative_to(root)
        findings_by_kind[kind] += (f"{place}:{line}: {message}" for line, message in findings)

    for path, text in _texts(root, rules["documents"]):
        add_findings("documents", path, _long_lines(text, rules["columns"]))
        prose = _CODE.sub(lambda code: re.sub(r"[^\n]", "·", code[0]), text)
        add_findings("documents", path, _lint(prose, {_PHRASES: True, **rules["proselint"]}))
    fragments = [re.compile(rule) for rule in rules["fragments"]]
    for path, text in _texts(root, rules["code"]):
        add_findings("phrases", path, _lint(text, {_PHRASES: True}))
        add_findings("docstrings", path, _fragments(text, fragments))
    return findings_by_kind


def _texts(root: Path, globs: Iterable[str]) -> Iterator[tuple[Path, str]]:
    for path in sorted({path for pattern in globs for path in root.glob(pattern)}):
        if not re.search(r"_pb2(_grpc)?\.py$", path.name):
            yield path, path.read_text(encoding="utf-8")


def _lint(text: str, checks: dict[str, bool]) -> Iterator[_Finding]:
    for result in LintFile("text", text).lint({"max_errors": 10_000, "checks": checks}):
        message = " ".join(result.check_result.message.split())
        yield result.pos[0], f"{message} ({result.check_result.check_path})"


def _long_lines(text: str, columns: int) -> Iterator[_Finding]:
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        visible_text = re.sub(r"\]\([^)\s]*\)|https?://\S+", "", line)
        if len(visible_text) > columns and not (in_code or fence or line.lstrip().startswith("|")):
            yield number, f"{len(visible_text)} columns, at most {columns} (house.columns)"


def _fragments(text: str, rules: list[re.Pattern[str]]) -> Iterator[_Finding]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            sentence = re.split(r"[.:;](?:\s|$)", " ".join(docstring.split()), maxsplit=1)[0]
            if sentence and any(rule.search(sentence) for rule in rules):
                yield node.body[0].lineno, f"docstring is a fragment: {sentence!r}"


if __name__ == "__main__":
    sys.exit(main())
