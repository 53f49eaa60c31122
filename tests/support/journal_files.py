"""Journals as earlier versions wrote them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from controller.store.journal_import import line_checksum


def record(sequence: int, override_id: str, body: str, **changes: Any) -> dict[str, Any]:
    """A change: set to a body, or cleared by "" (its trace is kept for ever, unless said)."""
    return {
        "sequence": sequence,
        "at": 1_700_000_000.0 + sequence,
        "action": "set" if body else "clear",
        "author": "ann",
        "reason": "because",
        "origin": "uid 1000",
        "before": "" if body else "1",
        "override_id": override_id,
        "revision": sequence,
        "body": body,
        "until": None if body else 9e9,
        "ended": "" if body else "cleared",
    } | changes


def lines(records: Iterable[dict[str, Any]]) -> bytes:
    texts = (json.dumps(r, separators=(",", ":"), sort_keys=True).encode() for r in records)
    return b"".join(line_checksum(text) + b" " + text + b"\n" for text in texts)


def write_journal(folder: Path, records: Iterable[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "overrides.journal"
    path.write_bytes(lines(records))
    return path
