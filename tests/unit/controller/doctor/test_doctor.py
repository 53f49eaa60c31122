"""The doctor against real sidecars, real agents and a real HTTP server, well and ill."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import controller
from controller.doctor import DoctorRequest, Finding, Level, diagnose
from controller.doctor.sidecar import SidecarAnswers, check_sidecar
from controller.settings.settings import CLIENT_VARIABLES, setting_variables
from controller.util.exit_codes import Exit
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from lab.harness.processes import free_port
from speculation.v1 import policy_pb2, service_pb2
from tests.support.credentials import free_address, make_authority, token_line
from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tests.support.service_harness import (
    RunningSidecar,
    SteerClient,
    engine_message,
    make_profile,
    report_message,
    running_sidecar,
    with_timeout,
)
from tests.support.sidecar_process import controller as command
from tests.support.sidecar_process import sidecar_process
from tests.support.step_reports import send, step_report

Findings = dict[str, Finding]


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch):
    for name in setting_variables() | CLIENT_VARIABLES | {"CONTROLLER_CONFIG"}:
        monkeypatch.delenv(name, raising=False)


class Http:
    """An engine's HTTP API as SGLang has it: /health and /server_info."""

    def __init__(self) -> None:
        self.health = 200
        self.info: tuple[int, Any] = (200, {"internal_states": [{}]})
        # What vLLM answers, and SGLang has no path for.
        self.version: tuple[int, Any] = (404, {})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = (outer.health, {}) if self.path == "/health" else outer.info
                if self.path == "/version":
                    status, body = outer.version
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *arguments: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def says(self, **status: Any) -> None:
        """The plugin's part of /server_info."""
        self.info = (200, {"internal_states": [{"speculation_controller": status}]})


