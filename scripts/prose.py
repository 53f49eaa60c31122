"""Checks the style of documents and docstrings by the rules in scripts/prose.yaml.

Proselint checks the documents, with the banned phrases as one more check of it. Its other checks do
not fit code: there only the comments and texts are searched, for the phrases, and the docstrings
for fragments.
"""

import argparse
import ast
import io
import itertools
import re
import sys
import tokenize
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
_PROTO_MARKS = re.compile(r"^ *// ?", re.MULTILINE)
# What is not prose in a document: blocks of code, comments, tables, headings; then marks of lists.
_NOT_SENTENCES = re.compile(
    r"^ *```.*?^ *```|<!--.*?-->|^ *\|.*?$|^#.*?$", re.MULTILINE | re.DOTALL
)
_PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )")
_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)[.!?][*_)\]\"']*\s+")
_QUOTES = re.compile(r"^#|^[A-Za-z]*[\"']+|[\"']+$")
# Python 3.12 has the tokens of f-strings.
_PROSE_TOKENS = {
    getattr(tokenize, name)
    for name in ("COMMENT", "STRING", "FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
    if hasattr(tokenize, name)
}
_SPACE_TOKENS = {tokenize.NL, tokenize.INDENT, tokenize.DEDENT}
_Finding = tuple[int, str]


def main() -> int:
    """Prints what is wrong; returns 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="what to check (this repository)")
    parser.add_argument("--rules", type=Path, default=RULES, help="by default scripts/prose.yaml")
    options = parser.parse_args()
    rules = yaml.safe_load(options.rules.read_text(encoding="utf-8"))
    _register(rules["phrases"])
    findings_by_kind = _findings(options.root, rules)
    for kind, findings in findings_by_kind.items():
        print("\n".join([f"prose: {kind}: {len(findings)} findings", *findings]))
    return int(any(findings_by_kind.values()))


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
        add_findings("documents", path, _long_sentences(text, rules["words_per_sentence"]))
        prose = _CODE.sub(_mask, text)
        add_findings("documents", path, _lint(prose, {_PHRASES: True, **rules["proselint"]}))
    for path, text in _texts(root, rules["code"]):
        prose = _PROTO_MARKS.sub("", text) if path.suffix == ".proto" else _prose_of_code(text)
        add_findings("phrases", path, _lint(prose, {_PHRASES: True}))
    fragments = [re.compile(rule) for rule in rules["fragments"]]
    for path, text in _texts(root, rules["docstrings"]):
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


def _long_sentences(text: str, words_max: int) -> Iterator[_Finding]:
    """Yields one finding if the average sentence outside of code and tables is too long."""
    prose = _CODE.sub("code", _NOT_SENTENCES.sub("\n\n", text))
    sentences = [
        len(words)
        for paragraph in _PARAGRAPH_END.split(prose)
        for sentence in _SENTENCE_END.split(paragraph + "\n")
        if (words := re.findall(r"\S*\w\S*", sentence))
    ]
    average = sum(sentences) / max(1, len(sentences))
    if average > words_max:
        yield 1, f"{average:.1f} words a sentence, at most {words_max} (house.sentences)"


def _mask(text: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "·", text[0])


def _prose_of_code(text: str) -> str:
    """Returns the comments and the texts of a module, each character in its place.

    Only spaces separate those that follow each other, so that a phrase which begins in one and ends
    in the next is found. A text of a single word is not prose.
    """
    prose = list(re.sub(r"[^\n]", "·", text))
    for spans in _runs_of_prose(text):
        begin, end = spans[0].start, spans[-1].stop
        if re.search(r"\s", text[begin:end]):
            prose[begin:end] = re.sub(r"[^\n]", " ", text[begin:end])
            for span in spans:
                prose[span] = _QUOTES.sub(lambda quotes: " " * len(quotes[0]), text[span])
    return "".join(prose)


def _runs_of_prose(text: str) -> Iterator[list[slice]]:
    """Yields the places of comments and texts that nothing else separates."""
    line_starts = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    run: list[slice] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _PROSE_TOKENS:
            (line, column), (end_line, end_column) = token.start, token.end
            run.append(
                slice(line_starts[line - 1] + column, line_starts[end_line - 1] + end_column)
            )
        elif run and token.type not in _SPACE_TOKENS:
            yield run
            run = []


def _fragments(text: str, rules: list[re.Pattern[str]]) -> Iterator[_Finding]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            sentence = re.split(r"[.:;](?:\s|$)", " ".join(docstring.split()), maxsplit=1)[0]
            if sentence and any(rule.search(sentence) for rule in rules):
                yield node.body[0].lineno, f"docstring is a fragment: {sentence!r}"


if __name__ == "__main__":
    sys.exit(main())
