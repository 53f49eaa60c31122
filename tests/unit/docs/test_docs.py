"""README and docs: every command, file and setting in them is there; MkDocs checks the links."""

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controller.cli import app
from controller.core.settings import PlannerSettings
from controller.settings.settings import CLIENT_VARIABLES, Settings, setting_variables
from controller.wire.override_text import PRECEDENCE
from engine_shim.preflight.__main__ import build_parser as would_steer_parser
from engine_shim.sglang.api.settings import PluginSettings

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
FOLDERS = "tests|controller|engine_shim|lab|proto|deploy|scripts|requirements"
PATH = re.compile(rf"(?<![\w/-])((?:{FOLDERS})/[\w/-]+(?:\.\w+)?)")
# Names the settings file.
OTHER_VARIABLES = {"CONTROLLER_CONFIG"}


def blocks(text: str) -> Iterator[list[str]]:
    """Lines of every fenced block that holds commands, continuations joined."""
    for kind, content in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if kind in {"", "sh", "bash", "console"}:
            yield content.replace("\\\n", " ").splitlines()


def inline(text: str) -> Iterator[str]:
    """Commands between backticks, outside of blocks."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`((?:controller|make|python -m) [^`\n]+)`", outside)


def test_the_precedence_of_overrides_is_the_sentence_that_every_listing_shows():
    contract = (ROOT / "proto/speculation/v1/policy.proto").read_text(encoding="utf-8")
    comments = " ".join(contract.replace("//", " ").split())
    for page in ("overrides.md", "decisions.md"):
        assert PRECEDENCE in " ".join(TEXTS[page].split())
    assert PRECEDENCE.replace("scope wins,", "scope wins (engine, model, fleet),") in comments


def commands(word: str) -> list[tuple[str, list[str]]]:
    """(page, words) of every command that starts with the word, variables before it left out."""
    command_lines = []
    for page, text in TEXTS.items():
        lines = [line for block in blocks(text) for line in block]
        for line in [*lines, *inline(text)]:
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words[:1] == [word]:
                command_lines.append((page, words[1:]))
    return command_lines


def is_taken(words: list[str]) -> bool:
    """Whether the command has these options; nothing is run."""
    # Options are looked up before help is shown.
    return CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("page", "words"),
    commands("controller"),
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60],
)
def test_every_command_line_is_one_that_is_taken(page: str, words: list[str]) -> None:
    # `…` stands for more, `a | b` for either.
    words = [word for word in words if word not in {"…", "..."}]
    if "|" in words:
        argument_index = words.index("|") - 1
        for last in (word for word in words[argument_index:] if word != "|"):
            assert is_taken([*words[:argument_index], last]), last
    else:
        assert is_taken(words)


@pytest.mark.parametrize(
    "line", ["nonsense", "explain e --nonsense", "profile --nonsense x", "override set --gama 3"]
)
def test_others_are_not(line: str) -> None:
    assert not is_taken(line.split())


def test_flags_of_an_engine_are_asked_about_as_the_command_takes_them() -> None:
    would_steer_commands = commands("speculation-would-steer")
    assert would_steer_commands
    for _, words in would_steer_commands:
        separator_index = words.index("--") if "--" in words else len(words)
        would_steer_parser().parse_args(words[:separator_index])
        # Also beside --url, which names no model.
        assert words[separator_index + 1 :]


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[0] for _, words in commands("make") if words}
    assert named
    assert named <= targets


def test_the_list_of_make_targets_fits_eighty_columns() -> None:
    # Under `make test`, make would say which folder it enters.
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("make help ")
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_modules_that_are_run_are_there() -> None:
    named = {words[1] for _, words in commands("python") if words[:1] == ["-m"]}
    assert named
    for module in named - {"sglang.launch_server"}:
        assert find_spec(module) is not None, module


def test_paths_are_there() -> None:
    for page, text in TEXTS.items():
        for path in PATH.findall(text):
            assert (ROOT / path).exists(), f"{page}: {path}"


def test_sections_that_are_named_in_words_exist() -> None:
    """As in: README, "Two commands", and [overrides](overrides.md), "Who may"."""
    section_count = 0
    for page in PAGES:
        for name, section in re.findall(r'(README|\(\w+\.md\)),\s+"([^"]+)"', page.read_text()):
            section_count += 1
            other = ROOT / "README.md" if name == "README" else page.parent / name.strip("()")
            titles = re.findall(r"^#+ (.+)$", other.read_text(), flags=re.MULTILINE)
            titles += re.findall(r"\*\*([^*]+?)\.?\*\*", other.read_text())
            assert section in titles, f"{page.name}: {other.name} has no section {section!r}"
    assert section_count


def test_settings_that_are_named_exist() -> None:
    plugin = {f"SPECULATION_{name}".upper() for name in PluginSettings.model_fields}
    known = setting_variables() | CLIENT_VARIABLES | plugin | OTHER_VARIABLES
    constants = {field.name for field in dataclasses.fields(PlannerSettings)}
    for page, text in TEXTS.items():
        for name in re.findall(r"\b(?:CONTROLLER|SPECULATION)_[A-Z0-9_]*[A-Z0-9]\b", text):
            begins = any(one.startswith(f"{name}_") for one in known)
            assert name in known or begins, f"{page}: {name}"
        for name in re.findall(r"`planner\.(?!py`)(\w+)`", text):
            assert name in constants, f"{page}: {name}"
    assert "ready_with" in Settings.model_fields


def test_the_pages_are_all_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md|[A-Z]+\.md)", TEXTS["README.md"]))
    assert linked - {"CHANGELOG.md"} == {str(page.relative_to(ROOT)) for page in PAGES[1:]}
