"""What the forge and Git's hooks read is valid, pinned, and names what the repository has."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from controller.cli import app
from scripts.release_ready import faults
from tests.unit.packaging.environments import ROOT

BIN = Path(sys.executable).parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECTS = [ROOT / name / "pyproject.toml" for name in (".", "engine_shim", "simulator", "trainer")]
CHECKED = (".github", ".pre-commit-config.yaml", "scripts/forge.sh")


def check(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tree / "scripts" / "forge.sh", BIN], capture_output=True, text=True, check=False
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is checked, to break."""
    for name in CHECKED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_all_that_the_forge_reads_is_valid():
    done = check(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "before", "after", "finding"),
    [
        ("workflows/core.yml", "persist-credentials: false", "clean: true", "artipacked"),
        ("workflows/core.yml", "permissions: {}", "permissions: write-all", "permissions"),
        ("workflows/core.yml", "runs-on: ubuntu-24.04", "runs-upon: x", "runs-upon"),
        ("workflows/release.yml", r"@[0-9a-f]{40} # v\S+", "@main", "unpinned-uses"),
        ("dependabot.yml", "interval: weekly", "interval: hourly", "hourly"),
        ("ISSUE_TEMPLATE/bug.yml", "type: input", "type: inputs", "inputs"),
        ("ISSUE_TEMPLATE/config.yml", "false", "perhaps", "perhaps"),
    ],
)
def test_a_fault_ends_the_check(tree: Path, file: str, before: str, after: str, finding: str):
    path = tree / ".github" / file
    text, changed = re.subn(before, after, path.read_text())
    assert changed
    path.write_text(text)
    done = check(tree)
    assert done.returncode != 0
    assert finding in done.stdout + done.stderr


def test_hooks_that_pre_commit_cannot_read_end_the_check(tree: Path):
    (tree / ".pre-commit-config.yaml").write_text("repos: [{repo: local}]\n")
    assert check(tree).returncode != 0


def test_the_programs_and_files_that_hooks_and_workflows_name_are_there():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    texts = [hook["entry"] for hook in hooks]
    texts += [path.read_text() for path in WORKFLOWS]
    for text in texts:
        for path in re.findall(
            r"(?<![\w./-])((?:scripts|requirements|deploy|\.ci)/[\w./-]+)", text
        ):
            assert (ROOT / path).is_file(), path
        for line in re.findall(r"(?:run:|command:|^) ?make ([a-z -]+)$", text, re.MULTILINE):
            assert set(line.split()) <= set(targets), line


def test_the_commands_that_issue_forms_ask_for_are_there():
    texts = [path.read_text() for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    asked = {
        line for text in texts
        for line in re.findall(r"label: Output of controller (.*)|`controller ([^`]+)`", text)
    }  # fmt: skip
    assert len(asked) > 5
    for line in asked:
        words = " ".join("".join(line).split()).split()
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0, words


def test_all_packages_name_the_same_authors_and_addresses():
    projects = [tomllib.loads(path.read_text())["project"] for path in PROJECTS]
    assert len({str(project["urls"]) for project in projects}) == 1
    assert len({str(project["authors"]) for project in projects}) == 1


class TestRelease:
    """`scripts/release_ready.py` on wheels that hold metadata alone."""

    @staticmethod
    def wheels(folder: Path, *names: str, address: str = "https://forge.org/a") -> Path:
        for name in names or ("", "-shim", "-simulator", "-trainer"):
            full = f"speculation-controller{name}"
            with zipfile.ZipFile(folder / f"{full}.whl", "w") as archive:
                archive.writestr(
                    f"{full}-0.2.0.dist-info/METADATA",
                    f"Name: {full}\nVersion: 0.2.0\nProject-URL: Source, {address}\n",
                )
        return folder

    def test_the_four_wheels_of_the_tags_version_pass(self, tmp_path: Path):
        assert list(faults("v0.2.0", self.wheels(tmp_path))) == []

    def test_another_version_a_missing_wheel_and_a_reserved_name_are_refused(self, tmp_path: Path):
        folder = self.wheels(tmp_path, "-shim", address="https://git.example/a")
        missing, version, address = faults("v0.3.0", folder)
        assert "has to hold the wheels" in missing
        assert "version 0.2.0, the tag is v0.3.0" in version
        assert "https://git.example/a is a reserved name" in address
