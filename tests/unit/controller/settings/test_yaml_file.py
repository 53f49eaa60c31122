import os
from pathlib import Path

import pytest

from controller.settings.sources import SettingsFileError, read_settings_file


def written(directory: Path, content: str | bytes) -> Path:
    path = directory / "controller.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_values_come_nested_and_every_key_with_its_line(tmp_path: Path):
    file = read_settings_file(
        written(tmp_path, "# us\nmetrics_port: 1\nplanner:\n  lease_seconds: 2.5\nprofiles: [/a]\n")
    )
    assert file.values == {
        "metrics_port": 1,
        "planner": {"lease_seconds": 2.5},
        "profiles": ["/a"],
    }
    assert file.lines == {
        "metrics_port": 2,
        "planner": 3,
        "planner.lease_seconds": 4,
        "profiles": 5,
    }


@pytest.mark.parametrize("content", ["", "# nothing yet\n", "---\n"])
def test_an_empty_file_says_nothing(tmp_path: Path, content: str):
    assert not read_settings_file(written(tmp_path, content)).values


def test_a_mounted_file_is_a_link(tmp_path: Path):
    link = tmp_path / "link.yaml"
    link.symlink_to(written(tmp_path, "metrics_port: 1"))
    assert read_settings_file(link).values == {"metrics_port": 1}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            "metrics_port: 1\ntcp: x\nmetrics_port: 2\n",
            "line 3: metrics_port is set twice, .*line 1",
        ),
        ("planner:\n  a: 1\n  a: 2\n", r"line 3: planner\.a is set twice, first in line 2"),
        ("- metrics_port\n", "line 1: the file is not a mapping"),
        ("metrics_port", "line 1: the file is not a mapping"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: &x 1\n", "line 1: anchors and aliases are not supported"),
        ("a: 1\nb: *x\n", "line 2: anchors and aliases are not supported"),
        ("a: !!python/object/apply:os.system [id]\n", "line 1: tags are not supported"),
        ("a: !!str 1\n", "line 1: tags are not supported"),
        ("<<: {a: 1}\n", "line 1: this key is not the name of a setting"),
        ("? [a]\n: 1\n", "line 1: this key is not the name of a setting"),
        ("a: {b: {c: {d: 1}}}\n", "line 1: nested too deeply"),
        ("a: " + "[" * 20_000, "line 1: nested too deep"),
        ("a: [1\n", "line 2: "),
        ("\tmetrics_port: 1\n", "line 1: "),
        ("a: 2026-99-99\n", "line 1: a value cannot be read"),
        ("a: 1\nb: 1" + ":1" * 200 + ".5\n", "line 2: a number with more than 64 characters"),
        ("a: 0x" + "f" * 5000 + "\n", "line 1: a number with more than 64 characters"),
        ("a: 0x_\n", "line 1: a value cannot be read"),
        ('a: "\\UFFFFFFFF"\n', "line 1: a value cannot be read"),
        ('a: "\\ud800"\n', "line 1: a text with a NUL character, or with half a surrogate pair"),
        ('a: 1\nb: "/x\\0"\n', "line 2: a text with a NUL character"),
        (b"a: \xff\n", "not UTF-8 text"),
        (b"a: \x00\x01\n", "the file is not YAML"),
        (b"\x7fELF" + bytes(4000), "the file is not YAML"),
        ("a: " + "x" * 70_000, "larger than 64 KiB"),
    ],
)
def test_what_is_no_settings_file_is_said_by_file_and_line(
    tmp_path: Path, content: str | bytes, text: str
):
    path = written(tmp_path, content)
    with pytest.raises(SettingsFileError, match=text) as error:
        read_settings_file(path)
    assert str(error.value).startswith(str(path))


def test_what_is_no_file_is_not_read(tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, text in (
        (fifo, "not a regular file"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "nowhere", "No such file"),
    ):
        with pytest.raises(SettingsFileError, match=text):
            read_settings_file(path)


@pytest.mark.parametrize(
    "content",
    [
        "redis_url: redis://:hunter2@h:6379/0: x\n",
        "redis_url:redis://:hunter2@h\n",
        "redis_url: 'redis://:hunter2@h\n",
        "tcp: a\nredis_url:redis://:hunter2@h: 1\n",
        "redis_url: !!hunter2 x\n",
    ],
)
def test_no_error_quotes_a_secret(tmp_path: Path, content: str):
    with pytest.raises(SettingsFileError) as error:
        read_settings_file(written(tmp_path, content))
    assert "hunter2" not in str(error.value)
