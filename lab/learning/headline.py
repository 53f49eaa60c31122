"""A claim of a paper, and what small models show of it: table, verdict, reason, and the page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import Any, Final, Self

from pydantic import TypeAdapter

from controller.recording.html_page import html_document as html_page
from controller.recording.html_page import html_table, inline_svg, new_figure
from lab.harness.measured import run_facts
from lab.harness.terminal import Terminal

RESULTS_FOLDER: Final = Path(__file__).resolve().parents[2] / "docs/results"
# Claims that no paper has measured: there is nothing to reproduce, so their verdicts have other
# words.  The stride that adapts is future work in the paper, the predictor is a drafter that it
# does not look at, and the window is an approximation of this project.
OWN_CLAIMS: Final = frozenset({"tts-choice", "tts-predictor", "tts-window"})


class Paper(StrEnum):
    """The papers whose claims are looked at, in the order of docs/learning.md."""

    TTS = "Test-Time Speculation"
    TIDE = "TIDE"
    SD2 = "SD²"
    SPECFORGE = "SpecForge"


class Verdict(StrEnum):
    """Whether the results here agree with the paper's claim.

    UNCHECKED: they neither confirm nor contradict it.
    """

    REPRODUCES = "reproduces"
    PARTLY = "reproduces in part"
    NOT = "does not reproduce"
    UNCHECKED = "cannot be checked"

    @classmethod
    def from_parts(cls, *, full: bool, part: bool) -> Self:
        """Returns REPRODUCES if the whole claim holds, PARTLY if a part of it does, else NOT."""
        return cls.REPRODUCES if full else cls.PARTLY if part else cls.NOT


_OWN_CLAIM_TEXTS: Final = {
    Verdict.REPRODUCES: "holds here",
    Verdict.PARTLY: "holds here in part",
    Verdict.NOT: "does not hold here",
}


def verdict_text(name: str, verdict: Verdict) -> str:
    """Returns the words after "It" for the verdict of `python -m lab.learning NAME`."""
    return _OWN_CLAIM_TEXTS.get(verdict, verdict) if name in OWN_CLAIMS else verdict


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of the picture: (x, y) pairs."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Headline:
    """The result of one command.

    claim: what the paper says, with its section or table.  setup: what was run here.  columns,
    rows: the table, cells with their spread over repeats.  because: why the verdict is what it is,
    in whole sentences.  facts: the numbers behind the table, as JSON has them.  curves, axes: of
    the picture, if there is one.  Raises ValueError where a row does not fit the columns.
    """

    paper: Paper
    title: str
    claim: str
    setup: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    verdict: Verdict
    because: str
    facts: dict[str, Any] = field(default_factory=dict)
    curves: tuple[Curve, ...] = ()
    axes: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(self.columns)}")

    def show(self, name: str, terminal: Terminal) -> None:
        """Prints all but the facts.  name: of the command."""
        terminal.table(f"{self.paper}: {self.title}", list(self.columns), [*map(list, self.rows)])
        terminal.say(f"Claim: {self.claim}")
        terminal.say(f"Here: {self.setup}")
        terminal.say(f"It {verdict_text(name, self.verdict)}. {self.because}")


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result in a file, with how it was made.

    command: that makes it again.  seconds: that the run took.  run: machine and versions, as in
    every result file.
    """

    headline: Headline
    command: str
    seconds: float
    run: dict[str, Any]


_RESULT_ADAPTER: Final = TypeAdapter(StoredResult)


def store_result(name: str, headline: Headline, seeds: int, seconds: float, folder: Path) -> None:
    """Writes the result of `python -m lab.learning NAME` to `NAME.json` of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {fact: value for fact, value in run_facts().items() if fact != "command"}
    command = f"python -m lab.learning {name} --seeds {seeds}"
    stored_result = StoredResult(headline, command, round(seconds, 1), run)
    text = _RESULT_ADAPTER.dump_json(stored_result, indent=1).decode()
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def load_results(folder: Path) -> dict[str, StoredResult]:
    """Reads the results of a folder, by name.  Raises ValueError for a file that has no result."""
    paths = sorted(folder.glob("*.json"))
    return {
        path.stem: _RESULT_ADAPTER.validate_json(path.read_text(encoding="utf-8")) for path in paths
    }


def page(result: Mapping[str, Any]) -> str:
    """Makes one self-contained HTML file."""
    machine = result["machine"]
    machine_text = (
        f"{machine['processor']}, {machine['cores']} cores; {result['seconds']:.0f} s; "
        f"<code>{escape(' '.join(result['command']))}</code>. Ratios inside one claim can be "
        "compared; times of different claims were taken at different moments."
    )
    body = [f"<h1>What updating and steering a drafter does</h1><p>{machine_text}</p>"]
    body += [
        _claim_section(name, part)
        for name, part in result.items()
        if isinstance(part, dict) and "claim" in part
    ]
    return html_page("Lab", "".join(body))


def _claim_section(name: str, claim_result: Mapping[str, Any]) -> str:
    """Makes the section of a `Headline`."""
    title = f"{claim_result['paper']}: {claim_result['title']}"
    words = [f"Claim: {claim_result['claim']}", f"Here: {claim_result['setup']}"]
    words.append(
        f"It {verdict_text(name, Verdict(claim_result['verdict']))}. {claim_result['because']}"
    )
    picture = ""
    if claim_result["curves"]:
        figure = new_figure(8, 3.6)
        axes = figure.subplots()
        for curve in claim_result["curves"]:
            x_values, y_values = zip(*curve["points"], strict=True)
            axes.plot(x_values, y_values, marker="o", label=curve["label"])
        axes.set_xlabel(claim_result["axes"][0])
        axes.set_ylabel(claim_result["axes"][1])
        axes.legend()
        picture = inline_svg(figure, title)
    table_html = html_table(claim_result["columns"], claim_result["rows"], label=title)
    text = "".join(f"<p>{escape(sentence)}</p>" for sentence in words)
    return f"<h2>{escape(title)}</h2>{picture}{table_html}{text}"
