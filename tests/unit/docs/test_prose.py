"""The prose linter of `make check` finds what scripts/prose.yaml forbids, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]

GOOD_DOCUMENT = """# Title

A line with [a link](https://example.org/{long}) may be long.
Phrases between backticks are not checked: `goes on with`.

| a table | {long} |
|---|---|

```
{long} goes on with
```
""".format(long="x" * 130)

GOOD_CODE = '''"""Telemetry of one decode step."""


def folds(report: str) -> bool:
    """Returns whether the report was used; a report of another session is not."""
    return report is None
'''


@pytest.fixture
def lint(tmp_path: Path):
    rules = yaml.safe_load((ROOT / "scripts/prose.yaml").read_text(encoding="utf-8"))
    rules["accepted"] = dict.fromkeys(rules["accepted"], 0)

    def run(name: str, text: str, **accepted: int) -> subprocess.CompletedProcess[str]:
        rules["accepted"] |= accepted
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules, sort_keys=False))
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "scripts/prose.py", "--root", tmp_path / "tree"]
        return subprocess.run(
            [*map(str, command), "--rules", str(tmp_path / "rules.yaml")],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("name", "text"), [("docs/page.md", GOOD_DOCUMENT), ("controller/fold.py", GOOD_CODE)]
)
def test_plain_prose_passes(lint, name: str, text: str):
    done = lint(name, text)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x" * 124, "docs/page.md:3: 124 columns, at most 120"),
        ("The engine goes on with it.", "docs/page.md:3: instead of 'goes on with' write"),
        ("The engine goes on\nwith it.", "docs/page.md:3: instead of 'goes on with' write"),
        ("It is very fast.", "weasel_words.very"),
        ("It is is fast.", "lexical_illusions"),
    ],
)
def test_bad_prose_in_a_document_is_found(lint, text: str, message: str):
    done = lint("docs/page.md", f"# Title\n\n{text.strip()}\n")
    assert done.returncode == 1, done.stderr
    assert message in done.stdout
    assert "documents: 1 findings, 0 accepted" in done.stdout


def test_docstrings_that_are_fragments_are_found(lint):
    fragments = [
        "Of one step.",
        "For people.",
        "As `pool`, of groups that count the same.",
        "Both ways.",
        "What a phase is made of.",
        "In place of the one setting: another.",
        "Virtual seconds.",
    ]
    code = '"""{0}"""\n\nclass A:\n    """{0}"""\n\n    def b(self):\n        """{0}"""\n'
    for index, fragment in enumerate(fragments):
        done = lint(f"engine_shim/{index}/a.py", code.format(fragment))
        assert done.returncode == 1, done.stderr
        for line in (1, 4, 7):
            assert f"engine_shim/{index}/a.py:{line}: docstring is a fragment" in done.stdout
        assert f"docstrings: {3 * (index + 1)} findings" in done.stdout


def test_a_banned_phrase_in_code_is_found_but_not_in_generated_stubs(lint):
    text = 'ERROR = "the etag is none"\n'
    assert lint("controller/a.py", text).returncode == 1
    assert lint("controller/v1/a_pb2.py", text, phrases=1).returncode == 0


def test_as_many_findings_pass_as_the_rules_accept(lint):
    done = lint("lab/a.py", '"""Of one step."""\n', docstrings=1)
    assert done.returncode == 0, done.stdout
    assert "docstrings: 1 findings, 1 accepted" in done.stdout
