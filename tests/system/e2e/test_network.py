"""Whom the sidecar, an engine's link and its agent call, by the kernel's own account: strace.

A whole life is traced: start, an engine on the socket and one over TCP, an override, a profile, a
reload, the end.  Every connect() and every packet with an address has to go to a configured peer;
a look-up by DNS would be one to a name server.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.harness.processes import free_port
from tests.support.eventually import eventually
from tests.support.redis_server import RedisServer
from tests.support.service_harness import ENVIRONMENT, make_profile
from tests.support.sidecar_process import CONTROLLER, controller, wait_until_serving

PATIENCE_SECONDS = 120.0
CALLS = "connect,sendto,sendmsg,sendmmsg"
INET = re.compile(
    r"sa_family=AF_INET6?, sin6?_port=htons\((\d+)\).*?(?:inet_addr\(\"|inet_pton\(AF_INET6, \")"
    r"([^\"]+)\""
)
UNIX = re.compile(r"sa_family=AF_UNIX, sun_path=(@?)\"([^\"]+)\"")
# Where libc asks for names of users and hosts on this machine, if a daemon answers there.
LOCAL = {"unix:/var/run/nscd/socket"}
ENGINE = """
import sys
from tests.support.linked_engine import linked_engine
with linked_engine(*sys.argv[1:]) as engine:
    engine.run(50)
    print("steered", flush=True)
    for _ in sys.stdin:
        engine.run(50)
        print("ran", flush=True)
"""


@contextmanager
def traced(
    trace: Path, *command: str, environment: Mapping[str, str], log: Path = Path(os.devnull)
) -> Iterator["subprocess.Popen[str]"]:
    """The command and its children under strace, which writes whom they call."""
    strace = shutil.which("strace")
    assert strace is not None, "apt-get install strace"
    with log.open("w") as errors, subprocess.Popen(
        [strace, "-f", "-qq", "-e", f"trace={CALLS}", "-e", "signal=none", "-o", trace, *command],
        env=ENVIRONMENT | dict(environment),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def called(trace: Path) -> set[str]:
    """HOST:PORT and unix:PATH of every called peer."""
    text = trace.read_text(errors="replace")
    addresses = {f"{host}:{port}" for port, host in INET.findall(text)}
    return addresses | {f"unix:{prefix}{path}" for prefix, path in UNIX.findall(text)}


def wait_for_word(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word


def ask(process: "subprocess.Popen[str]") -> None:
    """More steps, to their end."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    wait_for_word(process, "ran")


def ended(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=PATIENCE_SECONDS) == 0


def reloaded(log: Path) -> bool:
    return "settings_reloaded" in log.read_text()


def test_nobody_is_called_but_the_configured_peers(tmp_path: Path):
    tcp = free_port()
    address, profile, log = f"unix:{tmp_path}/s", tmp_path / "profile.json", tmp_path / "log"
    settings = tmp_path / "settings.yaml"
    settings.write_text("log_level: info\n")
    profile.write_text(make_profile().to_json())
    ports = [str(free_port()) for _ in range(3)]
    flags = (
        *("--config", str(settings), "--address", address, "--tcp", f"127.0.0.1:{tcp}"),
        *("--metrics-port", ports[0], "--health-port", ports[1], "--page-port", ports[2]),
    )
    here = {"CONTROLLER_ADDRESS": address}
    # What the environment names for the web is nothing to these.
    proxies = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    with (
        RedisServer(tmp_path / "redis") as redis,
        traced(
            tmp_path / "sidecar", *CONTROLLER, "serve", *flags,
            environment=proxies | {"CONTROLLER_REDIS_URL": redis.url}, log=log,
        ) as sidecar,
    ):  # fmt: skip
        wait_until_serving(address, sidecar)
        engine = (sys.executable, "-c", ENGINE)
        with (
            traced(tmp_path / "near", *engine, address, "near", environment=proxies) as near,
            traced(
                tmp_path / "far", *engine, f"localhost:{tcp}", "far", environment=proxies
            ) as far,
        ):
            wait_for_word(near, "steered")
            wait_for_word(far, "steered")
            for words in (
                ("override", "set", "--fleet", "--at-most", "1", "--reason", "a trace"),
                ("profile", "push", str(profile)),
                ("explain", "near"),
            ):
                done = controller(*words, environment=here)
                assert done.returncode == 0, done.stderr
            settings.write_text("log_level: debug\n")
            # Of the two, strace does not listen, and does not forward the signal.
            (pid,) = children(sidecar.pid)
            os.kill(pid, signal.SIGHUP)
            eventually(
                lambda: reloaded(log), timeout_seconds=PATIENCE_SECONDS, description="reloaded"
            )
            ask(near)
            ask(far)
            ended(near)
            ended(far)
        os.kill(pid, signal.SIGTERM)
        assert sidecar.wait(timeout=PATIENCE_SECONDS) == 0
    loopback = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    # With port 0 libc asks the kernel which of a name's addresses it would reach; nothing is sent.
    named = {f"{host}:{port}" for host in loopback for port in (tcp, 0)}
    # Operators' calls are passed to a socket of its own, which has no path.
    own = {peer for peer in called(tmp_path / "sidecar") if "unix:/proc/self/fd/" in peer}
    assert len(own) <= 1
    assert called(tmp_path / "sidecar") - LOCAL - own == {f"127.0.0.1:{redis.port}"}
    assert called(tmp_path / "near") - LOCAL == {address}
    assert f"127.0.0.1:{tcp}" in called(tmp_path / "far") <= named | LOCAL


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("code", "peer"),
    [
        ("s.socket().connect_ex(('127.0.0.1', 9))", r"127\.0\.0\.1:9"),
        ("s.socket(s.AF_INET6).connect_ex(('::1', 9))", r"::1:9"),
        ("s.socket(type=s.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))", r"127\.0\.0\.1:9"),
        ("s.socket(s.AF_UNIX).connect_ex('/nowhere')", "unix:/nowhere"),
        ("s.gethostbyname_ex('name.invalid')", r"[\d.:a-f]+:53"),
    ],
)
def test_whoever_is_called_is_seen(tmp_path: Path, code: str, peer: str):
    script = f"import socket as s, contextlib\nwith contextlib.suppress(OSError): {code}"
    with traced(tmp_path / "trace", sys.executable, "-c", script, environment={}) as process:
        process.wait(timeout=PATIENCE_SECONDS)
    assert any(re.fullmatch(peer, one) for one in called(tmp_path / "trace"))
