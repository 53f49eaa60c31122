"""`controller serve` as its own process, and other commands beside it."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tests.support.service_harness import ENVIRONMENT, health_stub

# A process of its own on a busy machine.
PATIENCE_SECONDS = 60.0
CONTROLLER = (sys.executable, "-m", "controller.cli")


@dataclass
class SidecarProcess:
    """A sidecar that serves on `address`; once it has ended, its log lines, if no file has them."""

    process: subprocess.Popen[str]
    address: str
    seconds_to_serving: float

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, list[dict[str, Any]]]:
        """(exit code, log lines)."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, [json.loads(line) for line in (errors or "").splitlines()]


@contextmanager
def sidecar_process(
    directory: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[SidecarProcess]:
    """log: where its lines go; by default a pipe, which holds some hundred."""
    address = f"unix:{directory}/controller.sock"
    command = [*CONTROLLER, "serve", "--address", address, "--metrics-port", "0", *flags]
    start_time = time.monotonic()
    variables = ENVIRONMENT | dict(environment or {})
    with (
        contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("a") as lines,
        subprocess.Popen(command, env=variables, stderr=lines, text=True) as process,
    ):
        try:
            wait_until_serving(address, process)
            yield SidecarProcess(process, address, time.monotonic() - start_time)
        finally:
            process.kill()


def wait_until_serving(address: str, process: "subprocess.Popen[str]") -> None:
    socket_file = Path(address.removeprefix("unix:"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not socket_file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    # A killed one's file is there at once: whoever comes next is looked for without long pauses.
    pauses = [(f"grpc.{name}_reconnect_backoff_ms", 50) for name in ("initial", "min", "max")]
    options = [*pauses, ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        for answer in health_stub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS, wait_for_ready=True
        ):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


def controller(
    *arguments: str, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """One command, run to its end."""
    return subprocess.run(
        [*CONTROLLER, *arguments],
        env=ENVIRONMENT | (environment or {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