@pytest.fixture
def http() -> Iterator[Http]:
    server = Http()
    thread = threading.Thread(target=server.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.server.shutdown()
    server.server.server_close()
    thread.join()


async def examined(directory: Path, **request: Any) -> Findings:
    address = f"unix:{directory}/controller.sock"
    checks = [it async for it in diagnose(DoctorRequest(**{"address": address, **request}))]
    assert all(bool(it.fix) == (it.level is not Level.OK) for it in checks), checks
    assert all("\n" not in it.state + it.fix for it in checks)
    return {it.check: it for it in reversed(checks)}


def levels(findings: Findings) -> dict[str, str]:
    return {name: it.level.value for name, it in findings.items()}


async def steered(running: RunningSidecar, **fingerprint: Any) -> SteerClient:
    """A session with an open stream and one step reported."""
    spec = engine_message()
    spec.fingerprint.shim_version = controller.__version__
    for name, value in fingerprint.items():
        setattr(spec.fingerprint, name, value)
    opened = await with_timeout(
        running.speculation.Introduce(service_pb2.IntroduceRequest(engine=spec))
    )
    stream = SteerClient(running, opened.session_id)
    await stream.send(report_message(1))
    await stream.plan()
    return stream


async def install(running: RunningSidecar) -> None:
    request = service_pb2.InstallProfileRequest(profile_json=make_profile().to_json())
    await with_timeout(running.profiling.InstallProfile(request))


async def test_all_is_well(tmp_path: Path, http: Http, monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    monkeypatch.setenv("CONTROLLER_HEALTH_PORT", str(port))
    monkeypatch.setenv("CONTROLLER_ADDRESS", f"unix:{tmp_path}/controller.sock")
    http.says(agent_connected=True, sidecar="STEERING", plans_taken=3)
    async with running_sidecar(tmp_path, health_port=port) as running:
        stream = await steered(running)
        await install(running)
        checks = await examined(tmp_path, address="", engine_url=http.url)
        assert levels(checks) == dict.fromkeys(
            (
                "settings", "socket", "operators", "sidecar", "version", "clock", "store",
                "engine engine-0", "shim of engine-0", "profile of engine-0", "engine HTTP",
                "plugin", "state directory", "disk", "health port",
            ),
            "ok",
        )  # fmt: skip
        await stream.call.done_writing()


async def test_a_vllm_engine_is_looked_for_among_those_that_have_introduced_themselves(
    tmp_path: Path, http: Http
):
    http.version = (200, {"version": "0.32.0"})
    async with running_sidecar(tmp_path) as running:
        checks = await examined(tmp_path, engine_url=http.url)
        assert checks["engine HTTP"].state.endswith("answers (vLLM)")
        assert checks["plugin"].level is Level.FAIL
        assert "VLLM_PLUGINS" in checks["plugin"].fix
        stream = await steered(running, engine="vllm")
        assert (await examined(tmp_path, engine_url=http.url))["plugin"].level is Level.OK
        await stream.call.done_writing()
    assert "plugin" not in await examined(tmp_path, engine_url=http.url)


async def test_a_sidecar_without_engine_and_profile(tmp_path: Path):
    async with running_sidecar(tmp_path):
        checks = await examined(tmp_path)
    assert "SpeculationService is NOT_SERVING: no engine" in checks["sidecar"].state
    assert "start an engine with the shim" in checks["sidecar"].fix
    assert checks["engine"].level is Level.FAIL
    assert f"SPECULATION_SIDECAR=unix:{tmp_path}/controller.sock" in checks["engine"].fix


async def test_an_engine_whose_stream_is_closed_and_whose_profile_is_another_ones(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        running.sidecar.profiles.add(make_profile(target_model="another"))
        await running.introduce()
        checks = await examined(tmp_path)
        checks_with_url = await examined(tmp_path, engine_url="http://[::1]:1")
    assert checks["engine engine-0"].level is Level.FAIL
    assert "runs without a valid plan" in checks["engine engine-0"].state
    assert checks["profile of engine-0"].level is Level.WARN
    assert "target_model is 'another' in the profile" in checks["profile of engine-0"].state
    assert checks["profile of engine-0"].fix.endswith("--engine-url http://127.0.0.1:PORT")
    assert checks_with_url["profile of engine-0"].fix.endswith("--engine-url http://[::1]:1")
    assert checks["sidecar"].level is Level.FAIL


async def test_other_versions_and_lost_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with running_sidecar(tmp_path, ready_with="guess") as running:
        stream = await steered(running, shim_version="0.0.9")
        checks = await examined(tmp_path)
        assert checks["sidecar"].level is Level.OK
        assert checks["shim of engine-0"].level is Level.WARN
        assert "version 0.0.9" in checks["shim of engine-0"].state
        assert checks["engine engine-0"].level is Level.OK
        await stream.send(dropped=3)
        await stream.send(report_message(1))
        await stream.rejections()
        checks = await examined(tmp_path)
        assert checks["engine engine-0"].level is Level.WARN
        assert checks["engine engine-0"].state == "1 reports refused, 3 dropped"
        await stream.call.done_writing()


async def test_an_engine_that_has_not_run_a_step_yet(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send()
        await stream.plan()
        checks = await examined(tmp_path)
        assert checks["engine engine-0"].level is Level.WARN
        assert "send it a request" in checks["engine engine-0"].fix
        await stream.call.done_writing()


async def test_nobody_answers(tmp_path: Path):
    checks = await examined(tmp_path, engine_url=f"http://127.0.0.1:{free_port()}")
    assert checks["socket"].level is checks["sidecar"].level is Level.FAIL
    assert "UNAVAILABLE" in checks["sidecar"].state
    assert checks["engine HTTP"].level is Level.FAIL
    assert "--engine-url" in checks["engine HTTP"].fix
    assert (await examined(tmp_path, engine_url="nonsense"))["engine HTTP"].level is Level.FAIL


async def test_the_state_of_the_sidecar_that_is_asked_is_looked_at(tmp_path: Path):
    asked = f"unix:{tmp_path}/elsewhere.sock"
    findings = [it async for it in diagnose(DoctorRequest(address=asked))]
    (state,) = [it for it in findings if it.check == "state directory"]
    assert f"{tmp_path}/elsewhere.sock.state" in state.state


async def test_settings_that_serve_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "c.yaml").write_text("metrics_prt: 1\nlog_levl: x\n")
    checks = await examined(tmp_path, config=tmp_path / "c.yaml")
    assert checks["settings"].level is Level.FAIL
    assert "line 1: metrics_prt is not a setting" in checks["settings"].state
    assert "(and 1 more)" in checks["settings"].state
    # The rest is looked at all the same.
    assert checks["sidecar"].level is Level.FAIL


async def test_a_store_in_trouble_and_a_redis_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = f"redis://:hunter2@127.0.0.1:{free_port()}/0"
    monkeypatch.setenv("CONTROLLER_REDIS_URL", url)
    async with running_sidecar(tmp_path):
        checks = await examined(tmp_path)
    assert checks["store"].level is checks["redis"].level is Level.FAIL
    assert "active overrides stay in force" in checks["store"].fix
    assert "cannot be reached (Connection refused)" in checks["redis"].state
    assert "redis_url" in checks["redis"].fix
    assert "hunter2" not in str(checks)


async def test_a_redis_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with RedisServer(tmp_path / "redis") as server:
        monkeypatch.setenv("CONTROLLER_REDIS_URL", server.url)
        redis = (await examined(tmp_path))["redis"]
    assert redis.level is Level.OK
    assert "clock +0.0 s" in redis.state


async def test_a_health_port_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONTROLLER_HEALTH_PORT", str(free_port()))
    checks = await examined(tmp_path)
    assert checks["health port"].level is Level.FAIL
    assert "UNAVAILABLE" in checks["health port"].state


@pytest.mark.parametrize(
    ("status", "level", "text"),
    [
        (None, Level.FAIL, "runs without the plugin"),
        ({"agent_connected": False, "sidecar": "UNKNOWN"}, Level.FAIL, "its agent has ended"),
        (
            {"agent_connected": True, "sidecar": "REFUSED", "sidecar_detail": "packet version"},
            Level.FAIL,
            "REFUSED: packet version",
        ),
        ({"agent_connected": True, "sidecar": "AWAY"}, Level.FAIL, "no session: AWAY"),
        ({"agent_connected": True, "sidecar": "STEERING"}, Level.OK, "steered"),
    ],
)
async def test_what_the_plugin_says_of_itself(
    tmp_path: Path, http: Http, status: dict[str, Any] | None, level: Level, text: str
):
    if status is not None:
        http.says(**status)
    plugin = (await examined(tmp_path, engine_url=http.url))["plugin"]
    assert plugin.level is level
    assert text in plugin.state


async def test_engines_that_are_ill_or_want_a_key(tmp_path: Path, http: Http):
    http.health = 503
    checks = await examined(tmp_path, engine_url=http.url)
    assert "answers 503" in checks["engine HTTP"].state
    http.health, http.info = 200, (401, {})
    checks = await examined(tmp_path, engine_url=http.url)
    assert "--api-key" in checks["plugin"].fix


@pytest.mark.parametrize(
    ("jump", "apart", "level", "text"),
    [
        (0.0, 0.0, Level.OK, "set by +0.0 s"),
        (-0.01, 0.0, Level.OK, "set by +0.0 s"),
        (-3600.0, 0.0, Level.WARN, "was set by -3600.0 s"),
        (0.0, 40.0, Level.WARN, "is +39.5 s from this machine's clock"),
        (0.0, -40.0, Level.WARN, "is -39.5 s from this machine's clock"),
    ],
)
def test_clocks(jump: float, apart: float, level: Level, text: str):
    here = time.time()
    now = here + apart
    sidecar = service_pb2.SidecarStatus(
        now_unix_seconds=now, started_at_unix_seconds=now - 100 - jump, uptime_seconds=100
    )
    answers = SidecarAnswers(
        service_pb2.ListEnginesResponse(sidecar=sidecar),
        policy_pb2.ListOverridesResponse(),
        here - 0.5,
        here + 0.5,
    )
    clock = {it.check: it for it in check_sidecar(answers)}["clock"]
    assert clock.level is level
    assert text in clock.state


async def test_a_sidecar_behind_tls_is_asked_with_what_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_authority(tmp_path, ["sidecar"])
    (tmp_path / "other").mkdir()
    make_authority(tmp_path / "other", [])
    access, token = tmp_path / "access", tmp_path / "token"
    access.write_text(token_line("read", "secret-of-ann", "ann"))
    tcp = free_address()
    tls: dict[str, Any] = {
        "tls_certificate": tmp_path / "sidecar.pem",
        "tls_key": tmp_path / "sidecar.key",
    }
    address = tcp.replace("127.0.0.1", "localhost")
    async with running_sidecar(tmp_path, tcp=tcp, access=access, **tls):
        sidecar_checks = (await examined(tmp_path, address=address))["sidecar"]
        assert sidecar_checks.state == f"{address} does not answer: UNAVAILABLE"
        assert "name its authority in CONTROLLER_CA" in sidecar_checks.fix
        monkeypatch.setenv("CONTROLLER_CA", f"{tmp_path}/other/ca.pem")
        sidecar_checks = (await examined(tmp_path, address=address))["sidecar"]
        assert "the authority in CONTROLLER_CA has not issued" in sidecar_checks.fix
        monkeypatch.setenv("CONTROLLER_CA", f"{tmp_path}/ca.pem")
        sidecar_checks = (await examined(tmp_path, address=address))["sidecar"]
        assert "no token or client certificate" in sidecar_checks.state
        assert "CONTROLLER_TOKEN_FILE" in sidecar_checks.fix
        monkeypatch.setenv("CONTROLLER_TOKEN_FILE", str(token))
        sidecar_checks = (await examined(tmp_path, address=address))["sidecar"]
        assert sidecar_checks.state == f"CONTROLLER_TOKEN_FILE: {token}: No such file or directory"
        token.write_text("secret-of-ann\n")
        all_found = await examined(tmp_path, address=address)
    assert all_found["version"].level is all_found["store"].level is Level.OK
    assert "NOT_SERVING: no engine" in all_found["sidecar"].state
    assert "secret-of-ann" not in str(all_found)


@contextmanager
def linked(address: str) -> Iterator[EngineLink]:
    """A real agent, and an engine that runs a step occasionally."""
    spec = engine_message("pod-7")
    spec.fingerprint.shim_version = controller.__version__
    link = EngineLink.start(spec, LinkSettings(sidecar=address), startup_gamma=1)
    try:

        def step(number: int) -> bool:
            choice = link.choose(4)
            report = step_report(number, (4, *(0,) * choice.gamma), choice, drafter="mtp")
            send(link, report)
            return choice.source is Source.PLAN

        eventually(lambda: link.choose(4).source is Source.PLAN, timeout_seconds=60)
        for number in range(1, 20):
            step(number)
        yield link
    finally:
        link.close()


def test_the_command_sees_a_real_pod_and_ends_with_what_it_found(tmp_path: Path, http: Http):
    (tmp_path / "p.json").write_text(make_profile().to_json())
    with (
        sidecar_process(tmp_path, "--profile", f"{tmp_path}/p.json") as sidecar,
        linked(sidecar.address) as link,
    ):
        status = link.status()
        http.says(
            agent_connected=status.agent_connected,
            sidecar=status.sidecar.name,
            plans_taken=status.plans_taken,
        )
        words = ("doctor", "--engine-url", http.url)
        environment = {"CONTROLLER_ADDRESS": sidecar.address}
        done = eventually(
            lambda: (
                it
                if (it := command(*words, environment=environment)).returncode == Exit.DONE
                else None
            ),
            timeout_seconds=60,
        )
        assert "fail " not in done.stdout
        assert "ok   engine pod-7: " in done.stdout
        assert "ok   plugin: steered" in done.stdout
        sidecar.stop()
        done = command(*words, "-o", "json", environment=environment)
    assert done.returncode == Exit.FAILED
    rows = {row["check"]: row for row in json.loads(done.stdout)["items"]}
    assert rows["socket"]["level"] == rows["sidecar"]["level"] == "fail"
    assert "controller serve" in rows["socket"]["fix"]
    assert rows["state directory"]["level"] == "ok"
