"""`controller profile` on the real SGLang with the plugin, as a user would run it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from controller.core.cost.profile import Profile
from tests.support.engine import DRAFT, EAGLE3, TARGET, environment, running_engine
from tests.support.eventually import eventually

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 2, 3, 5, 7)
SIZES = (1, 2, 4, 8, 16)
STATIC = (
    "--speculative-num-steps", "3",
    "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "4",
)  # fmt: skip


@dataclass(frozen=True)
class Stand:
    """A sidecar and an engine that run, and where the profile goes."""

    folder: Path
    address: str
    url: str

    @property
    def output(self) -> Path:
        return self.folder / "profile.json"

    def controller(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "controller.cli", *arguments],
            env=environment(self.folder, {}),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        print(done.stderr, done.stdout, sep="\n")
        return done

    def profile(self) -> subprocess.CompletedProcess[str]:
        return self.controller(
            "profile",
            "--engine-url", self.url,
            "--sidecar", self.address,
            "--output", str(self.output),
            "--budget", "20",
        )  # fmt: skip


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("profile")
    address = f"unix:{folder}/controller.sock"
    serve = [sys.executable, "-m", "controller.cli", "serve", "--address", address]
    sidecar = subprocess.Popen(
        [*serve, "--metrics-port", "0"],
        env=environment(folder, {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    variables = {
        "SPECULATION_SIDECAR": address,
        "SPECULATION_ENGINE_ID": "real",
        "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
    }
    try:
        eventually(
            (folder / "controller.sock").exists,
            timeout_seconds=60,
            description="the sidecar serves",
        )
        with running_engine(folder, [*EAGLE3, *STATIC], variables) as engine:
            yield Stand(folder, address, f"http://127.0.0.1:{engine.port}")
    finally:
        sidecar.terminate()
        sidecar.wait(30)


@pytest.fixture(scope="module")
def measured(stand: Stand) -> subprocess.CompletedProcess[str]:
    return stand.profile()


def test_the_default_grid_is_measured(stand: Stand, measured: subprocess.CompletedProcess[str]):
    assert measured.returncode == 0
    assert re.search(r"measured in [\d.]+ s; in use by real", measured.stdout)
    assert "eagle3: milliseconds per step" in measured.stdout


def test_every_draft_length_has_a_cost_at_every_batch_size(
    stand: Stand, measured: subprocess.CompletedProcess[str]
):
    profile = Profile.from_json(stand.output.read_text())
    cells = {(c.gamma, c.batch_size): c.step_seconds for c in profile.cells}
    assert set(cells) == {(gamma, size) for gamma in GAMMAS for size in SIZES}
    # However busy the machine is: eight verified tokens of sixteen sequences and seven passes of
    # the draft cost more than one token of one sequence and no draft.
    assert cells[7, 16] > cells[0, 1]
    assert profile.fingerprint.engine == "sglang"
    assert profile.fingerprint.target_model == str(TARGET)
    assert profile.drafters[0].model == str(DRAFT)
    # Three, one of which may have been left out.
    assert min(c.steps for c in profile.cells) >= 2


def test_the_sidecar_prices_by_it_and_the_next_run_reuses_it(
    stand: Stand, measured: subprocess.CompletedProcess[str]
):
    profile_id = Profile.from_json(stand.output.read_text()).profile_id
    explained = stand.controller("explain", "real", "--address", stand.address)
    assert f"profile {profile_id}" in explained.stdout
    again = stand.profile()
    assert again.returncode == 0
    assert "reused" in again.stdout
