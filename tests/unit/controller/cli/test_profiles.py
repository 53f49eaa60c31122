"""`controller profile push | pull | list | show | diff | merge`, as people type them."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from controller.core.cost.profile import Profile
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.service_harness import PATIENCE_SECONDS, engine_message, make_profile
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """Steers "night"."""
    with (
        sidecar_process(tmp_path_factory.mktemp("sidecar")) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
            service_pb2.IntroduceRequest(engine=engine_message("night")), timeout=PATIENCE_SECONDS
        )
        yield running


def file_of(directory: Path, name: str, slower: float = 1.0, device: str = "") -> Path:
    profile = make_profile(measured_at=f"2020-01-01 {name}")
    cells = tuple(
        dataclasses.replace(c, step_seconds=c.step_seconds * slower) for c in profile.cells
    )
    fingerprint = dataclasses.replace(profile.fingerprint, device=device)
    path = directory / f"{name}.json"
    path.write_text(dataclasses.replace(profile, cells=cells, fingerprint=fingerprint).to_json())
    return path


def test_from_two_pods_files_to_one_profile_in_use(sidecar: SidecarProcess, tmp_path: Path):
    address_flags = ("--address", sidecar.address)
    assert "no profile is in the store" in controller("profile", "list", *address_flags).stdout
    one, two = file_of(tmp_path, "one"), file_of(tmp_path, "two", 1.1)
    for path in (one, two, two):
        done = controller("profile", "push", str(path), *address_flags)
        assert done.returncode == 0, done.stderr
        assert "is in the profile store, under identity" in done.stdout
    listed = controller("profile", "list", *address_flags).stdout
    for path in (one, two):
        assert Profile.from_json(path.read_text()).profile_id in listed
    assert "night" in listed

    merged = tmp_path / "merged.json"
    done = controller(
        "profile", "pull", "--engine", "night", "--output", str(merged), *address_flags
    )
    assert done.returncode == 0, done.stderr
    pulled_profile = Profile.from_json(merged.read_text())
    assert len(pulled_profile.merged_from) == 2
    assert pulled_profile.profile_id in listed
    again = controller("profile", "pull", pulled_profile.profile_id, *address_flags)
    assert again.stdout == merged.read_text()
    by_hand = tmp_path / "by-hand.json"
    done = controller("profile", "merge", str(one), str(two), "--output", str(by_hand))
    assert done.returncode == 0, done.stderr
    assert Profile.from_json(by_hand.read_text()).merged_from == pulled_profile.merged_from
    shown = controller("profile", "show", pulled_profile.profile_id, *address_flags).stdout
    assert "target_model: target" in shown
    assert f"merged from {', '.join(pulled_profile.merged_from)}" in shown
    explanation = controller("explain", "night", *address_flags).stdout
    assert "profile " in explanation


def test_a_difference_is_shown_and_named(tmp_path: Path):
    one, slower = file_of(tmp_path, "one"), file_of(tmp_path, "slower", 1.25)
    same = controller("profile", "diff", str(one), str(slower))
    assert same.returncode == 0, same.stderr
    assert "1.250!" in same.stdout
    other = file_of(tmp_path, "other", device="H200")
    different = controller("profile", "diff", str(one), str(other))
    assert different.returncode == 3
    assert "device: '' in" in different.stdout
    refused = controller("profile", "merge", str(one), str(other), "--output", "x.json")
    assert refused.returncode == 2
    assert "device" in refused.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["push", "nowhere.json"], 2, "No such file"),
        (["show", "nowhere.json"], 2, "No such file"),
        (["show", "0123456789abcdef"], 13, "is in the store"),
        (["pull", "0123456789abcdef"], 13, "is in the store"),
        (["pull"], 2, "name either a profile"),
        (["pull", "x", "--engine", "y"], 2, "name either a profile"),
        (["pull", "--engine", "absent"], 6, "no engine 'absent'"),
        (["push", "BROKEN"], 2, "is not a valid profile"),
        (["merge", "BROKEN", "--output", "x"], 2, "is not a valid profile"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    sidecar: SidecarProcess, tmp_path: Path, words: list[str], code: int, message: str
):
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"format": "other/2"}))
    words = [str(broken) if word == "BROKEN" else word for word in words]
    address_flags = () if words[0] == "merge" else ("--address", sidecar.address)
    done = controller("profile", *words, *address_flags)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
