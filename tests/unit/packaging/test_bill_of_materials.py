"""Licences and bill of materials of what the images install."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import bill_of_materials
from scripts.bill_of_materials import (
    LOCKS,
    VENDORED,
    BillError,
    Part,
    is_allowed,
    licence,
    licences,
    read_lock,
    read_parts,
    read_vendored,
    sbom,
)


@pytest.fixture(scope="module")
def bill() -> list[Part]:
    return [*read_parts(LOCKS / "sidecar.txt"), *read_vendored()]


@pytest.fixture(scope="module")
def text(bill: list[Part]) -> str:
    return sbom(bill)


def part(licence: str) -> Part:
    return Part("some", "1.0", (), licence, ())


@pytest.mark.parametrize(
    "expression",
    ["MIT", "MIT OR GPL-3.0-only", "BSD-3-Clause AND (0BSD OR LGPL-2.1-only) AND Zlib", "mit"],
)
def test_what_may_be_given_away_is_allowed(expression: str):
    assert is_allowed(expression)
    assert f"| some | 1.0 | {expression} |" in licences([part(expression)])


@pytest.mark.parametrize(
    "expression",
    [
        "GPL-3.0-only", "MIT AND GPL-3.0-only", "LGPL-2.1-or-later", "MPL-2.0",
        "AGPL-3.0-only OR SSPL-1.0", "GPL-2.0-only WITH Classpath-exception-2.0", "",
        "Proprietary", "BSD License", "MIT AND",
    ],
)  # fmt: skip
def test_what_may_not_or_cannot_be_told_is_refused_by_name(expression: str):
    with pytest.raises(BillError, match=r"some 1\.0: .* is not on the list"):
        licences([part("MIT"), part(expression)])


def distribution(folder: Path, *lines: str) -> importlib.metadata.Distribution:
    (folder / "METADATA").write_text("\n".join(["Name: some", "Version: 1.0", *lines, ""]))
    return importlib.metadata.Distribution.at(folder)


@pytest.mark.parametrize(
    ("lines", "expression"),
    [
        (["License-Expression: MIT OR Apache-2.0", "License: other"], "MIT OR Apache-2.0"),
        (["Classifier: License :: OSI Approved :: MIT License", "License: x"], "MIT"),
        (
            [
                "Classifier: License :: OSI Approved :: MIT License",
                "Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
            ],
            "MIT AND Mozilla Public License 2.0 (MPL 2.0)",
        ),
        (["License: 3-Clause BSD License"], "BSD-3-Clause"),
        ([], ""),
    ],
)
def test_a_licence_is_what_the_metadata_says(tmp_path: Path, lines: list[str], expression: str):
    assert licence(distribution(tmp_path, *lines)) == expression


def test_all_that_the_images_install_is_listed_and_allowed():
    locks = [LOCKS / "sidecar.txt", LOCKS / "engine.txt"]
    listed = licences(read_parts(*locks))
    assert listed == licences(read_parts(*locks, LOCKS / "engine.txt"))
    for lock in locks:
        for name, version, _ in read_lock(lock):
            assert listed.count(f"| {name} | {version} | ") == 1
    assert listed.count("\n") > 20


@pytest.mark.parametrize(
    ("pin", "text"),
    [
        ("no-such-package==1.0", r"no-such-package 1\.0 is not installed here: `make setup`"),
        ("numpy==0.0.1", r"numpy 0\.0\.1 is installed here as .*: `make lock`"),
    ],
)
def test_another_version_than_the_locked_one_says_nothing_of_it(
    tmp_path: Path, pin: str, text: str
):
    (tmp_path / "x.txt").write_text(f"# head\n{pin} \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(BillError, match=text):
        read_parts(tmp_path / "x.txt")


def test_the_bill_of_materials_is_valid_and_holds_the_lock(text: str):
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    body = json.loads(text)
    assert body["metadata"]["component"]["name"] == "speculation-controller"
    components = {
        (
            component["name"],
            component["version"],
            tuple(sorted(h["content"] for h in component["externalReferences"][0]["hashes"])),
        )
        for component in body["components"]
    }
    wanted = {(n, v, tuple(sorted(hashes))) for n, v, hashes in read_lock(LOCKS / "sidecar.txt")}
    assert components == wanted | {
        (part.name, part.version, part.hashes) for part in read_vendored()
    }
    assert all(hashes for _, _, hashes in components)
    assert all(component["licenses"] for component in body["components"])


def test_what_the_page_carries_is_listed_with_its_registry_and_licence(text: str):
    (chart,) = [it for it in json.loads(text)["components"] if it["purl"].startswith("pkg:npm/")]
    assert chart["name"] == "uplot"
    assert chart["licenses"] == [{"expression": "MIT"}]
    assert "| uplot | " in licences(read_vendored())


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("uPlot.iife.min.js", b"alert(1)", "uPlot.iife.min.js is not the file"),
        ("more.js", b"", "more.js is not the file"),
        ("LICENSE", None, "there is no LICENSE"),
    ],
)
def test_a_vendored_file_that_is_not_the_published_one_is_refused(
    tmp_path: Path, name: str, content: bytes | None, fault: str
):
    shutil.copytree(VENDORED, tmp_path / "vendor")
    file = tmp_path / "vendor" / "uplot" / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(BillError, match=fault):
        read_vendored(tmp_path / "vendor")


def test_every_part_is_there_because_something_needs_it(bill: list[Part], text: str):
    body = json.loads(text)
    needs = {entry["ref"]: entry.get("dependsOn", []) for entry in body["dependencies"]}
    reached, left = set(), [body["metadata"]["component"]["bom-ref"]]
    while left:
        reference = left.pop()
        if reference not in reached:
            reached.add(reference)
            left += needs[reference]
    assert reached == set(needs)
    assert len(reached) == len(bill) + 1


def test_two_bills_of_one_lock_are_the_same_and_name_no_index(bill: list[Part], text: str):
    assert text == sbom(bill)
    hosts = {line for line in text.splitlines() if "://" in line}
    assert all("cyclonedx.org" in line for line in hosts)


@pytest.mark.parametrize("what", ["licences", "sbom"])
def test_the_command_writes_the_file_and_says_so(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "build" / "it"
    monkeypatch.setattr("sys.argv", ["bill", what, "--output", str(path)])
    assert bill_of_materials.main() == 0
    # Redis is only in the sidecar's image.
    assert "redis" in path.read_text()
    assert str(path) in capsys.readouterr().out


def test_the_command_ends_with_1_for_a_licence_that_is_not_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["bill", "licences"])
    monkeypatch.setattr(bill_of_materials, "ALLOWED", frozenset({"MIT"}))
    assert bill_of_materials.main() == 1
    error_text = capsys.readouterr().err
    # safetensors is only in the image of the engine, Pygments only in that of the sidecar.
    assert all(name in error_text for name in ("numpy", "safetensors", "pygments"))
