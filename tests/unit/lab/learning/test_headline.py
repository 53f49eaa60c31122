"""A claim's result: as a table, in a file, and in the document that is written from the files."""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from lab.learning import headline
from lab.learning.headline import (
    OWN_CLAIMS,
    Curve,
    Headline,
    Paper,
    Verdict,
    load_results,
    store_result,
)

ROOT = Path(__file__).resolve().parents[4]
HEADLINE = Headline(
    Paper.TTS,
    "Gain by length",
    "Longer answers gain more (Table 1).",
    "Two lengths | one drafter.",
    ("tokens", "gain"),
    (("100", "1.02 (1.01 to 1.03)"), ("1000", "1.40 (1.35 to 1.42)")),
    Verdict.PARTLY,
    "The gain grows, and the shortest answers lose nothing.",
    {"gain": [1.02, 1.4]},
    (Curve("gain", ((100.0, 1.02), (1000.0, 1.4))),),
    ("tokens", "gain"),
)
PAGE = """# Title

<!-- Written by scripts/learning_results.py from docs/results. -->
what was there before
<!-- The end of what scripts/learning_results.py writes. -->
last line
"""


def run(page: Path, results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/learning_results.py", "--file", str(page)]
    command += ["--results", str(results), *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )  # fmt: skip


def test_a_kept_result_is_read_again_and_says_its_command(tmp_path: Path) -> None:
    store_result("tts-length", HEADLINE, 3, 12.34, tmp_path)
    kept = load_results(tmp_path)["tts-length"]
    assert kept.headline == HEADLINE
    assert kept.command == "python -m lab.learning tts-length --seeds 3"
    assert kept.seconds == 12.3


def test_the_page_is_written_from_the_results_and_compared(tmp_path: Path) -> None:
    page, results = tmp_path / "learning.md", tmp_path / "results"
    page.write_text(PAGE)
    store_result("tts-length", HEADLINE, 3, 12.34, results)
    assert run(page, results, "--check").returncode == 1
    assert not run(page, results).returncode
    text = page.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("last line\n")
    assert "what was there before" not in text
    assert "| 1000 | 1.40 (1.35 to 1.42) |" in text
    assert "**It reproduces in part.** The gain grows" in text
    assert "`python -m lab.learning tts-length --seeds 3`" in text
    assert not run(page, results, "--check").returncode


def test_what_no_paper_has_measured_is_not_said_to_reproduce(tmp_path: Path) -> None:
    page, results = tmp_path / "learning.md", tmp_path / "results"
    page.write_text(PAGE)
    for name in OWN_CLAIMS:
        store_result(name, HEADLINE, 3, 12.34, results)
    assert not run(page, results).returncode
    assert "**It holds here in part.** The gain grows" in page.read_text()
    assert "reproduces in part" not in page.read_text()
    markdown = headline.page(
        {
            "tts-choice": asdict(HEADLINE),
            "machine": {"processor": "a processor", "cores": 2},
            "seconds": 1.0,
            "command": ["python"],
        }
    )
    assert "It holds here in part." in markdown
