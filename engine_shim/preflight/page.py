"""The answer for people, as wide as their terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from engine_shim.common.checks import Check
from engine_shim.common.verdict import Verdict

_ONLY_AT_THE_START: Final = (
    "Only the start itself can tell whether the engine's package lets every hook take, and whether "
    "the drafter drafts. If something is missing then, the engine does not start and names it."
)
_LEFT_OUT: Final = (
    "They are not taken from a running engine, because they may name code, files or secrets; what "
    "matters of them goes after `--`."
)


def page(verdict: Verdict, width: int) -> str:
    """Returns the lines of an answer.

    width: columns of the terminal; a path or an option is not broken, and may exceed them.
    """
    return "\n".join(_lines(verdict, max(40, width))) + "\n"


def printable(words: str) -> str:
    """Returns words of others without what could command a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


def _lines(verdict: Verdict, width: int) -> Iterator[str]:
    would = "would be steered" if verdict.is_steered else "would not be steered"
    if verdict.starts and not verdict.is_steered:
        would = "would start, and gain nothing from its drafter"
    yield from _wrapped(f"{verdict.engine} {verdict.version}: this engine {would}.", "", width)
    if verdict.left_out:
        yield from _wrapped(f"Not looked at: {', '.join(verdict.left_out)}. {_LEFT_OUT}", "", width)
    yield ""
    topics = [*(check.topic for check in verdict.checks), *verdict.facts]
    column = max(map(len, topics))
    for check in verdict.checks:
        yield from _check_lines(check, column, width)
    for topic, found in verdict.facts.items():
        yield from _wrapped(f"yes  {topic:{column}}  {found}", " " * (column + 7), width)
    if not verdict.is_steered:
        return
    yield ""
    yield "It would steer"
    names = max((len(drafter.name) for drafter in verdict.drafters), default=0)
    for drafter in verdict.drafters:
        lengths = ",".join(map(str, drafter.gammas))
        yield printable(f"  {drafter.name:{names}}  draft lengths {lengths}")
    if verdict.memory is not None:
        yield ""
        yield "Memory"
        for line in verdict.memory.lines:
            yield from _wrapped(f"  {line}", "  ", width)
    yield ""
    yield "In the engine's environment"
    for name, value in verdict.variables.items():
        yield printable(f"  {name}={value}")
    yield ""
    yield from _wrapped(_ONLY_AT_THE_START, "", width)


def _check_lines(check: Check, column: int, width: int) -> Iterator[str]:
    answer = "no" if check.obstacle else "yes"
    yield from _wrapped(
        f"{answer:3}  {check.topic:{column}}  {check.found}", " " * (column + 7), width
    )
    if check.obstacle:
        yield from _wrapped(f"     -> {check.obstacle}", " " * 8, width)
    if check.advice:
        yield from _wrapped(f"     !  {check.advice}", " " * 8, width)


def _wrapped(line: str, indent: str, width: int) -> list[str]:
    """Breaks a line between words only, so that paths and options can be copied."""
    plain = printable(line)
    if len(plain) <= width:
        return [plain.rstrip()]
    # The columns in front of the first word stay as they are.
    return textwrap.wrap(
        plain, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip
