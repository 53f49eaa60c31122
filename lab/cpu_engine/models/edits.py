"""Makes code edits from CPython's sources: a request to change a file, and the changed file.

An edit of each kind takes one function or class of the standard library:

  check      each function shall refuse arguments that are None
  describe   each function shall have a docstring with a section for each part of its signature
  document   its docstrings were taken out, and are to be written
  guard      each function shall refuse to run while a feature is switched off
  licence    the file shall begin with the notice of its licence
  log        each function shall log its arguments first
  rename     one local name shall have another name

The answer repeats the file, with changes, so most of it can be copied from the prompt.  What
`describe`, `guard` and `licence` add is the same text in every file, as boilerplate is: the prompt
does not contain it, and a model that has learnt it writes it without a mistake.
"""

import ast
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.cpu_engine.models.corpus import DOCUMENT_TOKEN_ID, SKIPPED_FOLDERS, VALIDATION_FRACTION

KINDS: Final = ("check", "describe", "document", "guard", "licence", "log", "rename")
# Tokens of an edit with its prompt; the names that a rename may introduce.
_LEAST_TOKENS, _MOST_TOKENS = 100, 1000
_NEW_NAMES: Final = ("first", "item", "entry", "result", "current", "found", "source", "total")
_NOTICE: Final = """\
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License from the Apache Software Foundation.
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.

"""
_GUARD: Final = (
    "if not features.is_enabled(FEATURE):",
    '    log.warning("called while the feature is switched off: nothing was done")',
    '    raise RuntimeError("this feature is switched off; ask the administrator")',
)
_IGNORED: Final = -100

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Edit:
    """Holds one edit as text: its kind, what the request says, and the answer."""

    kind: str
    request: str
    answer: str


@dataclass(frozen=True, slots=True)
class EncodedEdit:
    """Holds one edit as token ids.

    prompt: the request between two document tokens.  answer: ends with a document token.
    """

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EditSplit:
    """Holds the edits that a model may learn from, and those from other files."""

    train: tuple[EncodedEdit, ...]
    validation: tuple[EncodedEdit, ...]


def code_edits(tokenizer: Tokenizer, seed: int = 0) -> EditSplit:
    """Makes all edits of the running Python's library; files are split, and not edits."""
    paths = list(_paths())
    rng = random.Random(seed)
    rng.shuffle(paths)
    held_out = max(1, round(len(paths) * VALIDATION_FRACTION))

    def encode_files(selected_paths: Sequence[Path]) -> tuple[EncodedEdit, ...]:
        edits = [edit for path in selected_paths for edit in edits_of(_read(path), rng)]
        return tuple(_encode(edits, tokenizer))

    return EditSplit(encode_files(paths[:-held_out]), encode_files(paths[-held_out:]))


def _paths() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            yield path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""  # a few library files are deliberately not valid UTF-8


def edits_of(source: str, rng: random.Random) -> Iterator[Edit]:
    """Makes the edits of a file, several of each function and class; none of an invalid file."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        block = lines[first - 1 : node.end_lineno]
        if any("\t" in line for line in block):
            continue
        text = "\n".join(line[node.col_offset :] for line in block) + "\n"
        try:
            parsed = ast.parse(text)
        except SyntaxError:
            continue  # a string of several lines has lost its margin
        yield from filter(None, _edits_of(text, parsed, rng))


def _edits_of(text: str, tree: ast.Module, rng: random.Random) -> Iterator[Edit | None]:
    """Makes an edit of each kind, in their order; None where there is nothing to change."""
    bare = without_docstrings(text, tree)
    yield _insert_at_start("check", "# Check the arguments.", bare, _checks)
    yield _insert_at_start("describe", "# Describe the functions.", bare, _docstring)
    if bare != text:
        yield Edit("document", f"# Write the docstrings.\n{bare}", text)
    yield _insert_at_start("guard", "# Guard the functions.", bare, lambda _: list(_GUARD))
    yield Edit("licence", f"# Add the licence.\n{bare}", _NOTICE + bare)
    yield _insert_at_start("log", "# Log the arguments.", bare, _log_call)
    yield _rename(bare, tree, rng)


def without_docstrings(text: str, tree: ast.Module) -> str:
    """Returns the source without the lines of its docstrings."""
    docstring_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef) and ast.get_docstring(node):
            statement = node.body[0]
            if len(node.body) > 1 and statement.col_offset > node.col_offset:
                docstring_lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    remaining_lines = (
        line for number, line in enumerate(text.split("\n"), 1) if number not in docstring_lines
    )
    return "\n".join(remaining_lines)


def _log_call(function: Function) -> list[str]:
    names = _arguments(function)
    placeholders = "".join(f" {name}=%r" for name in names)
    values = "".join(f", {name}" for name in names)
    return [f'log.debug("{function.name}{placeholders}"{values})']


def _checks(function: Function) -> list[str]:
    lines = []
    for name in _arguments(function):
        lines.append(f"if {name} is None:")
        lines.append(f'    raise TypeError("{function.name}: {name} must not be None")')
    return lines


def _docstring(function: Function) -> list[str]:
    lines = ['"""Does what its name says.', "", "Args:"]
    lines += [f"    {name}: the value that is used." for name in _arguments(function)]
    return [
        *lines, "", "Returns:", "    The result, or None if there is nothing to return.",
        "", "Raises:", "    ValueError: if one of the arguments is out of range.", '"""',
    ]  # fmt: skip


