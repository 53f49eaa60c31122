"""The secret by which a sidecar knows an engine, and its trainer."""

import stat
from pathlib import Path

from engine_shim.link.secret import kept_secret, new_secret, secret_in, secret_of


def test_no_two_engines_have_the_same():
    assert len({new_secret() for _ in range(100)}) == 100


def test_one_with_a_folder_keeps_it_there_and_its_trainer_finds_it(tmp_path: Path):
    folder = tmp_path / "signals"
    assert secret_in(folder) == ""
    secret = secret_of(str(folder))
    assert secret_in(folder) == kept_secret(folder) == secret_of(str(folder)) == secret
    (file,) = folder.iterdir()
    assert not stat.S_IMODE(file.stat().st_mode) & 0o007


def test_without_a_folder_or_with_one_that_cannot_be_used_it_has_one_of_its_own(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert len({secret_of(""), secret_of(""), secret_of(str(tmp_path / "file"))}) == 3
