"""Makes the text that the shipped models learn from: four domains any CPython can produce offline.

``code`` and ``prose`` come from the standard library (source without docstrings; docstrings and the
language reference in ``pydoc_data``).  ``json`` and ``csv`` are seeded synthetic documents.  The
domains differ in entropy on purpose: a speculation controller has something to decide only where
the best draft length differs between requests.

For one Python version and one seed every function here is deterministic.
"""

import ast
import json
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lab.cpu_engine.models.prompts import DOMAINS, LONGEST_PROMPT, PASSAGES

VOCABULARY_SIZE: Final = 1024
DOCUMENT_TOKEN: Final = "<doc>"  # noqa: S105  # a vocabulary entry, not a secret
DOCUMENT_TOKEN_ID: Final = 0

VALIDATION_FRACTION: Final = 0.08
"""Share of each domain's documents that no training step may see."""

SKIPPED_FOLDERS: Final = frozenset(
    {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings", "idle_test"}
)
_SHORTEST_PROSE: Final = 60
"""Characters; shorter docstrings are mostly one-line signatures."""

_CITIES: Final = (
    ("Paris", "75001"), ("Oslo", "01500"), ("Lima", "15001"), ("Cairo", "11511"),
    ("Delhi", "11000"),
)  # fmt: skip
_USERS: Final = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy")
_TAGS: Final = ("red", "green", "blue", "alpha", "beta", "gamma")
_KINDS: Final = ("click", "view", "buy")
_STATIONS: Final = ("north", "south", "east", "west")

TokenIds = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Split:
    """One domain as two token streams, every document opened by ``DOCUMENT_TOKEN_ID``."""

    train: TokenIds
    validation: TokenIds


def documents(seed: int = 0) -> dict[str, list[str]]:
    """Makes all documents by domain, shuffled within the domain by ``seed``."""
    code: list[str] = []
    prose: list[str] = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            body, docstrings = _split_docstrings(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # a few library files are deliberately not valid UTF-8 or not valid Python
        code.append(body)
        prose.extend(docstrings)
    prose.extend(topics[name] for name in sorted(topics))

    rng = random.Random(seed)
    rng.shuffle(code)
    rng.shuffle(prose)
    return {
        "code": code,
        "prose": prose,
        "json": list(_json_documents(rng, count=1000)),
        "csv": list(_csv_documents(rng, count=2500)),
    }


def train_tokenizer(texts: Mapping[str, list[str]]) -> Tokenizer:
    """Trains a byte-level BPE of exactly ``VOCABULARY_SIZE`` entries.

    Digits stay single tokens, so that counting up is a matter of carrying and not of remembering
    merged numbers.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # A bounded sample per domain: otherwise the long standard-library files would take every merge.
    sample = [
        text[:20_000]
        for domain in DOMAINS
        for text in texts[domain][: 3000 if domain == "prose" else 400]
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[DOCUMENT_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def tokenize(texts: Mapping[str, list[str]], tokenizer: Tokenizer) -> dict[str, Split]:
    """Makes token streams by domain; the last ``VALIDATION_FRACTION`` of documents is held out."""
    splits = {}
    for domain in DOMAINS:
        domain_documents = texts[domain]
        held_out = max(1, round(len(domain_documents) * VALIDATION_FRACTION))
        splits[domain] = Split(
            _stream(domain_documents[:-held_out], tokenizer),
            _stream(domain_documents[-held_out:], tokenizer),
        )
    return splits


def passages(validation: TokenIds) -> TokenIds:
    """Cuts evenly spaced stretches of a held-out stream, [PASSAGES, LONGEST_PROMPT]."""
    starts = np.linspace(0, len(validation) - LONGEST_PROMPT, PASSAGES).astype(int)
    return np.stack([validation[start : start + LONGEST_PROMPT] for start in starts])


def _stream(texts: Sequence[str], tokenizer: Tokenizer) -> TokenIds:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts)):
        ids.append(DOCUMENT_TOKEN_ID)
        ids.extend(encoding.ids)
    return np.array(ids, dtype=np.uint16)


def _split_docstrings(source: str) -> tuple[str, list[str]]:
    """Returns the source without docstring lines, and the docstrings worth reading."""
    docstring_lines: set[int] = set()
    docstrings: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        statement = node.body[0]
        docstring_lines.update(
            range(statement.lineno - 1, statement.end_lineno or statement.lineno)
        )
        if len(docstring) > _SHORTEST_PROSE:
            docstrings.append(docstring)
    remaining_lines = (
        line for number, line in enumerate(source.split("\n")) if number not in docstring_lines
    )
    return "\n".join(remaining_lines), docstrings


def _json_documents(rng: random.Random, count: int) -> Iterator[str]:
    """Yields documents of eight account records: ids count up, event times are evenly spaced."""
    for _ in range(count):
        indent = rng.choice((None, 2))
        first_id = rng.randrange(10_000, 90_000)
        clock = 1_700_000_000 + rng.randrange(10**6)
        spacing = rng.choice((1, 10, 60))
        records = []
        for row in range(8):
            user = rng.choice(_USERS)
            city, zip_code = rng.choice(_CITIES)
            events = []
            for _ in range(rng.randrange(1, 4)):
                clock += spacing
                events.append({"time": clock, "kind": rng.choice(_KINDS)})
            record = {
                "id": first_id + row,
                "user": user,
                "email": f"{user}@example.org",
                "active": rng.random() < 0.8,
                "score": rng.randrange(0, 100),
                "tags": rng.sample(_TAGS, rng.randrange(1, 3)),
                "address": {"city": city, "zip": zip_code},
                "events": events,
            }
            records.append(json.dumps(record, indent=indent))
        yield "\n".join(records)


def _csv_documents(rng: random.Random, count: int) -> Iterator[str]:
    """Yields documents of one table whose index counts up while the value takes random steps."""
    for _ in range(count):
        index, value, step = rng.randrange(100, 900), rng.randrange(200, 800), rng.randrange(2, 30)
        minute, offset = rng.randrange(60), rng.randrange(len(_STATIONS))
        rows = ["index,time,station,value,change,flag"]
        for row in range(rng.randrange(15, 40)):
            change = rng.randrange(-step, step + 1)
            value = min(999, max(100, value + change))
            station = _STATIONS[(row + offset) % len(_STATIONS)]
            hours, minutes = divmod(minute + 5 * row, 60)
            flag = "up" if change > 0 else "down" if change < 0 else "same"
            rows.append(
                f"{index + row},{8 + hours:02d}:{minutes:02d},{station},{value},{change},{flag}"
            )
        yield "\n".join(rows)
