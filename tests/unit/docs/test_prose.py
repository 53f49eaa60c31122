"""The prose linter of `make check` finds what scripts/prose.yaml forbids, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]

# Assembled, because the linter reads this file as well.
GOES_ON = "goes_on".replace("_", " ")
NOBODY = "NOBODY".lower()

GOOD_DOCUMENT = """# Title

A line with [a link](https://example.org/{long}) may be long.
Phrases between backticks are not checked: `{phrase}`.

| a table | {long} |
|---|---|

```
{long} {phrase}
```
""".format(long="x" * 130, phrase=GOES_ON)

# Names and texts without a space are not prose.
GOOD_CODE = f'''"""Telemetry of one decode step."""

{NOBODY} = "{NOBODY}"


def test_it_{GOES_ON.replace(" ", "_")}(report: str) -> bool:
    """Returns whether the report was used; a report of another session is not."""
    return report is {NOBODY}
'''


@pytest.fixture
def lint(tmp_path: Path):
    rules = yaml.safe_load((ROOT / "scripts/prose.yaml").read_text(encoding="utf-8"))

    def run(name: str, text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules, sort_keys=False))
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
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
        (f"The engine {GOES_ON}.", f"docs/page.md:3: instead of '{GOES_ON}' write"),
        ("The engine goes\non with it.", f"docs/page.md:3: instead of '{GOES_ON}' write"),
        ("It is very fast.", "weasel_words.very"),
        ("It is is fast.", "lexical_illusions"),
    ],
)
def test_bad_prose_in_a_document_is_found(lint, text: str, message: str):
    done = lint("docs/page.md", f"# Title\n\n{text.strip()}\n")
    assert done.returncode == 1, done.stderr
    assert message in done.stdout
    assert "documents: 1 findings" in done.stdout


def test_a_document_whose_average_sentence_is_too_long_is_found(lint):
    short, long = "The engine decodes.", f"The engine decodes {' '.join('abcdefghijklmnopqrst')}."
    table, code = f"| {long} |\n|---|", f"```\n{long}\n```"
    # The sentences around a table and a block of code count, and those inside do not.
    done = lint("docs/page.md", f"# Title\n\n{short} {long}\n\n{table}\n\n{code}\n")
    assert done.returncode == 0, done.stdout
    done = lint("docs/page.md", f"# Title\n\n{short} {long}\n\n- {long}\n- {long}\n- {long}\n")
    assert done.returncode == 1, done.stderr
    assert "docs/page.md:1: 19.0 words a sentence, at most 18 (house.sentences)" in done.stdout


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


@pytest.mark.parametrize(
    "text",
    [
        f'ERROR = "the engine {GOES_ON}"\n',
        f'ERROR = f"the engine {{name}} {GOES_ON}"\n',
        'raise ValueError("the engine goes "\n    "on")\n',
        f"# The engine {GOES_ON}.\n",
        "# The engine goes\n# on.\n",
        f'"""The engine {GOES_ON}."""\n',
    ],
)
def test_a_banned_phrase_in_code_is_found_but_not_in_generated_stubs(lint, text: str):
    assert lint("controller/v1/a_pb2.py", text).returncode == 0
    done = lint("controller/a.py", text)
    assert done.returncode == 1, done.stderr
    assert "controller/a.py:1: instead of" in done.stdout
    assert "phrases: 1 findings" in done.stdout


@pytest.mark.parametrize("folder", ["tests/unit", "tools", "scripts"])
def test_tests_and_tools_are_read_as_well(lint, folder: str):
    assert lint(f"{folder}/a.py", f'"""The engine {GOES_ON}."""\n').returncode == 1


def test_a_banned_phrase_in_a_proto_file_is_found(lint):
    done = lint("proto/a/b.proto", "message A {\n  // The stream goes\n  // on.\n}\n")
    assert done.returncode == 1, done.stderr
    assert "proto/a/b.proto:2: instead of" in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "The rate leaves" + " 0..1.",
        "The count is no" + " whole number.",
        "An operator, or some" + "body else, has changed it.",
        "The drafts are made for" + " nothing.",
        "The token would be sent over an open" + " line.",
        "The settings go" + " together.",
        "The memory stays as it" + " was.",
    ],
)
def test_idioms_are_found(lint, text: str):
    done = lint("docs/page.md", f"# Title\n\n{text}\n")
    assert done.returncode == 1, done.stderr
    assert "(house.phrases)" in done.stdout
