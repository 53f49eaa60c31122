"""`controller serve`: runs the sidecar."""

from pathlib import Path
from typing import Annotated

import typer

# Exit codes: 0 after SIGTERM or SIGINT, 1 when the start was refused, 2 for settings and usage.
EXIT_REFUSED = 1
EXIT_SETTINGS = 2


def serve(
    address: Annotated[
        str | None,
        typer.Option(
            help="Unix socket to serve on, unix:PATH.",
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
    metrics_host: Annotated[
        str | None, typer.Option(help="Address of /metrics.", show_default="127.0.0.1")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics; 0: none.", show_default="9464")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", show_default="info")
    ] = None,
) -> None:
    """Runs the sidecar until SIGTERM or SIGINT.

    Every option, and more, can be set by environment variables with the prefix CONTROLLER_
    (CONTROLLER_METRICS_PORT, …); an option goes before its variable.
    """
    import asyncio
    import os

    # Before grpc is loaded: its own lines on standard error are no JSON.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from controller.core.errors import SpeculationError
    from controller.service import logs
    from controller.service.server import Sidecar
    from controller.settings import Settings, SettingsError

    try:
        settings = Settings.load(
            {
                "address": address,
                "tcp": tcp,
                "access": access,
                "tls_certificate": tls_certificate,
                "tls_key": tls_key,
                "tls_client_ca": tls_client_ca,
                "state_directory": state_directory,
                "profiles": profile or None,
                "profile_directory": profile_directory,
                "metrics_host": metrics_host,
                "metrics_port": metrics_port,
                "log_level": log_level,
            }
        )
    except SettingsError as error:
        typer.echo(f"controller serve: {error}", err=True)
        raise typer.Exit(EXIT_SETTINGS) from error
    logs.configure(settings.log_level)
    try:
        asyncio.run(Sidecar(settings).run())
    except SpeculationError as error:
        typer.echo(f"controller serve: {error}", err=True)
        raise typer.Exit(EXIT_REFUSED) from error
    finally:
        logs.tell_suppressed()
