import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controller.cli import app
from controller.settings.settings import setting_keys, setting_variables
from controller.util import logs
from controller.util.exit_codes import Exit


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch):
    for name in setting_variables() | {"CONTROLLER_CONFIG"}:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "controller.yaml"
    path.write_text(
        "redis_url: redis://:hunter2@h:6379/0\nmetrics_port: 1\nprofiles: [/a, /b]\n"
        "planner:\n  lease_seconds: 3\n"
    )
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(app, ["config", *arguments])


def test_every_setting_comes_with_its_value_its_source_and_what_changes_it(
    config: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CONTROLLER_LOG_LEVEL", "debug")
    done = run("--config", config, "--profile", "/c", "--no-reflection", "-o", "json")
    assert done.exit_code == Exit.DONE, done.output
    rows = {row.pop("key"): row for row in json.loads(done.stdout)["items"]}
    assert list(rows) == list(setting_keys())
    assert rows["metrics_port"] == {
        "value": 1,
        "source": "file",
        "name": f"{config}, line 2",
        "reloads": False,
    }
    assert rows["log_level"] == {
        "value": "debug",
        "source": "environment",
        "name": "CONTROLLER_LOG_LEVEL",
        "reloads": True,
    }
    assert rows["profiles"]["value"] == ["/c"]
    assert (rows["profiles"]["source"], rows["profiles"]["name"]) == ("flag", "--profile")
    assert (rows["reflection"]["value"], rows["reflection"]["source"]) == (False, "flag")
    assert rows["planner.lease_seconds"]["value"] == 3.0
    assert rows["planner.lease_seconds"]["reloads"]
    assert rows["tcp"] == {"value": None, "source": "default", "name": "", "reloads": False}
    assert "hunter2" not in done.output


def test_the_table_says_the_same_to_people_and_keeps_the_secret(config: str):
    done = run("--config", config)
    assert done.exit_code == Exit.DONE
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert {"metrics_port", "planner.lease_seconds", "training.margin"} <= set(lines)
    assert "line 5" in lines["planner.lease_seconds"]
    assert "SIGHUP" in lines["planner.lease_seconds"]
    assert "restart" in lines["metrics_port"]
    assert "/a:/b" in lines["profiles"]
    assert "****" in lines["redis_url"]
    assert "hunter2" not in done.output


def test_a_check_prints_nothing(config: str):
    done = run("--check", "--config", config)
    assert (done.exit_code, done.output) == (Exit.DONE, "")


@pytest.mark.parametrize("more", [(), ("--check",), ("-o", "json")])
def test_what_serve_would_refuse_is_refused(tmp_path: Path, more: tuple[str, ...]):
    path = tmp_path / "c.yaml"
    path.write_text("metrics_prt: 1\nlog_level: loud\n")
    done = run("--config", str(path), *more)
    assert done.exit_code == Exit.USAGE
    assert f"{path}, line 1: metrics_prt is not a setting" in done.output


def test_a_certificate_without_its_key_is_refused_as_serve_refuses_it(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(f"address: unix:{tmp_path}/s\ntcp: 127.0.0.1:9466\ntls_certificate: /x.pem\n")
    checked = run("--check", "--config", str(path))
    served = CliRunner().invoke(app, ["serve", "--config", str(path)])
    for done in (checked, served):
        assert done.exit_code == Exit.USAGE
        assert f"tls_certificate: needs tls_key as well (from file {path}, line 3)" in done.output


def test_two_listeners_on_one_port_are_refused_as_serve_refuses_them(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(f"address: unix:{tmp_path}/s\npage_port: 9466\ntcp: 0.0.0.0:9466\n")
    checked = run("--check", "--config", str(path))
    served = CliRunner().invoke(app, ["serve", "--config", str(path)])
    for done in (checked, served):
        assert done.exit_code == Exit.USAGE
        assert "tcp and page_port: both would listen on port 9466" in done.output
        assert f"{path}, line 2" in done.output


@pytest.mark.parametrize(
    "url", ["http://cache:6379", "redis://", "redis+sentinel://a:1", "redis://:hunter2@cache:x/0"]
)
def test_a_redis_that_serve_could_not_name_is_refused(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONTROLLER_REDIS_URL", url)
    done = run("--check")
    assert done.exit_code == Exit.USAGE
    assert url.partition("//")[0] in done.output
    assert "hunter2" not in done.output


@pytest.mark.parametrize(
    "settings",
    [
        "redis_url: redis://ann:hunter2@h\nredis_password_file: /p\n",
        "redis_url: redis://ann@h\nredis_user: bob\nredis_password: hunter2\n",
        "redis_url: redis+sentinel://h/s?no_such=hunter2\n",
        "redis_url: redis://h\nredis_ca: /ca.pem\n",
        "redis_url: redis+cluster://h/3\n",
        "redis_url: rediss://h?ssl_cert_reqs=hunter2\n",
    ],
)
def test_a_redis_that_serve_would_refuse_is_refused_with_one_sentence(
    tmp_path: Path, settings: str, monkeypatch: pytest.MonkeyPatch
):
    # The logs of this process are those of its tests.
    monkeypatch.setattr(logs, "configure", lambda level: None)
    path = tmp_path / "c.yaml"
    path.write_text(f"address: unix:{tmp_path}/s\nmetrics_port: 0\n{settings}")
    checked = run("--check", "--config", str(path))
    served = CliRunner().invoke(app, ["serve", "--config", str(path)])
    messages = [
        done.output.strip().splitlines()[-1].partition(": ")[2] for done in (checked, served)
    ]
    assert messages[0] == messages[1]
    assert messages[0].startswith("redis")
    for done in (checked, served):
        assert done.exit_code == Exit.USAGE
        assert "Traceback" not in done.output
        assert "hunter2" not in done.output


def test_a_user_in_the_url_goes_with_a_password_file(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("redis_url: redis://ann@h\nredis_password_file: /p\n")
    assert run("--check", "--config", str(path)).exit_code == Exit.DONE


@pytest.mark.parametrize("arguments", [("--nosuch",), ("--metrics-port", "x"), ("stray",)])
def test_options_are_those_of_serve(arguments: tuple[str, ...]):
    assert run(*arguments).exit_code == Exit.USAGE
