"""Suggests known names in place of an unknown one."""

import difflib
from collections.abc import Iterable

# Most names that a text suggests.
_NAMES_MAX = 3


def suggestion_text(unknown_name: str, known_names: Iterable[str]) -> str:
    """Returns "did you mean A, B, C?" with the most similar names, the most similar one first."""
    names = difflib.get_close_matches(unknown_name, sorted(known_names), _NAMES_MAX, cutoff=0.0)
    return f"did you mean {', '.join(names)}?"
