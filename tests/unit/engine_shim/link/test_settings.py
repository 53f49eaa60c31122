import pytest

from engine_shim.common.settings import ShimSettings
from engine_shim.link.credentials import EngineCredentials
from engine_shim.link.errors import LinkSettingsError
from engine_shim.link.settings import LinkSettings
from engine_shim.sglang.api.settings import PluginSettings
from tests.support.addresses import ELSEWHERE, LOOPBACK
from tests.support.setting_texts import setting_texts


def test_without_variables_the_plugin_is_off(monkeypatch):
    settings = LinkSettings.load()
    assert settings.sidecar == ""
    assert settings.gammas == (0, 1, 2, 3, 5, 7)
    assert settings.safe_gamma is None


def test_variables_are_read(monkeypatch):
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/run/speculation/controller.sock")
    monkeypatch.setenv("SPECULATION_GAMMAS", "0, 2,4")
    monkeypatch.setenv("SPECULATION_GRACE_SECONDS", "2.5")
    monkeypatch.setenv("SPECULATION_SAFE_GAMMA", "2")
    settings = LinkSettings.load()
    assert settings.sidecar == "unix:/run/speculation/controller.sock"
    assert settings.gammas == (0, 2, 4)
    assert settings.grace_seconds == 2.5
    assert settings.safe_gamma == 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SPECULATION_GAMMAS", "", "SPECULATION_GAMMAS=''"),
        ("SPECULATION_GAMMAS", "3,1", "ascending"),
        ("SPECULATION_GAMMAS", "1,1", "without duplicates"),
        ("SPECULATION_GAMMAS", "0,65", r"\[0, 64\]"),
        ("SPECULATION_GAMMAS", "-1,0", r"\[0, 64\]"),
        ("SPECULATION_GAMMAS", "a", "SPECULATION_GAMMAS='a'.*integer"),
        ("SPECULATION_SIDECAR", "/run/x.sock", "unix:<path>"),
        ("SPECULATION_SIDECAR", "host", "<host>:<port>"),
        ("SPECULATION_ENGINE_ID", "a b", "SPECULATION_ENGINE_ID='a b'"),
        ("SPECULATION_GRACE_SECONDS", "-1", "SPECULATION_GRACE_SECONDS"),
        ("SPECULATION_GRACE_SECONDS", "nan", "SPECULATION_GRACE_SECONDS"),
        ("SPECULATION_SAFE_GAMMA", "65", "SPECULATION_SAFE_GAMMA"),
        ("SPECULATION_REPORT_BUFFER", "0", "SPECULATION_REPORT_BUFFER"),
        ("SPECULATION_AGENT_NICE", "20", "SPECULATION_AGENT_NICE"),
    ],
)
def test_an_impossible_value_is_refused_by_name(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(LinkSettingsError, match=message):
        LinkSettings.load()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CLIENT_KEY": "k"}, "set together"),
        ({"CLIENT_KEY": "k", "CLIENT_CERTIFICATE": "c"}, "requires TLS"),
        ({"SIDECAR": "far:1", "TOKEN_FILE": "t"}, "unencrypted"),
    ],
)
def test_credentials_that_cannot_work_are_refused(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(f"SPECULATION_{name}", value)
    with pytest.raises(LinkSettingsError, match=message):
        LinkSettings.load()


@pytest.mark.parametrize("sidecar", ELSEWHERE)
def test_what_only_looks_like_this_machine_gets_no_token(monkeypatch, sidecar):
    monkeypatch.setenv("SPECULATION_SIDECAR", sidecar)
    monkeypatch.setenv("SPECULATION_TOKEN_FILE", "t")
    with pytest.raises(LinkSettingsError):
        LinkSettings.load()
    # Nor from the trainer and the agent, which read no settings.
    with pytest.raises(LinkSettingsError, match="unencrypted"):
        EngineCredentials(token_file="t").channel(sidecar)


@pytest.mark.parametrize("sidecar", ["unix:/x.sock", *LOOPBACK])
def test_a_token_may_go_over_a_line_that_does_not_leave_the_machine(monkeypatch, sidecar):
    monkeypatch.setenv("SPECULATION_SIDECAR", sidecar)
    monkeypatch.setenv("SPECULATION_TOKEN_FILE", "t")
    assert LinkSettings.load().token_file == "t"


def test_an_unknown_variable_is_refused_and_the_likely_one_named(monkeypatch):
    monkeypatch.setenv("SPECULATION_GAMAS", "1")
    with pytest.raises(LinkSettingsError, match=r"SPECULATION_GAMAS: did you mean .*_GAMMAS\?"):
        LinkSettings.load()


@pytest.mark.parametrize("service", ["SPECULATION", "SPECULATION_ROUTER"])
def test_what_kubernetes_says_about_a_service_of_such_a_name_is_no_setting(monkeypatch, service):
    for name in ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_80_TCP_PROTO"):
        monkeypatch.setenv(f"{service}_{name}", "tcp://10.0.0.1:80")
    LinkSettings.load()
    monkeypatch.delenv(f"{service}_SERVICE_HOST")
    with pytest.raises(LinkSettingsError, match=f"unknown setting {service}_"):
        LinkSettings.load()


def test_an_unknown_variable_like_no_other_gets_the_list(monkeypatch):
    monkeypatch.setenv("SPECULATION_CPU_MODEL", "x")
    with pytest.raises(LinkSettingsError, match=r"known: .*SPECULATION_SIDECAR"):
        LinkSettings.load()


def test_every_setting_is_documented():
    for settings in (LinkSettings, ShimSettings, PluginSettings):
        for name, text in setting_texts(settings).items():
            assert len(text) > 20, name
