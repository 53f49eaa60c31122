"""Writes the results in docs/learning.md from docs/results; with --check, only compares."""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from lab.learning.headline import RESULTS_FOLDER, Paper, StoredResult, load_results, verdict_text

PAGE: Final = Path(__file__).resolve().parent.parent / "docs/learning.md"
_BEGIN: Final = "<!-- Written by scripts/learning_results.py from docs/results. -->"
_END: Final = "<!-- The end of what scripts/learning_results.py writes. -->"


class PageError(ValueError):
    """The page has no place for the results."""


def render_page(page: str, results: Mapping[str, StoredResult]) -> str:
    """Returns the page with these results.  Raises PageError."""
    head, begin, remainder = page.partition(_BEGIN)
    _, end, tail = remainder.partition(_END)
    if not begin or not end:
        raise PageError(f"the lines {_BEGIN!r} and {_END!r} are needed, in this order")
    return "\n".join([head + begin, "", *_sections(results), end + tail])


def _sections(results: Mapping[str, StoredResult]) -> Iterator[str]:
    for paper in Paper:
        paper_results = {
            name: result for name, result in results.items() if result.headline.paper is paper
        }
        if paper_results:
            yield f"### {paper}: what reproduces?"
            yield ""
            yield "| claim | here | command |"
            yield "|---|---|---|"
            for name, result in paper_results.items():
                headline = result.headline
                verdict = verdict_text(name, headline.verdict)
                yield f"| {headline.title} | {verdict} | `{result.command}` |"
            yield ""
            for name, result in paper_results.items():
                yield from _section(name, result)


def _section(name: str, result: StoredResult) -> Iterator[str]:
    headline = result.headline
    yield f"#### {headline.title}"
    yield ""
    yield from _paragraph(f"*Claim.* {headline.claim}")
    yield from _paragraph(f"*Here.* {headline.setup}")
    yield _row(headline.columns)
    yield len(headline.columns) * "|---" + "|"
    yield from map(_row, headline.rows)
    yield ""
    verdict = f"**It {verdict_text(name, headline.verdict)}.** {headline.because}"
    yield from _paragraph(f"{verdict} (`{result.command}`, {result.seconds:.0f} s)")


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
    parser.add_argument(
        "--results", type=Path, default=RESULTS_FOLDER, help="by default docs/results"
    )
    arguments = parser.parse_args()
    path: Path = arguments.file
    page = path.read_text(encoding="utf-8")
    try:
        new_page = render_page(page, load_results(arguments.results))
    except ValueError as error:
        print(f"{path.name}: {error}", file=sys.stderr)
        return 1
    if not arguments.check:
        path.write_text(new_page, encoding="utf-8")
    elif new_page != page:
        print(f"{path.name} is not what the results say; run python scripts/learning_results.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
