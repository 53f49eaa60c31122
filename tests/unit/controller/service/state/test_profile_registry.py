from dataclasses import replace
from pathlib import Path

import pytest

from controller.core.cost.profile import DrafterIdentity, Profile
from controller.core.engine_spec import EngineSpec
from controller.service.net.errors import ProfileNotSavedError
from controller.service.state.profile_registry import ProfileFileError, ProfileRegistry
from controller.wire.engines import engine_from_proto
from tests.support.service_harness import engine_message, make_profile


def engine(target_model: str = "target") -> EngineSpec:
    return engine_from_proto(engine_message(target_model=target_model))


def write(directory: Path, name: str, profile: Profile) -> Path:
    path = directory / name
    path.write_text(profile.to_json())
    return path


def test_files_and_directories_are_read(tmp_path: Path):
    directory = tmp_path / "many"
    directory.mkdir()
    write(directory, "a.json", make_profile("a"))
    write(directory, "b.json", make_profile("b"))
    (directory / "README").write_text("no profile, no concern")
    single = write(tmp_path, "c.profile", make_profile("c"))
    profile_registry = ProfileRegistry()
    profile_registry.load([directory, single])
    assert len(profile_registry) == 3
    for name in "abc":
        chosen_profile = profile_registry.find(engine(name))
        assert chosen_profile is not None
        assert chosen_profile.fingerprint.target_model == name


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
def test_of_two_files_for_one_engine_the_later_measured_is_used(
    tmp_path: Path, order: tuple[str, str]
):
    measured = {"old": make_profile(measured_at="2029"), "new": make_profile(measured_at="2031")}
    profile_registry = ProfileRegistry()
    profile_registry.load([write(tmp_path, name, measured[name]) for name in order])
    chosen_profile = profile_registry.find(engine())
    assert chosen_profile is not None
    assert chosen_profile.measured_at == "2031"


def test_an_installed_profile_goes_before_every_file(tmp_path: Path):
    profile_registry = ProfileRegistry()
    profile_registry.load([write(tmp_path, "a", make_profile(measured_at="2031"))])
    profile_registry.add(make_profile(measured_at="2029"))
    chosen_profile = profile_registry.find(engine())
    assert chosen_profile is not None
    assert chosen_profile.measured_at == "2029"
    assert len(profile_registry) == 1


def test_of_two_that_fit_the_one_added_last_is_used():
    one = make_profile()
    both = replace(one, drafters=(*one.drafters, DrafterIdentity("dflash")))
    for order in ((one, both), (both, one)):
        profile_registry = ProfileRegistry()
        for profile in order:
            profile_registry.add(profile)
        assert len(profile_registry) == 2
        assert profile_registry.find(engine()) == order[-1]


def test_no_other_engines_profile_is_ever_used():
    profile_registry = ProfileRegistry()
    profile_registry.add(make_profile("another"))
    assert profile_registry.find(engine()) is None
    assert (
        "target_model is 'another' in the profile and 'target'"
        in profile_registry.missing_profile_reason(engine())
    )
    assert "no profile is loaded" in ProfileRegistry().missing_profile_reason(engine())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "not JSON"),
        (b"[]", "format is 'list'"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_broken_file_is_named_with_its_reason(tmp_path: Path, content: bytes | None, text: str):
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfileFileError, match=rf"broken\.json: .*{text}"):
        ProfileRegistry().load([path])


def test_a_kept_profile_replaces_the_one_it_supersedes(tmp_path: Path):
    profile_registry = ProfileRegistry(tmp_path / "kept")
    first = profile_registry.save(make_profile(measured_at="2029"))
    newer = make_profile(measured_at="2031")
    shim = replace(newer, fingerprint=replace(newer.fingerprint, shim_version="2"))
    assert profile_registry.save(shim) == first
    assert profile_registry.save(make_profile("another")) != first
    assert len(list((tmp_path / "kept").iterdir())) == 2
    again = ProfileRegistry(tmp_path / "kept")
    again.load([])
    assert again.find(engine()) == shim


def test_nothing_is_kept_without_a_directory():
    assert ProfileRegistry().save(make_profile()) is None


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    profile_registry = ProfileRegistry(tmp_path)
    path = profile_registry.save(make_profile(measured_at="2029"))
    assert path is not None
    # A file system that fails at the last moment, as a full or lost volume does.
    monkeypatch.setattr("os.fsync", _fail)
    with pytest.raises(ProfileNotSavedError, match="nothing was changed"):
        profile_registry.save(make_profile(measured_at="2031"))
    assert Profile.from_json(path.read_text()).measured_at == "2029"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def _fail(descriptor: int) -> None:
    raise OSError(28, "No space left on device")
