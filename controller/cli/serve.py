"""Implements `controller serve` and `controller config`: runs the sidecar, and shows its settings.

`config` takes the options of `serve`, and names the source of each value.
"""

from collections.abc import Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.connection import DEFAULT_ADDRESS
from controller.cli.output import (
    Column,
    Listing,
    Output,
    OutputOption,
    exit_with_error,
    print_list,
)
from controller.util.exit_codes import Exit

if TYPE_CHECKING:
    from controller.core.errors import SpeculationError
    from controller.settings.settings import Settings
    from controller.settings.sources import Sources

# All other options of `controller config` are those of `controller serve`.
CONFIG_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def _option(name: str, kind: Any, text: str, shown: str = "", *, flags: str = "") -> Parameter:
    """Describes the option of a setting.

    name: of the setting, or of `split_flags`.  text: the help.  shown: the default that the help
    names; the real one is None, so that the other sources of settings count.  flags: the names on
    the command line if they are not --NAME.
    """
    names = (flags,) if flags else ()
    option = typer.Option(*names, help=text, show_default=shown or True)
    annotation = Annotated[kind | None, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_OPTIONS = (
    _option("config", Path, "YAML file of settings; also CONTROLLER_CONFIG."),
    _option("address", str, "Unix socket to serve on, unix:PATH or /PATH.", DEFAULT_ADDRESS),
    _option("tcp", str, "Serve on this HOST:PORT as well."),
    _option("access", Path, "Access list for TCP: who may read, steer, override."),
    _option("tls_certificate", Path, "PEM file with the certificate; TCP then uses TLS."),
    _option("tls_key", Path, "PEM file with the private key of the certificate."),
    _option("tls_client_ca", Path, "PEM file; clients need a certificate of this authority."),
    _option(
        "state_directory", Path, "Directory of overrides and their audit.", "next to the socket"
    ),
    _option("profile", list[Path], "Profile file, or directory of profiles; may be repeated."),
    _option(
        "profile_directory",
        Path,
        "Directory that keeps the profiles measured through this sidecar.",
    ),
    _option(
        "ready_with",
        str,
        "Step times that the health check requires: profile, roofline or guess.",
        "roofline",
    ),
    _option("health_host", str, "Address of the health port.", "all"),
    _option("health_port", int, "TCP port with only grpc.health.v1, for a kubelet; 0: none.", "0"),
    _option("metrics_host", str, "Address of /metrics.", "127.0.0.1"),
    _option("metrics_port", int, "Port of /metrics; 0: none.", "9464"),
    _option("page_host", str, "Address of the web page.", "127.0.0.1"),
    _option("page_port", int, "Port of the web page; 0: none.", "0"),
    _option("reflection", bool, "gRPC reflection.", "on", flags="--reflection/--no-reflection"),
    _option(
        "channelz",
        bool,
        "gRPC channelz, on the unix sockets.",
        "off",
        flags="--channelz/--no-channelz",
    ),
    _option("log_level", str, "debug, info, warning or error.", "info"),
)


def serve(**options: Any) -> None:
    """Runs the sidecar until SIGTERM or SIGINT; on SIGHUP it reads its settings again.

    All settings can be set in a YAML file (--config) and by environment variables with the prefix
    CONTROLLER_ (CONTROLLER_METRICS_PORT, …).  An option overrides its variable, and a variable
    overrides the file.  `controller config` shows the resulting settings.

    Exit codes: 0 stopped by SIGTERM or SIGINT, 2 options or settings, 8 a socket or port is taken,
    9 a file that a setting names (profile, access list, policy, certificate) cannot be used, 10 the
    state directory or the store cannot be used, 1 anything else.
    """
    import asyncio
    import os
    import signal

    # The sidecar handles it once it has started; by default it would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Before grpc is imported: it would print lines on standard error that are not JSON.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from controller.core.errors import SpeculationError
    from controller.service.net import limits
    from controller.service.server import Sidecar
    from controller.settings.settings import Settings, SettingsError
    from controller.util import logs

    flags, file = split_flags(options)

    def load_settings() -> Settings:
        return Settings.load(flags, file)

    try:
        settings = load_settings()
    except SettingsError as error:
        exit_with_error("serve", error)
    logs.configure(settings.log_level)
    limits.raise_descriptor_limit(settings)
    try:
        asyncio.run(Sidecar(settings).run(load_settings))
    except SpeculationError as error:
        exit_with_error("serve", error, _exit_code(error))
    finally:
        logs.log_suppressed_counts()


# Typer reads the options from the signature.
serve.__signature__ = Signature(_OPTIONS)  # type: ignore[attr-defined]


def split_flags(params: Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """Returns the settings and the settings file that a command line of `serve` names."""
    given_options = {name: value for name, value in params.items() if value not in (None, (), [])}
    if "profile" in given_options:
        given_options["profiles"] = given_options.pop("profile")
    config = given_options.pop("config", None)
    return given_options, None if config is None else Path(config)


def _exit_code(error: "SpeculationError") -> Exit:
    from controller.service.net.access import AccessFileError
    from controller.service.net.errors import AddressTakenError
    from controller.service.net.unix_sockets import SocketTakenError
    from controller.service.state.profile_registry import ProfileFileError
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


def config(
    context: typer.Context,
    output: OutputOption = Output.TABLE,
    check: Annotated[
        bool, typer.Option("--check", help="Print nothing, and only set the exit code.")
    ] = False,
) -> None:
    """Prints every setting: its value, its source, and whether SIGHUP reloads it.

    Takes the options of `controller serve`, such as --config FILE, and reads the environment as
    `serve` does.  Secrets are masked.  Files that a setting names, such as profiles and
    certificates, are not read.

    Exit codes: 0 `controller serve` would accept these settings, 2 it would refuse them.
    """
    from controller.core.errors import SpeculationError
    from controller.settings.settings import Settings

    flags, file = split_flags(_serve_params(context.args))
    try:
        settings, sources = Settings.read(flags, file)
        _check_redis_settings(settings)
    except SpeculationError as error:
        exit_with_error("config", error)
    if check:
        return
    print_list(_SETTINGS, _setting_rows(settings, sources), output)


def _check_redis_settings(settings: "Settings") -> None:
    """Checks the Redis settings without connecting.  Raises RedisUrlError, as `serve` would."""
    if settings.redis_url is not None:
        from controller.settings.redis_settings import redis_access
        from controller.store.redis_client import connect

        url = settings.redis_url.get_secret_value()
        connect(url, timeout_seconds=1.0, access=redis_access(settings))


def _serve_params(arguments: list[str]) -> dict[str, Any]:
    """Parses a command line as `controller serve` does, usage errors included."""
    app = typer.Typer()
    app.command()(serve)
    command = typer.main.get_command(app)
    return command.make_context("controller config", list(arguments)).params


def _setting_rows(settings: "Settings", sources: "Sources") -> list[dict[str, Any]]:
    from controller.settings.settings import setting_keys

    return [
        {
            "key": key,
            "value": _plain_value(settings, key),
            "source": sources.origin(key).kind,
            "name": sources.origin(key).name,
            "reloads": _is_reloaded(key),
        }
        for key in setting_keys()
    ]


def _value_text(row: dict[str, Any]) -> str:
    value = row["value"]
    return ":".join(value) if isinstance(value, list) else "-" if value is None else str(value)


def _source_text(row: dict[str, Any]) -> str:
    return f"{row['source']} {row['name']}".strip()


_SETTINGS: Listing[dict[str, Any]] = Listing(
    "SettingList",
    lambda row: str(row["key"]),
    (
        Column("setting", lambda row: str(row["key"])),
        Column("value", _value_text),
        Column("from", _source_text),
        Column("reloads", lambda row: "SIGHUP" if row["reloads"] else "restart", priority=1),
    ),
    lambda row: row,
)


def _is_reloaded(key: str) -> bool:
    from controller.settings.settings import RELOADED

    return key.partition(".")[0] in RELOADED


def _plain_value(settings: "Settings", key: str) -> Any:
    """Returns a setting as a JSON value.  Secrets are masked, which is how pydantic writes them."""
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    if isinstance(value, tuple):
        return [str(part) for part in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)
