from pathlib import Path

import pytest

from controller.core.settings import PlannerSettings
from controller.settings import Settings, SettingsError, variables


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch):
    for name in variables():
        monkeypatch.delenv(name, raising=False)


def test_defaults():
    settings = Settings.load()
    assert settings.socket_path == Path("/run/speculation/controller.sock")
    assert settings.tcp is None
    assert (settings.metrics_host, settings.metrics_port) == ("127.0.0.1", 9464)
    assert settings.planner == PlannerSettings()


def test_flags_go_before_the_environment_and_that_before_defaults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONTROLLER_METRICS_PORT", "1111")
    monkeypatch.setenv("CONTROLLER_LOG_LEVEL", "debug")
    settings = Settings.load({"metrics_port": 2222, "log_level": None})
    assert (settings.metrics_port, settings.log_level) == (2222, "debug")


def test_profiles_are_a_list_of_paths(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONTROLLER_PROFILES", "/a.json:/b")
    assert Settings.load().profiles == (Path("/a.json"), Path("/b"))
    assert Settings.load({"profiles": [Path("/c")]}).profiles == (Path("/c"),)


def test_the_decisions_constants_are_settings_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONTROLLER_PLANNER__PROBE_SHARE", "0.02")
    assert Settings.load().planner == PlannerSettings(probe_share=0.02)


@pytest.mark.parametrize("address", ["unix:/run/x.sock", "unix:///run/x.sock"])
def test_both_spellings_of_a_unix_address_are_understood(address: str):
    assert Settings.load({"address": address}).socket_path == Path("/run/x.sock")


@pytest.mark.parametrize(
    "name", ["CONTROLLER_METRIC_PORT", "CONTROLLER_PLANNER__PROBE_SHAR", "CONTROLLER_"]
)
def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=f"unknown environment variables: {name}"):
        Settings.load()


@pytest.mark.parametrize(
    "name",
    [
        "CONTROLLER_SERVICE_HOST",
        "CONTROLLER_SERVICE_PORT",
        "CONTROLLER_SERVICE_PORT_GRPC",
        "CONTROLLER_PORT",
        "CONTROLLER_PORT_9464_TCP",
        "CONTROLLER_PORT_9464_TCP_ADDR",
    ],
)
def test_what_kubernetes_says_about_a_service_of_that_name_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv(name, "tcp://10.0.0.1:9464")
    Settings.load()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"metrics_port": 70_000}, "metrics_port: "),
        ({"adress": "unix:/x"}, "adress: "),
        ({"address": "/run/x.sock"}, "address: .*unix:PATH is needed"),
        ({"address": "unix:"}, "unix:PATH is needed"),
        ({"tcp": "9000"}, "tcp: .*HOST:PORT is needed"),
        ({"log_level": "loud"}, "log_level: "),
        ({"max_engines": 0}, "max_engines: "),
        ({"planner": {"probe_shar": 0.1}}, "planner: .*unknown: probe_shar"),
        ({"planner": {"probe_share": 2}}, r"planner: .*must lie in \[0, 1\)"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(flags: dict[str, object], text: str):
    with pytest.raises(SettingsError, match=text):
        Settings.load(flags)


def test_every_setting_is_described():
    assert all(field.description for field in Settings.model_fields.values())
