"""`controller override` beside a sidecar process, as an operator types it."""

import json
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from controller.cli import app
from controller.cli.output import API_VERSION
from controller.util.exit_codes import Exit
from controller.wire.override_text import PRECEDENCE
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.credentials import free_address, make_authority, token_line
from tests.support.eventually import eventually
from tests.support.service_harness import ENVIRONMENT, PATIENCE_SECONDS, engine_message
from tests.support.sidecar_process import CONTROLLER, SidecarProcess, controller, sidecar_process


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """Steers "night" and "day"."""
    directory: Path = tmp_path_factory.mktemp("sidecar")
    with (
        sidecar_process(directory) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        for name in ("night", "day"):
            stub.Introduce(
                service_pb2.IntroduceRequest(engine=engine_message(name)), timeout=PATIENCE_SECONDS
            )
        yield running


def command(sidecar: SidecarProcess, *words: str) -> "subprocess.CompletedProcess[str]":
    return controller("override", *words, "--address", sidecar.address)


def test_policy_is_listed_with_its_file_and_a_bad_file_is_reported(tmp_path: Path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("policies:\n  - {name: bound, fleet: true, reason: memory, at_most: 2}\n")
    environment = {"CONTROLLER_POLICY": str(policy)}
    with sidecar_process(tmp_path, environment=environment) as running:
        assert command(running, "set", "--fleet", "--gamma", "1", "--id", "mine", "--reason", "r",
                       "--allow-no-effect").returncode == 0  # fmt: skip
        rows = command(running, "list").stdout.splitlines()
        (of_file,) = [row for row in rows if "policy:bound" in row]
        (of_operator,) = [row for row in rows if "mine" in row]
        assert str(policy) in of_file
        assert "with its file" in of_file
        assert "operator" in of_operator
        items = json.loads(command(running, "list", "-o", "json").stdout)["items"]
        assert [item.get("origin", "") for item in items] == ["", str(policy)]
        assert not command(running, "list").stderr
        with grpc.insecure_channel(running.address) as channel:
            service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
                service_pb2.IntroduceRequest(engine=engine_message("pod")), timeout=PATIENCE_SECONDS
            )
        explained = " ".join(
            controller("explain", "pod", "--numbers", "--address", running.address).stdout.split()
        )
        assert f"gamma <= 2; policy file {policy}: memory" in explained
        policy.write_text("policies: 1\n")
        stderr_text = eventually_said(running, "must be a list")
        assert "its previous version stays in force" in stderr_text
        doctor = controller("doctor", "--address", running.address, "--engine-url", "")
        assert f"fail policy: {policy}, line 1: policies: must be a list" in doctor.stdout
        assert (
            command(running, "clear", "policy:bound", "--reason", "r").returncode == Exit.NOT_FOUND
        )
    # It keeps a copy; where nothing is kept, such a file is refused.
    done = subprocess.run(
        [*CONTROLLER, "serve", "--address", f"unix:{tmp_path}/other.sock", "--metrics-port", "0"],
        env=ENVIRONMENT | environment, capture_output=True, text=True, check=False,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == Exit.BAD_FILE
    assert f"{policy}, line 1: policies: must be a list" in done.stderr


def eventually_said(sidecar: SidecarProcess, text: str) -> str:
    """What `override list` says on standard error once it says this."""
    stderr_text = ""

    def there() -> bool:
        nonlocal stderr_text
        stderr_text = command(sidecar, "list").stderr
        return text in stderr_text

    eventually(there, timeout_seconds=PATIENCE_SECONDS, description=text)
    return stderr_text


def test_online_updates_where_the_engine_can_and_where_it_cannot(sidecar: SidecarProcess):
    able = engine_message("able")
    able.capabilities.can_update_online = True
    with grpc.insecure_channel(sidecar.address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        stub.Introduce(service_pb2.IntroduceRequest(engine=able), timeout=PATIENCE_SECONDS)
    words = ["--regime", "online:5", "--id", "learn", "--reason", "new traffic"]
    done = command(sidecar, "set", "--fleet", *words)
    assert done.returncode == 0, done.stderr

    def explain_engine(engine: str) -> str:
        return " ".join(
            controller("explain", engine, "--numbers", "--address", sidecar.address).stdout.split()
        )

    assert "the drafter's online updates: online:5" in explain_engine("able")
    assert "cannot do" not in explain_engine("able")
    refused = "online:5 is asked for, which this engine cannot do: no online updates"
    assert refused in explain_engine("night")
    assert "the drafter's online updates" not in explain_engine("night")
    assert command(sidecar, "clear", "learn", "--reason", "done").returncode == 0
    assert "online" not in explain_engine("able") + explain_engine("night")


def test_a_pin_at_three_in_the_morning(sidecar: SidecarProcess):
    pin = ["set", "--engine", "night", "--gamma", "1", "--id", "pin", "--reason", "drafter is ill"]
    tried = command(sidecar, *pin, "--dry-run")
    assert tried.returncode == 0, tried.stderr
    assert "engine night would change" in tried.stdout
    assert "no override is in force" in command(sidecar, "list").stdout

    done = command(sidecar, *pin, "--ttl", "2h", "--author", "ann")
    assert done.returncode == 0, done.stderr
    assert "pin lasts 2 h" in done.stdout
    assert "controller override clear pin" in done.stdout
    again = command(sidecar, *pin, "--ttl", "2h", "--author", "ann")
    already = r"pin is already in force because of the same request, and ends in (2 h|120 m)"
    assert re.search(already, again.stdout)
    assert "engine night: unchanged" in again.stdout
    assert again.returncode == 0

    listed = command(sidecar, "list").stdout
    for word in ("pin", "engine night", "gamma = 1", "ann", "drafter is ill", PRECEDENCE):
        assert word in listed
    explanation = controller("explain", "night", "--numbers", "--address", sidecar.address).stdout
    assert "override pin: engine night: gamma = 1; ann: drafter is ill" in explanation
    assert PRECEDENCE in explanation
    assert "override;" in explanation
    assert "forbidden" in explanation
    assert (
        "override"
        not in controller("explain", "day", "--numbers", "--address", sidecar.address).stdout
    )

    other = command(sidecar, "set", "--engine", "night", "--off", "--id", "pin", "--reason", "x")
    assert other.returncode == 1
    assert "exists with different content" in other.stderr

    ended = command(sidecar, "clear", "pin", "--reason", "well again", "--author", "bob")
    assert ended.returncode == 0, ended.stderr
    log = command(sidecar, "log", "pin").stdout
    assert log.index("well again") < log.index("drafter is ill")
    records = json.loads(command(sidecar, "log", "-o", "json").stdout)["items"]
    assert [r["action"] for r in records if r["override_id"] == "pin"] == ["clear", "set"]


def test_every_kind_of_rule_can_be_said(sidecar: SidecarProcess):
    rules = {
        "off": (["--fleet", "--off", "--batch", "64-"], "no speculation"),
        "bounds": (["--model", "target", "--at-least", "1", "--at-most", "2"], "gamma <= 2"),
        "bound": (["--fleet", "--tpot-max-ms", "12.5"], "at most 12.5 ms a token"),
        "drafter": (["--fleet", "--drafter", "mtp", "--batch", "8-12"], "drafter mtp"),
        "regime": (["--engine", "day", "--regime", "online:10"], "regime online:10"),
        "deny": (["--fleet", "--deny-drafter", "dflash", "--deny-updates"], "not drafter dflash"),
        "probe": (["--fleet", "--deny-exploration", "--permanent"], "no probing"),
    }
    for name, (words, text) in rules.items():
        more = ["--id", name, "--reason", "test", "--allow-no-effect"]
        done = command(sidecar, "set", *words, *more)
        assert done.returncode == 0, done.stderr
        listed = command(sidecar, "list").stdout
        assert text in next(line for line in listed.splitlines() if line.startswith(f"{name} "))
    assert "permanent" in command(sidecar, "list").stdout
    overrides = json.loads(command(sidecar, "list", "-o", "json").stdout)["items"]
    assert {o["override"]["override_id"] for o in overrides} == set(rules)
    for name in rules:
        assert command(sidecar, "clear", name, "--reason", "done").returncode == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--off"], "name the engines: one of"),
        (["--off", "--fleet", "--engine", "a"], "name the engines: one of"),
        (["--fleet"], "must demand something"),
        (["--fleet", "--off", "--ttl", "soon"], "90s, 30m, 2h or 1d"),
        (["--fleet", "--off", "--ttl", "0s"], "ttl_seconds 0"),
        (["--fleet", "--off", "--ttl", "30d"], "at most 604800"),
        (["--fleet", "--off", "--ttl", "1h", "--permanent"], "contradict each other"),
        (["--fleet", "--off", "--batch", "many"], "8-32"),
        (["--fleet", "--off", "--batch", "9-3"], "the range is empty"),
        (["--fleet", "--regime", "online"], "online:STRIDE"),
        (["--fleet", "--gamma", "99"], "gamma 99 must be in [0, 64]"),
        (
            ["--fleet", "--tpot-max-ms", "0"],
            "tpot_max_seconds 0: a time per output token",
        ),
        (["--fleet", "--tpot-max-ms", "nan"], "tpot_max_seconds nan"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    sidecar: SidecarProcess, words: list[str], text: str
):
    result = command(sidecar, "set", *words, "--reason", "test")
    assert result.returncode == Exit.USAGE
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_effects_and_shadows_are_told_in_words(sidecar: SidecarProcess):
    pin = command(sidecar, "set", "--engine", "night", "--gamma", "2", "--id", "n", "--reason", "x")
    assert pin.returncode == 0, pin.stderr
    fleet = ["set", "--fleet", "--gamma", "1", "--reason", "x", "--id", "f"]
    done = command(sidecar, *fleet)
    assert done.returncode == 0, done.stderr
    assert "engine night: no effect: shadowed by n" in done.stdout
    assert "engine day changes when it connects again" in done.stdout
    explanation = controller("explain", "night", "--numbers", "--address", sidecar.address).stdout
    assert "override f (shadowed by n): fleet: gamma = 1" in explanation
    longer = command(sidecar, *fleet, "--ttl", "5h")
    assert longer.returncode == 0, longer.stderr
    assert "f lasts 5 h from now on" in longer.stdout
    for name in ("n", "f"):
        assert command(sidecar, "clear", name, "--reason", "x").returncode == 0


def test_a_bound_is_told_with_what_it_does_and_does_not_reach(sidecar: SidecarProcess):
    bound = ["set", "--engine", "night", "--reason", "x", "--tpot-max-ms"]
    loose = command(sidecar, *bound, "500", "--id", "loose")
    assert loose.returncode == 0, loose.stderr
    assert "engine night runs as now, but the allowed choices change" in loose.stdout
    explanation = controller("explain", "night", "--numbers", "--address", sidecar.address).stdout
    assert "ms a token" in explanation
    assert (
        "bound of 500 ms a token (override loose): met, and without it the choice would be"
        in explanation
    )
    tight = command(sidecar, *bound, "0.01", "--id", "tight")
    assert tight.returncode == 0, tight.stderr
    assert "no allowed choice meets the bound on the time per output token" in tight.stdout
    explanation = controller("explain", "night", "--numbers", "--address", sidecar.address).stdout
    assert "bound of 0.01 ms a token (override tight): not met, " in explanation
    assert "no choice meets it here; no choice meets it even in the smallest batches" in explanation
    assert "! above the bound" in explanation
    assert "override loose (shadowed by tight): engine night: at most 500 ms a token" in explanation
    for name in ("loose", "tight"):
        assert command(sidecar, "clear", name, "--reason", "x").returncode == 0
    explanation = controller("explain", "night", "--numbers", "--address", sidecar.address).stdout
    assert "ms a token" not in explanation


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--engine", "nigth", "--off"], Exit.NOT_INTRODUCED, "knows no engine nigth; it knows"),
        (["--model", "nosuch", "--off"], Exit.NO_EFFECT, "knows no model nosuch; it knows target"),
        (["--engine", "day", "--drafter", "x"], Exit.NO_EFFECT, "it has no drafter x; it has mtp"),
        (["--engine", "day", "--gamma", "6"], Exit.NO_EFFECT, "it has no draft length 6"),
        (["--engine", "day", "--at-most", "3"], Exit.NO_EFFECT, "it would change nothing"),
        (
            ["--engine", "day", "--off", "--id", "x", "--etag", "9-a"],
            Exit.NOT_FOUND,
            "does not exist",
        ),
    ],
)
def test_what_has_no_effect_is_not_set_unless_that_is_allowed(
    sidecar: SidecarProcess, words: list[str], code: Exit, text: str, dry_run: tuple[str, ...]
):
    def run(*words: str) -> Result:
        return CliRunner().invoke(app, ["override", *words, "--address", sidecar.address])

    asked, name = ["set", *words, "--reason", "test", *dry_run], f"allowed-{secrets.token_hex(4)}"
    refused = run(*asked)
    assert refused.exit_code == code
    assert text in refused.output
    if code is not Exit.NOT_FOUND:
        assert "--allow-no-effect" in refused.output
        assert run(*asked, "--id", name, "--allow-no-effect").exit_code == 0
    if not dry_run and code is not Exit.NOT_FOUND:
        assert run("clear", name, "--reason", "test").exit_code == 0
    assert "no override is in force" in run("list").output


def test_the_list_shows_which_override_is_newer(sidecar: SidecarProcess):
    words = ["--engine", "night", "--reason", "why", "--allow-no-effect", "--id"]
    assert command(sidecar, "set", "--gamma", "1", *words, "dated").returncode == 0
    listed = command(sidecar, "list")
    assert "set at" in listed.stdout
    assert re.search(r"dated .* \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", listed.stdout)
    assert command(sidecar, "clear", "dated", "--reason", "done").returncode == 0


def test_one_batch_size_is_no_range(sidecar: SidecarProcess):
    words = ["--off", "--batch", "1", "--id", "one-size", "--reason", "why", "--allow-no-effect"]
    off = command(sidecar, "set", "--engine", "night", *words)
    assert off.returncode == 0, off.stderr
    assert "1-1" not in off.stdout
    assert command(sidecar, "clear", "one-size", "--reason", "done").returncode == 0


@pytest.mark.parametrize("form", ["json", "yaml", "name"])
def test_a_watch_streams_documents_and_names(sidecar: SidecarProcess, form: str):
    here, name = ["--address", sidecar.address], f"seen-as-{form}"
    set_ = ["override", "set", "--fleet", "--off", "--id", name, "--reason", "test"]
    assert CliRunner().invoke(app, [*set_, "--allow-no-effect", *here]).exit_code == 0
    words = [*CONTROLLER, "override", "watch", "-o", form, *here]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            shown: list[str] = []
            while name not in "".join(shown):
                shown.append(process.stdout.readline())
            if form == "json":
                document = json.loads(shown[-1])
                assert (document["api_version"], document["kind"]) == (API_VERSION, "OverrideNews")
                assert document["change"] == "present"
                assert document["held"]["override"]["override_id"] == name
            elif form == "yaml":
                assert shown[:3] == [
                    "---\n",
                    f"api_version: {API_VERSION}\n",
                    "kind: OverrideNews\n",
                ]
            else:
                assert shown[-1] == f"{name}\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == Exit.DONE
        finally:
            process.kill()
            clear = ["override", "clear", name, "--reason", "test", *here]
            assert CliRunner().invoke(app, clear).exit_code == 0


def test_watching_shows_changes_as_they_come(sidecar: SidecarProcess):
    words = [*CONTROLLER, "override", "watch", "--address", sidecar.address]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == PRECEDENCE
            set_ = ["set", "--fleet", "--off", "--id", "seen", "--reason", "test"]
            assert command(sidecar, *set_, "--allow-no-effect").returncode == 0
            line = process.stdout.readline()
            assert "seen" in line
            assert "fleet: no speculation" in line
            command(sidecar, "clear", "seen", "--reason", "test")
            line = process.stdout.readline()
            assert line.startswith("ended")
        finally:
            process.kill()


def test_no_sidecar_is_said_in_words(tmp_path: Path):
    result = controller("override", "list", "--address", f"unix:{tmp_path}/absent.sock")
    assert result.returncode == Exit.NO_SIDECAR
    assert "is `controller serve` running there?" in result.stderr
    assert "If it uses another address, set CONTROLLER_ADDRESS" in result.stderr


def test_over_tcp_with_tls_and_a_token(tmp_path: Path):
    make_authority(tmp_path, ["sidecar"])
    access, token = tmp_path / "access", tmp_path / "token"
    access.write_text(token_line("read,override", "secret-of-ann", "ann"))
    token.write_text("secret-of-ann\n")
    tcp = free_address()
    flags = [
        "--tcp", tcp, "--access", str(access), "--tls-certificate", str(tmp_path / "sidecar.pem"),
        "--tls-key", str(tmp_path / "sidecar.key"),
    ]  # fmt: skip
    caller = {"CONTROLLER_CA": str(tmp_path / "ca.pem"), "CONTROLLER_TOKEN_FILE": str(token)}
    address = ["--address", tcp.replace("127.0.0.1", "localhost")]
    with sidecar_process(tmp_path, *flags) as running:
        words = ["override", "set", "--fleet", "--off", "--id", "tls", "--reason", "test"]
        words.append("--allow-no-effect")
        assert controller(*words, *address, environment=caller).returncode == 0
        listed = controller("override", "list", *address, environment=caller)
        assert "\ntls " in listed.stdout
        token.write_text("guessed")
        refused = controller("override", "list", *address, environment=caller)
        assert refused.returncode == Exit.DENIED
        assert "client certificate of the access list" in refused.stderr
        log = controller("override", "log", "--address", running.address).stdout
        assert "ipv4:127.0.0.1" in log
        _, lines = running.stop()
    assert "secret-of-ann" not in json.dumps(lines) + log + listed.stdout