def _insert_at_start(
    kind: str, instruction: str, bare: str, make_lines: Callable[[Function], list[str]]
) -> Edit | None:
    """Makes an edit that begins every function with new lines; None if there is nothing to add."""
    lines = bare.split("\n")
    functions = [node for node in ast.walk(ast.parse(bare)) if isinstance(node, Function)]
    added = 0
    # From the last one up, so that the numbers of the lines before it stay right.
    for node in sorted(functions, key=lambda node: -node.lineno):
        statement = node.body[0]
        first = min(
            [statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]
        )
        if first == node.lineno:
            return None
        new_lines = [" " * statement.col_offset + line for line in make_lines(node)]
        lines[first - 1 : first - 1] = new_lines
        added += len(new_lines)
    return Edit(kind, f"{instruction}\n{bare}", "\n".join(lines)) if added else None


def _arguments(function: Function) -> list[str]:
    return [a.arg for a in function.args.args if a.arg not in ("self", "cls")]


def _rename(bare: str, tree: ast.Module, rng: random.Random) -> Edit | None:
    if not bare.isascii() or not isinstance(tree.body[0], Function):
        return None
    names = [node for node in ast.walk(ast.parse(bare)) if isinstance(node, ast.Name)]
    assignment_counts = Counter(node.id for node in names if isinstance(node.ctx, ast.Store))
    if not assignment_counts:
        return None
    old, new = assignment_counts.most_common(1)[0][0], rng.choice(_NEW_NAMES)
    if re.search(rf"\b{new}\b", bare) or len(old) < 2:
        return None
    lines = bare.split("\n")
    # From the last one backwards, so that the places before it stay right.
    for node in sorted(names, key=lambda node: (-node.lineno, -node.col_offset)):
        if node.id == old:
            line = lines[node.lineno - 1]
            end = node.col_offset + len(old)
            lines[node.lineno - 1] = line[: node.col_offset] + new + line[end:]
    return Edit("rename", f"# Rename {old} to {new}.\n{bare}", "\n".join(lines))


def _encode(edits: Sequence[Edit], tokenizer: Tokenizer) -> Iterator[EncodedEdit]:
    requests = tokenizer.encode_batch([edit.request for edit in edits])
    answers = tokenizer.encode_batch([edit.answer for edit in edits])
    for edit, request, answer in zip(edits, requests, answers, strict=True):
        encoded_edit = EncodedEdit(
            edit.kind,
            (DOCUMENT_TOKEN_ID, *request.ids, DOCUMENT_TOKEN_ID),
            (*answer.ids, DOCUMENT_TOKEN_ID),
        )
        if _LEAST_TOKENS <= len(encoded_edit.prompt) + len(encoded_edit.answer) <= _MOST_TOKENS:
            yield encoded_edit


class EditSampler:
    """Draws batches of edits of similar length, the kinds by their weights.

    tokens: the approximate number in a batch, padding included.
    """

    def __init__(
        self, edits: Sequence[EncodedEdit], weights: Mapping[str, float], tokens: int, seed: int
    ) -> None:
        self._tokens = tokens
        self._rng = np.random.default_rng(seed)
        ordered = sorted(edits, key=lambda edit: len(edit.prompt) + len(edit.answer))
        self._by_kind = {kind: [edit for edit in ordered if edit.kind == kind] for kind in weights}
        self._shares = np.array(list(weights.values())) / sum(weights.values())

    def draw(self) -> tuple[Tensor, Tensor]:
        """Draws tokens [batch, length] and aims [batch, length - 1], where -100 does not count."""
        place = self._rng.uniform()
        rows: list[tuple[int, ...]] = []
        while True:
            kind = str(self._rng.choice(list(self._by_kind), p=self._shares))
            edits = self._by_kind[kind]
            spread = max(1, len(edits) // 50)
            index = int(place * len(edits)) + int(self._rng.integers(-spread, spread + 1))
            edit = edits[min(max(index, 0), len(edits) - 1)]
            rows.append((*edit.prompt, *edit.answer))
            if (len(rows) + 1) * max(map(len, rows)) > self._tokens:
                break
        return padded(rows)


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Returns tokens [batch, length] with document tokens behind each row, and aims of each."""
    width = max(map(len, rows))
    tokens: npt.NDArray[np.int64] = np.full((len(rows), width), DOCUMENT_TOKEN_ID, dtype=np.int64)
    aims: npt.NDArray[np.int64] = np.full((len(rows), width - 1), _IGNORED, dtype=np.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
        aims[number, : len(row) - 1] = row[1:]
    return torch.from_numpy(tokens), torch.from_numpy(aims)


EDITS_FILE: Final = "edits.npz"


def save_edits(edits: Sequence[EncodedEdit], folder: Path) -> None:
    """Writes edits that no model has learnt from."""
    rows = [*(edit.prompt for edit in edits), *(edit.answer for edit in edits)]
    np.savez_compressed(
        folder / EDITS_FILE,
        kinds=np.array([edit.kind for edit in edits]),
        tokens=np.concatenate([np.array(row, dtype=np.uint16) for row in rows]),
        ends=np.cumsum([len(row) for row in rows]),
    )


def load_edits(folder: Path) -> tuple[EncodedEdit, ...]:
    """Reads what `save_edits` has written."""
    with np.load(folder / EDITS_FILE) as archive:
        kinds: list[str] = archive["kinds"].tolist()
        rows = [tuple(row.tolist()) for row in np.split(archive["tokens"], archive["ends"][:-1])]
    prompts, answers = rows[: len(kinds)], rows[len(kinds) :]
    return tuple(map(EncodedEdit, kinds, prompts, answers))
