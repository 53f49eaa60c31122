import re
from pathlib import Path

import pytest

from controller.core.settings import PlannerSettings
from controller.settings.settings import (
    RELOADED,
    Settings,
    SettingsError,
    setting_keys,
    setting_variables,
)
from tests.support.setting_texts import setting_texts


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch):
    for name in setting_variables():
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
    "name",
    [
        "controller_metrics_port",
        "Controller_Planner",
        "CONTROLLER_METRIC_PORT",
        "CONTROLLER_PLANNER__PROBE_SHAR",
        "CONTROLLER_",
    ],
)
def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=f"unknown environment variable {name}: did you mean "):
        Settings.load()


LINKS = (
    "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_9464_TCP",
    "PORT_9464_TCP_ADDR",
)  # fmt: skip


@pytest.mark.parametrize("service", ["CONTROLLER", "CONTROLLER_MANAGER"])
def test_what_kubernetes_says_about_a_service_of_such_a_name_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, service: str
):
    for name in LINKS:
        monkeypatch.setenv(f"{service}_{name}", "tcp://10.0.0.1:9464")
    Settings.load()
    # It is a Service's only if there is one.
    monkeypatch.delenv(f"{service}_SERVICE_HOST")
    with pytest.raises(SettingsError, match=f"{service}_PORT_9464_TCP_ADDR"):
        Settings.load()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"metrics_port": 70_000}, "metrics_port: "),
        ({"adress": "unix:/x"}, "adress: "),
        ({"address": "unix:"}, "unix:PATH or /PATH; to serve"),
        ({"tcp": "9000"}, "tcp: .*must be HOST:PORT"),
        ({"log_level": "loud"}, "log_level: "),
        ({"max_engines": 0}, "max_engines: "),
        ({"max_message_bytes": 10**30}, "max_message_bytes: "),
        (
            {"planner": {"probe_shar": 0.1}},
            r"planner: unknown: probe_shar: did you mean probe_share, \w+, \w+\? \(",
        ),
        ({"planner": {"probe_share": 2}}, r"planner: .*must be in \[0, 0.999\]"),
        ({"planner": {"lease_seconds": float("inf")}}, "planner: .*must be a finite number"),
        ({"planner": {"shift_z": float("nan")}}, "planner: .*must be a finite number"),
        ({"last_lease_seconds": 601}, "last_lease_seconds: "),
        ({"ready_with": "hope"}, "ready_with: "),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(flags: dict[str, object], text: str):
    with pytest.raises(SettingsError, match=text):
        Settings.load(flags)


