"""The site that MkDocs builds: where its pages are, and what ends the build."""

import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[3]
README = """\
# Project

See [the guide](docs/guide.md#b--γ-and-more).

## Documents

- **Get started:** [Guide](docs/guide.md),
  [`controller` and others](docs/other.md)
- **Contribute:** [The contract](proto/README.md)
"""
PAGES = {
    "README.md": README,
    "docs/guide.md": (
        "# Guide\n\n## B = γ, and more\n\n[home](../README.md), [rules](../deploy/rules.yml)\n"
    ),
    "docs/other.md": "# Other\n",
    "proto/README.md": "# Contract\n\n[guide](../docs/guide.md)\n",
    "controller/README.md": "# A package\n",
    "deploy/rules.yml": "rules: []\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small repository with the configuration of this one."""
    for name in ("mkdocs.yml", "scripts/site_pages.py", "scripts/site.css"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in PAGES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def built(project: Path) -> Path:
    """Raises Abort where `make docs` would fail."""
    config = load_config(str(project / "mkdocs.yml"))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return project / "build" / "site"


def test_the_site_is_laid_out_as_the_repository(project: Path):
    site = built(project)
    for page in ("index.html", "docs/guide.html", "proto/index.html", "controller/index.html"):
        assert (site / page).is_file(), page
    assert 'id="b--γ-and-more"' in (site / "docs/guide.html").read_text()
    assert 'href="../deploy/rules.yml"' in (site / "docs/guide.html").read_text()
    assert (site / "deploy/rules.yml").read_text() == PAGES["deploy/rules.yml"]


def test_the_navigation_is_the_list_of_the_documents(project: Path):
    menu = (built(project) / "index.html").read_text().partition('role="navigation"')[2]
    names = re.findall(r'(?:caption-text|class="reference internal").*?>([^<]+)<', menu)
    wanted = ["Get started", "Guide", "controller and others", "Contribute", "The contract"]
    assert [name for name in names if name in {*wanted, "Controller and others"}] == [
        name[0].upper() + name[1:] for name in wanted
    ]


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("[x](other.md)", None),
        ("[x](nowhere.md)", "nowhere.md"),
        ("[x](other.md#nowhere)", "nowhere"),
        ("[x](#nowhere)", "nowhere"),
        ("[x](../deploy/gone.yml)", "gone.yml"),
        ("[x](../deploy)", "deploy"),
        ("[x](/docs/other.md)", "/docs/other.md"),
        ("![x](images/gone.png)", "gone.png"),
    ],
)
def test_a_dead_link_or_anchor_ends_the_build(
    project: Path, caplog: pytest.LogCaptureFixture, link: str, message: str | None
):
    with (project / "docs" / "guide.md").open("a") as page:
        page.write(f"\n{link}\n")
    if message is None:
        built(project)
        return
    with caplog.at_level(logging.WARNING), pytest.raises(Abort):
        built(project)
    assert message in caplog.text


def test_make_fails_where_the_build_does(project: Path):
    """MkDocs does not count warnings that it does not print (--quiet)."""
    makefile = (ROOT / "Makefile").read_text()
    (words,) = set(re.findall(r"\.venv/bin/mkdocs (.+)$", makefile, re.MULTILINE))
    command = [sys.executable, "-m", "mkdocs", *words.split()]
    good = subprocess.run(command, cwd=project, capture_output=True, check=False)
    assert good.returncode == 0, good.stderr
    with (project / "docs" / "guide.md").open("a") as page:
        page.write("\n[x](nowhere.md)\n")
    bad = subprocess.run(command, cwd=project, capture_output=True, check=False)
    assert (bad.returncode, b"nowhere.md" in bad.stderr) == (1, True)


def test_a_page_of_the_navigation_that_is_missing_ends_the_build(project: Path):
    (project / "docs" / "other.md").unlink()
    with pytest.raises(Abort):
        built(project)
