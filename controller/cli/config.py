"""Implements `controller config`: the settings of a sidecar, and where each value comes from."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.output import (
    Column,
    Listing,
    Output,
    OutputOption,
    refuse,
    show,
)
from controller.cli.serve import flags_of, serve

if TYPE_CHECKING:
    from controller.settings.settings import Settings
    from controller.settings.sources import Sources

# Options that are not ours are those of `controller serve`.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def config(
    context: typer.Context,
    output: OutputOption = Output.TABLE,
    check: Annotated[
        bool, typer.Option("--check", help="Print nothing; the exit code says it.")
    ] = False,
) -> None:
    """Prints every setting: its value, where it comes from, and whether SIGHUP puts it into use.

    Takes every option of `controller serve`, --config FILE above all, and reads the environment as
    it does.  Secrets are masked.  A profile or certificate that a setting names is not looked at.

    Exit codes: 0 `controller serve` would take these settings, 2 it would refuse them.
    """
    from controller.core.errors import SpeculationError
    from controller.settings.settings import Settings

    flags, file = flags_of(_serve_params(context.args))
    try:
        settings, sources = Settings.read(flags, file)
        _require_a_redis(settings)
    except SpeculationError as error:
        refuse("config", error)
    if check:
        return
    show(_SETTINGS, _rows(settings, sources), output)


def _require_a_redis(settings: "Settings") -> None:
    """Nobody is called.  Raises RedisUrlError, as the start would."""
    if settings.redis_url is not None:
        from controller.settings.redis_settings import redis_access
        from controller.store.redis_client import connect

        url = settings.redis_url.get_secret_value()
        connect(url, timeout_seconds=1.0, access=redis_access(settings))


def _serve_params(arguments: list[str]) -> dict[str, Any]:
    """Reads the settings that `controller serve` takes from a command line.

    Ends with its usage error if it does.
    """
    app = typer.Typer()
    app.command()(serve)
    command = typer.main.get_command(app)
    return command.make_context("controller config", list(arguments)).params


def _rows(settings: "Settings", sources: "Sources") -> list[dict[str, Any]]:
    from controller.settings.settings import keys

    return [
        {
            "key": key,
            "value": _value(settings, key),
            "source": sources.origin(key).kind,
            "name": sources.origin(key).name,
            "reloads": _reloads(key),
        }
        for key in keys()
    ]


def _shown(row: dict[str, Any]) -> str:
    value = row["value"]
    return ":".join(value) if isinstance(value, list) else "-" if value is None else str(value)


def _origin(row: dict[str, Any]) -> str:
    return f"{row['source']} {row['name']}".strip()


_SETTINGS: Listing[dict[str, Any]] = Listing(
    "SettingList",
    lambda row: str(row["key"]),
    (
        Column("setting", lambda row: str(row["key"])),
        Column("value", _shown),
        Column("from", _origin),
        Column("reloads", lambda row: "SIGHUP" if row["reloads"] else "restart", priority=1),
    ),
    lambda row: row,
)


def _reloads(key: str) -> bool:
    from controller.settings.settings import RELOADED

    return key.partition(".")[0] in RELOADED


def _value(settings: "Settings", key: str) -> Any:
    """Returns a value as JSON has it; secrets masked, which is how pydantic writes them."""
    value: Any = settings
    for name in key.split("."):
        value = getattr(value, name)
    if isinstance(value, tuple):
        return [str(part) for part in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)
