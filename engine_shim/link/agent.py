"""Runs the agent: a small process between one engine and the sidecar.

    python -m engine_shim.link.agent --fd 5 --parent 4711 --target unix:/run/.../controller.sock

It talks gRPC in place of the engine, because gRPC's threads would compete for the engine's GIL.  It
ends when the engine closes its end of the socket, or dies.  Logs are JSON lines on stderr.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

import structlog

from engine_shim.link.agent_socket import AgentSocket
from engine_shim.link.credentials import EngineCredentials
from engine_shim.link.errors import PacketError
from engine_shim.link.rate_limited_log import RateLimitedLog
from engine_shim.link.report_buffer import ReportBuffer
from engine_shim.link.sidecar_client import SidecarClient, await_introduction

_PR_SET_PDEATHSIG: Final = 1
EXIT_BAD_INTRODUCTION: Final = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until the engine ends; then returns exit code 0."""
    options = _parse(arguments)
    _exit_with_parent(options.parent)
    # Ctrl-C in a terminal reaches the whole process group; the engine decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _lower_priority(options.nice)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    return asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> int:
    log = RateLimitedLog()
    buffer = ReportBuffer(options.report_buffer)
    engine_socket = socket.socket(fileno=options.fd)
    with contextlib.closing(
        AgentSocket(engine_socket, buffer, log, options.report_interval_ms * 1e-3)
    ) as agent_socket:
        try:
            introduction = await await_introduction(agent_socket)
        except PacketError as error:
            log.warning("bad-introduction", error=str(error))
            return EXIT_BAD_INTRODUCTION
        if introduction is None:
            return 0
        credentials = EngineCredentials(
            options.ca, options.client_certificate, options.client_key, options.token_file
        )
        client = SidecarClient(
            options.target,
            credentials,
            introduction.engine,
            options.lease_max_seconds,
            agent_socket,
            buffer,
            log,
            introduction.engine_secret,
        )
        client_task = asyncio.create_task(client.run())
        engine_gone_task = asyncio.create_task(agent_socket.engine_gone.wait())
        await asyncio.wait({client_task, engine_gone_task}, return_when=asyncio.FIRST_COMPLETED)
        if client_task.done():
            client_task.result()  # `run` never returns normally: this raises its error
        client_task.cancel()
        await asyncio.wait({client_task})
        return 0


def _exit_with_parent(parent: int) -> None:
    """Kills this process when its engine dies, even if forked children keep the socket open."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _lower_priority(nice: int) -> None:
    """Lowers this process's priority, so that waking it does not preempt the engine's threads.

    Under the ordinary policy and niceness, the scheduler of a busy machine runs the woken agent in
    place of the thread that woke it: the engine would wait in its own send.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(PermissionError):
        os.nice(nice)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine_shim.link.agent")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the socket pair")
    parser.add_argument("--parent", type=int, required=True, help="process id of the engine")
    parser.add_argument("--target", required=True, help="gRPC address of the sidecar")
    parser.add_argument("--ca", default="", help="PEM file: the sidecar is called with TLS")
    parser.add_argument("--client-certificate", default="", help="PEM file")
    parser.add_argument("--client-key", default="", help="PEM file")
    parser.add_argument("--token-file", default="")
    parser.add_argument("--nice", type=int, default=19)
    parser.add_argument("--report-buffer", type=int, default=256)
    parser.add_argument("--report-interval-ms", type=float, default=1.0)
    parser.add_argument("--lease-max-seconds", type=float, default=600.0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
