"""Lays out the site as the repository is laid out, so that one link works in both.

MkDocs calls these functions while it builds.  Every document of the repository is a page, and
README.md is the home page.  What else they link to, such as a manifest or a proto file, is copied.
The navigation is the list under "Documents" in README.md.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_PAGES = (
    "*.md", "docs/**/*.md", "proto/**/*.md", "profiles/*.md", "controller/**/*.md",
    "simulator/**/*.md", "engine_shim/**/*.md", "trainer/**/*.md", "lab/**/*.md", "tools/**/*.md",
    "tests/**/*.md", "deploy/**/*.md",
)  # fmt: skip
_LINK = re.compile(r"\]\(([^)#\s]+)")
_HOME = "README.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes the navigation."""
    readme = (_root(config) / _HOME).read_text(encoding="utf-8")
    listed = readme.partition("\n## Documents\n")[2].partition("\n## ")[0]
    items = re.findall(r"^- \*\*([\w ]+):\*\* (.+(?:\n {2}.+)*)", listed, re.MULTILINE)
    config.nav = [{"Home": _HOME}] + [
        {heading: [{title: page} for title, page in _titled(links)]} for heading, links in items
    ]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Replaces what MkDocs has found by the repository's pages and what they link to."""
    root = _root(config)
    pages = {path.relative_to(root) for pattern in _PAGES for path in root.glob(pattern)}
    linked = {path for page in pages for path in _linked(root, page)}
    linked |= {Path(name) for name in config.extra_css}
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *(_file(path, config) for path in sorted(pages | linked))])


def _titled(links: str) -> Iterable[tuple[str, str]]:
    for title, page in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", links):
        name = title.replace("`", "")
        yield name[0].upper() + name[1:], page


def _linked(root: Path, page: Path) -> Iterable[Path]:
    """Files of the repository that a page links to, relative to the root."""
    for target in _LINK.findall((root / page).read_text(encoding="utf-8")):
        path = (root / page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(root):
            yield path.relative_to(root)


def _file(path: Path, config: MkDocsConfig) -> File:
    return File(str(path), str(_root(config)), config.site_dir, config.use_directory_urls)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).resolve().parent