@pytest.mark.parametrize("tcp", [None, "127.0.0.1:9466"])
@pytest.mark.parametrize(
    ("named", "text"),
    [
        (("tls_certificate",), "tls_certificate: needs tls_key as well (from flag --tls-certifi"),
        (("tls_key",), "tls_key: needs tls_certificate as well (from flag --tls-key)"),
        (("tls_client_ca",), "tls_client_ca: needs tls_certificate as well"),
        (("tls_client_ca", "tls_certificate"), "tls_certificate: needs tls_key as well"),
        (("tls_client_ca", "tls_key"), "tls_key: needs tls_certificate as well"),
    ],
)
def test_half_of_tls_is_refused(tcp: str | None, named: tuple[str, ...], text: str):
    with pytest.raises(SettingsError, match=re.escape(text)):
        Settings.load({"tcp": tcp} | dict.fromkeys(named, Path("/x.pem")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("redis_user", "ann"),
        ("redis_password", "hunter2"),
        ("redis_password_file", "/run/secrets/redis"),
        ("redis_sentinel_password", "hunter2"),
        ("redis_ca", "/ca.pem"),
        ("redis_replicas", "1"),
        ("redis_namespace", "fleet"),
    ],
)
def test_what_belongs_to_a_redis_is_refused_without_one(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(f"CONTROLLER_{name.upper()}", value)
    with pytest.raises(SettingsError, match=f"{name}: needs redis_url as well") as error:
        Settings.load()
    assert "hunter2" not in str(error.value)
    monkeypatch.setenv("CONTROLLER_REDIS_URL", "redis://cache")
    assert Settings.load().redis_url is not None


def test_all_of_tls_is_taken():
    names = ("tls_certificate", "tls_key", "tls_client_ca")
    assert Settings.load(dict.fromkeys(names, Path("/x.pem"))).tls_client_ca == Path("/x.pem")
    assert Settings.load(dict.fromkeys(names[:2], Path("/x.pem"))).tls_key == Path("/x.pem")


@pytest.mark.parametrize(
    ("flags", "both"),
    [
        ({"metrics_port": 9470, "page_port": 9470}, ("metrics_port", "page_port")),
        ({"page_port": 9464}, ("metrics_port", "page_port")),
        ({"health_port": 9464}, ("metrics_port", "health_port")),
        ({"tcp": "0.0.0.0:9464"}, ("tcp", "metrics_port")),
        ({"tcp": "localhost:9464"}, ("tcp", "metrics_port")),
        ({"tcp": "[::]:9464"}, ("tcp", "metrics_port")),
        ({"tcp": "[::1]:9465", "health_port": 9465}, ("tcp", "health_port")),
        (
            {"tcp": "[::1]:9465", "health_port": 9465, "health_host": "0.0.0.0"},
            ("tcp", "health_port"),
        ),
        ({"tcp": "a-name:9466", "page_port": 9466}, ("tcp", "page_port")),
        ({"tcp": "127.0.0.1:9465", "health_port": 9465}, ("tcp", "health_port")),
        ({"page_port": 9, "health_port": 9}, ("page_port", "health_port")),
    ],
)
def test_two_listeners_on_one_port_are_refused_and_named(
    flags: dict[str, object], both: tuple[str, str]
):
    with pytest.raises(SettingsError) as error:
        Settings.load(flags)
    text = str(error.value)
    assert all(name in text for name in both)
    assert "both would listen on port" in text


@pytest.mark.parametrize(
    "flags",
    [
        {"metrics_port": 0, "page_port": 0, "health_port": 0},
        {"tcp": "10.0.0.1:9464"},
        {"tcp": "[::1]:9464"},
        {"page_host": "10.0.0.1", "page_port": 9464},
        {"tcp": "127.0.0.1:0"},
    ],
)
def test_listeners_apart_may_have_one_port(flags: dict[str, object]):
    Settings.load(flags)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_host_has_brackets_where_its_port_follows(host: str):
    listener = Settings.load({"health_host": host, "health_port": 9465}).listener("health")
    assert (listener.host, listener.address) == ("::1", "[::1]:9465")


@pytest.mark.parametrize(
    "host",
    ["", " ", "::1]", "[::1", "[10.0.0.1]", "[name]", "10.0.0.1:9464", "[::1]:9464", "a b", "x/y"],
)
@pytest.mark.parametrize("name", ["metrics_host", "page_host", "health_host"])
def test_a_host_that_is_none_is_refused(name: str, host: str):
    with pytest.raises(SettingsError, match=f"{name}.*must be an address or a name"):
        Settings.load({name: host})


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "nosuch", "unix:", "relative.sock"])
def test_an_address_to_serve_on_that_is_no_socket_names_the_way_to_tcp(address: str):
    with pytest.raises(SettingsError, match=r"unix:PATH or /PATH; to serve.*--tcp HOST:PORT"):
        Settings.load({"address": address})


def test_a_bare_path_is_a_unix_socket():
    assert Settings.load({"address": "/run/x.sock"}).address == "unix:/run/x.sock"


def test_every_setting_is_described():
    texts = setting_texts(Settings)
    assert texts.keys() == Settings.model_fields.keys()
    assert all(texts.values()), texts


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "controller.yaml"
    path.write_text(
        "metrics_port: 1\nlog_level: debug\nwarm_start: no\nprofiles: [/a, /b]\n"
        "planner:\n  probe_share: 0.02\n  lease_seconds: 3\n"
    )
    return path


