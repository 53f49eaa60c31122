"""Implements `controller serve`: runs the sidecar."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.output import refuse
from controller.util.exit_codes import Exit

if TYPE_CHECKING:
    from controller.core.errors import SpeculationError


def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of settings; also CONTROLLER_CONFIG.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Unix socket to serve on, unix:PATH or /PATH.",
            show_default="unix:/run/speculation/controller.sock",
        ),
    ] = None,
    tcp: Annotated[
        str | None,
        typer.Option(help="HOST:PORT to serve on as well."),
    ] = None,
    access: Annotated[
        Path | None, typer.Option(help="Access list for TCP: who may read, steer, override.")
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file: TCP is served with TLS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file: clients need a certificate of this authority.")
    ] = None,
    state_directory: Annotated[
        Path | None,
        typer.Option(
            help="Where overrides and their audit are kept.", show_default="beside the socket"
        ),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Profile file, or directory of them; may be given several times."),
    ] = None,
    profile_directory: Annotated[
        Path | None,
        typer.Option(
            help="Where profiles measured through this sidecar are kept, and found again."
        ),
    ] = None,
    ready_with: Annotated[
        str | None,
        typer.Option(
            help="Steering is SERVING from: profile, roofline or guess.", show_default="roofline"
        ),
    ] = None,
    health_host: Annotated[
        str | None, typer.Option(help="Address of the health port.", show_default="all")
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            help="TCP port with grpc.health.v1 alone, for a kubelet; 0: none.", show_default="0"
        ),
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address of /metrics.", show_default="127.0.0.1")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics; 0: none.", show_default="9464")
    ] = None,
    page_host: Annotated[
        str | None, typer.Option(help="Address of the web page.", show_default="127.0.0.1")
    ] = None,
    page_port: Annotated[
        int | None,
        typer.Option(help="Port of the web page, to look at; 0: none.", show_default="0"),
    ] = None,
    reflection: Annotated[
        bool | None,
        typer.Option("--reflection/--no-reflection", help="gRPC reflection.", show_default="on"),
    ] = None,
    channelz: Annotated[
        bool | None,
        typer.Option(
            "--channelz/--no-channelz", help="gRPC channelz, on the unix sockets.",
            show_default="off",
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", show_default="info")
    ] = None,
) -> None:  # fmt: skip
    """Runs the sidecar until SIGTERM or SIGINT; SIGHUP has it read its settings again.

    Every option, and more, can be set in a YAML file (--config) and by environment variables with
    the prefix CONTROLLER_ (CONTROLLER_METRICS_PORT, …).  An option goes before its variable, that
    before the file.  `controller config` shows the resulting settings.

    Exit codes: 0 stopped by SIGTERM or SIGINT, 2 options or settings, 8 a socket or port is taken,
    9 a file that a setting names (profile, access list, policy, certificate) cannot be used, 10 the
    state directory or the store cannot be used, 1 anything else.
    """
    # All are read from the context: `controller config` reads a command line of ours the same way.
    del config, address, tcp, access, tls_certificate, tls_key, tls_client_ca, state_directory
    del profile, profile_directory, ready_with, health_host, health_port, metrics_host
    del metrics_port, page_host, page_port, reflection, channelz, log_level
    import asyncio
    import os
    import signal

    # Until the sidecar listens to it: it would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Before grpc is loaded: its own lines on standard error are no JSON.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from controller.core.errors import SpeculationError
    from controller.service.net import limits
    from controller.service.server import Sidecar
    from controller.settings.settings import Settings, SettingsError
    from controller.util import logs

    flags, file = flags_of(context.params)

    def read() -> Settings:
        return Settings.load(flags, file)

    try:
        settings = read()
    except SettingsError as error:
        refuse("serve", error)
    logs.configure(settings.log_level)
    limits.raise_descriptors(settings)
    try:
        asyncio.run(Sidecar(settings).run(read))
    except SpeculationError as error:
        refuse("serve", error, _code_of(error))
    finally:
        logs.tell_suppressed()


def flags_of(params: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """(settings, settings file) that a command line of `serve` names."""
    given = {name: value for name, value in params.items() if value not in (None, (), [])}
    if "profile" in given:
        given["profiles"] = given.pop("profile")
    config = given.pop("config", None)
    return given, None if config is None else Path(config)


def _code_of(error: "SpeculationError") -> Exit:
    from controller.service.net.access import AccessFileError
    from controller.service.net.errors import AddressTakenError
    from controller.service.net.unix_socket import SocketTakenError
    from controller.service.sessions.profile_registry import ProfileFileError
    from controller.settings.policy_file import PolicyFileError
    from controller.store.interface import StoreError
    from controller.store.redis_client import RedisUrlError

    table: tuple[tuple[type[SpeculationError], Exit], ...] = (
        (SocketTakenError, Exit.TAKEN),
        (AddressTakenError, Exit.TAKEN),
        (AccessFileError, Exit.BAD_FILE),
        (ProfileFileError, Exit.BAD_FILE),
        (PolicyFileError, Exit.BAD_FILE),
        (StoreError, Exit.NO_STORE),
        (RedisUrlError, Exit.USAGE),
    )
    return next((code for kind, code in table if isinstance(error, kind)), Exit.FAILED)
