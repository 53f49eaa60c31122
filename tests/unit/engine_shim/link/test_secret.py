"""The secret by which a sidecar knows an engine, and its trainer."""

import stat
from pathlib import Path

from engine_shim.link.secret import load_or_create_secret, new_secret, read_secret, resolve_secret


def test_no_two_engines_have_the_same():
    assert len({new_secret() for _ in range(100)}) == 100


def test_one_with_a_folder_keeps_it_there_and_its_trainer_finds_it(tmp_path: Path):
    folder = tmp_path / "signals"
    assert read_secret(folder) == ""
    secret = resolve_secret(str(folder))
    assert (
        read_secret(folder)
        == load_or_create_secret(folder)
        == resolve_secret(str(folder))
        == secret
    )
    (file,) = folder.iterdir()
    assert not stat.S_IMODE(file.stat().st_mode) & 0o007


def test_without_a_folder_or_with_one_that_cannot_be_used_it_has_one_of_its_own(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert (
        len({resolve_secret(""), resolve_secret(""), resolve_secret(str(tmp_path / "file"))}) == 3
    )
