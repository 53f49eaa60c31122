"""The systemd pair: systemd's own opinion, and what both sides have to agree on."""

import shutil
import subprocess
from pathlib import Path

import pytest

from controller.settings.settings import Settings
from engine_shim.sglang.api.settings import PluginSettings
from tests.unit.deploy.command_lines import parsed
from tests.unit.deploy.manifests import ROOT
from tests.unit.deploy.units import ENGINE, SIDECAR, SYSTEMD, environment, read_unit


def settings() -> Settings:
    return Settings.load({}, SYSTEMD / "controller.yaml")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_no_fault(tmp_path: Path):
    for unit in (SIDECAR, ENGINE):
        text = unit.read_text()
        for place in ("/opt/speculation/bin", "/opt/sglang/bin"):
            text = text.replace(place, str(tmp_path))
        (tmp_path / unit.name).write_text(text)
    for program in ("controller", "sglang"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    paths = [str(tmp_path / unit.name) for unit in (SIDECAR, ENGINE)]
    done = subprocess.run(
        ["systemd-analyze", "verify", *paths], capture_output=True, text=True, check=False
    )
    own = [line for line in done.stderr.splitlines() if "sglang" in line or "speculation" in line]
    assert own == []
    assert done.returncode == 0, done.stderr


def test_the_sidecar_is_started_on_the_settings_that_are_installed():
    unit = read_unit(SIDECAR)
    (command,) = unit["Service", "ExecStart"]
    program, *arguments = command.split()
    options = parsed(["controller", *arguments])
    assert program == "/opt/speculation/bin/controller"
    assert str(options["config"]) == "/etc/speculation/controller.yaml"
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert f"deploy/systemd/controller.yaml {options['config']}\n" in page
    assert unit["Service", "ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_it_has_the_time_that_its_settings_give_it_to_stop():
    (seconds,) = read_unit(SIDECAR)["Service", "TimeoutStopSec"]
    assert float(seconds) > settings().drain_seconds + 5


def test_socket_and_state_lie_where_systemd_makes_room_for_them():
    unit = read_unit(SIDECAR)
    assert unit["Service", "ProtectSystem"] == ["strict"]
    runtime, operators = unit["Service", "RuntimeDirectory"][0].split()
    (state,) = unit["Service", "StateDirectory"]
    assert settings().socket_path.parent == Path("/run") / runtime
    assert settings().operators_directory == Path("/run") / operators
    for path in (settings().state_directory, settings().profile_directory):
        assert path is not None
        assert path.parent == Path("/var/lib") / state
    assert unit["Service", "RuntimeDirectoryPreserve"] == ["yes"]


def test_the_engine_may_open_the_socket():
    sidecar, engine = read_unit(SIDECAR), read_unit(ENGINE)
    (group,) = sidecar["Service", "Group"]
    assert engine["Service", "SupplementaryGroups"] == [group]
    assert engine["Service", "User"] != sidecar["Service", "User"]
    assert sidecar["Service", "RuntimeDirectoryMode"] == ["0750"]


def test_the_engine_s_unit_does_not_have_the_operators_socket():
    hidden = read_unit(ENGINE)["Service", "InaccessiblePaths"]
    assert hidden == [f"-{settings().operators_directory}"]


def test_the_engine_goes_on_without_the_sidecar():
    unit = read_unit(ENGINE)
    assert SIDECAR.name in unit["Unit", "Wants"]
    assert SIDECAR.name in unit["Unit", "After"][0].split()
    for key in ("Requires", "BindsTo", "PartOf"):
        assert ("Unit", key) not in unit


def test_the_shim_takes_every_variable(monkeypatch: pytest.MonkeyPatch):
    for name, value in environment(read_unit(ENGINE)).items():
        monkeypatch.setenv(name, value)
    assert PluginSettings.load().sidecar == settings().address


def test_the_startup_step_is_a_command_that_exists_and_has_time():
    unit = read_unit(ENGINE)
    (command,) = unit["Service", "ExecStartPost"]
    assert command.startswith("-")  # what it cannot measure does not end the engine
    # Measuring takes the operators' socket, which is the sidecar's user's.
    (user,) = read_unit(SIDECAR)["Service", "User"]
    program, _, words = command.partition("/bin/controller ")
    assert program.startswith(f"-+/usr/bin/setpriv --reuid={user} --regid={user} ")
    options = parsed(["controller", *words.split()])
    assert options["sidecar"] == settings().address
    engine = unit["Service", "ExecStart"][0]
    assert f"--port {options['engine_url'].rpartition(':')[2]} " in engine
    (seconds,) = unit["Service", "TimeoutStartSec"]
    assert float(seconds) > options["wait_seconds"] + 2 * options["budget"]


@pytest.mark.parametrize("path", [SIDECAR, ENGINE])
def test_neither_is_root_or_can_become_root(path: Path):
    unit = read_unit(path)
    assert unit["Service", "User"] not in ([], ["root"])
    assert unit["Service", "NoNewPrivileges"] == ["yes"]
    assert unit["Service", "CapabilityBoundingSet"] == [""]
    assert unit["Service", "ProtectSystem"] == ["strict"]