def test_the_file_goes_before_defaults_and_after_all_else(
    config: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CONTROLLER_LOG_LEVEL", "error")
    monkeypatch.setenv("CONTROLLER_PLANNER__PROBE_SHARE", "0.03")
    settings, sources = Settings.read({"metrics_port": 2, "tcp": None}, config)
    assert (settings.metrics_port, settings.log_level, settings.warm_start) == (2, "error", False)
    assert settings.profiles == (Path("/a"), Path("/b"))
    # A group is merged constant by constant.
    assert settings.planner == PlannerSettings(probe_share=0.03, lease_seconds=3.0)
    origin_by_key = {key: str(sources.origin(key)) for key in setting_keys()}
    assert origin_by_key["metrics_port"] == "flag --metrics-port"
    assert origin_by_key["log_level"] == "environment CONTROLLER_LOG_LEVEL"
    assert origin_by_key["planner.probe_share"] == "environment CONTROLLER_PLANNER__PROBE_SHARE"
    assert origin_by_key["planner.lease_seconds"] == f"file {config}, line 7"
    assert origin_by_key["tcp"] == "default"
    flags = {"profiles": ["/c"], "planner": {"lease_seconds": 4}}
    settings, sources = Settings.read(flags, config)
    assert settings.planner.lease_seconds == 4
    assert str(sources.origin("profiles")) == "flag --profile"


def test_the_environment_may_name_the_file(config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONTROLLER_CONFIG", str(config))
    assert Settings.load().metrics_port == 1
    config.with_name("other").write_text("metrics_port: 5")
    assert Settings.load(config=config.with_name("other")).metrics_port == 5
    monkeypatch.setenv("CONTROLLER_CONFIG", "/nowhere.yaml")
    with pytest.raises(SettingsError, match=r"/nowhere\.yaml: No such file"):
        Settings.load()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("metric-port: 1", r"line 1: metric-port is not a setting: did you mean metrics_port\?"),
        ("planner: {probe_shar: 1}", r"line 1: planner.probe_shar .*mean planner.probe_share\?"),
        ("config: /x", "line 1: config is not a setting"),
        ("metrics_port: true", "line 1: metrics_port cannot be true or false"),
        ("planner:\n  tide_gamma: yes", "line 2: planner.tide_gamma cannot be true or false"),
        ("metrics_port: many", r"metrics_port: .*is 'many', from file .*, line 1\)"),
        ("metrics_port: 1.5", "metrics_port: .*line 1"),
        ("metrics_port:", "metrics_port: .*line 1"),
        ("log_level: 5", "log_level: .*line 1"),
        ("profiles: /a", "profiles: .*line 1"),
        ("profiles: [1]", "profiles: .*line 1"),
        ("planner: [1]", "planner: .*line 1"),
        ("planner:", "planner: .*line 1"),
        ("planner:\n  probe_share: x", "planner.probe_share: .*line 2"),
        ("planner:\n  probe_share: 7", r"planner: .*must be in \[0, 0.999\].*line 1"),
        ("planner:\n  lease_seconds: .inf", "planner: .*must be a finite number"),
        ("training: {margin: .nan}", "training: .*must be in"),
    ],
)
def test_what_cannot_be_in_the_file_is_said_by_file_line_and_key(
    tmp_path: Path, content: str, text: str
):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=text) as error:
        Settings.load(config=path)
    assert str(path) in str(error.value)


def test_a_wrong_value_is_said_with_its_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONTROLLER_METRICS_PORT", "x")
    with pytest.raises(SettingsError, match=r"from environment CONTROLLER_METRICS_PORT\)"):
        Settings.load()


def test_a_secret_of_the_wrong_kind_is_not_shown(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("redis_url: [hunter2]\n")
    with pytest.raises(SettingsError, match="redis_url: ") as error:
        Settings.load(config=tmp_path / "c.yaml")
    assert "hunter2" not in str(error.value)


def test_what_reloads_are_settings():
    assert set(Settings.model_fields) >= RELOADED
