"""Writes the results in docs/learning.md from docs/results; with --check, only compares."""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from lab.learning.headline import KEPT, Kept, Paper, kept_results, verdict_text

PAGE: Final = Path(__file__).resolve().parent.parent / "docs/learning.md"
_BEGIN: Final = "<!-- Written by scripts/learning_results.py from docs/results. -->"
_END: Final = "<!-- The end of what scripts/learning_results.py writes. -->"


class PageError(ValueError):
    """The page has no place for the results."""


def written(page: str, results: Mapping[str, Kept]) -> str:
    """Returns the page with these results.  Raises PageError."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise PageError(f"the lines {_BEGIN!r} and {_END!r} are needed, in this order")
    return "\n".join([before + begin, "", *_sections(results), end + after])


def _sections(results: Mapping[str, Kept]) -> Iterator[str]:
    for paper in Paper:
        found = {name: kept for name, kept in results.items() if kept.headline.paper is paper}
        if found:
            yield f"### {paper}: what reproduces?"
            yield ""
            yield "| claim | here | command |"
            yield "|---|---|---|"
            for name, kept in found.items():
                headline = kept.headline
                verdict = verdict_text(name, headline.verdict)
                yield f"| {headline.title} | {verdict} | `{kept.command}` |"
            yield ""
            for name, kept in found.items():
                yield from _section(name, kept)


def _section(name: str, kept: Kept) -> Iterator[str]:
    headline = kept.headline
    yield f"#### {headline.title}"
    yield ""
    yield from _paragraph(f"*Claim.* {headline.claim}")
    yield from _paragraph(f"*Here.* {headline.setup}")
    yield _row(headline.columns)
    yield len(headline.columns) * "|---" + "|"
    yield from map(_row, headline.rows)
    yield ""
    verdict = f"**It {verdict_text(name, headline.verdict)}.** {headline.because}"
    yield from _paragraph(f"{verdict} (`{kept.command}`, {kept.seconds:.0f} s)")


def _row(cells: tuple[str, ...]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _paragraph(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
    yield ""


def main() -> int:
    """Writes or compares the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--file", type=Path, default=PAGE, help="by default docs/learning.md")
    parser.add_argument("--results", type=Path, default=KEPT, help="by default docs/results")
    arguments = parser.parse_args()
    path: Path = arguments.file
    page = path.read_text(encoding="utf-8")
    try:
        made = written(page, kept_results(arguments.results))
    except ValueError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return 1
    if not arguments.check:
        path.write_text(made, encoding="utf-8")
    elif made != page:
        print(f"{path.name} is not what the results say; run python scripts/learning_results.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
