"""The command line.  Commands import what they need when they run, so that `--help` is instant."""

import typer

from controller.cli import (
    advise,
    config,
    convert,
    doctor,
    explain,
    incident_report,
    override,
    policy,
    profile,
    profiles,
    replay,
    serve,
    simulate,
    top,
)
from controller.util.exit_codes import Exit

app = typer.Typer(
    name="controller",
    help="Steers speculative decoding: how far should an LLM engine speculate, right now?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("config", context_settings=config.CONTEXT)(config.config)
app.add_typer(profile.profile, name="profile")
for _name, _command in profiles.COMMANDS.items():
    profile.profile.command(_name)(_command)
app.command("engines")(explain.engines)
app.command("explain")(explain.explain)
app.command("top")(top.top)
app.add_typer(override.override, name="override")
app.add_typer(policy.policy, name="policy")
app.command("doctor")(doctor.doctor)
app.command("simulate")(simulate.simulate)
app.command("replay")(replay.replay)
app.command("report")(incident_report.report)
app.command("convert")(convert.convert)
app.command("advise")(advise.advise)


@app.command("version")
def version() -> None:
    """Prints the version."""
    import controller

    print(controller.__version__)


def main() -> None:
    """Entry point of the `controller` script."""
    try:
        app()
    except UnicodeEncodeError as error:
        # An argument was no UTF-8, and stands in a message to the sidecar or on the screen.
        typer.echo(f"controller: {ascii(error.object)[:200]} is not UTF-8 text", err=True)
        raise SystemExit(Exit.USAGE) from error


__all__ = ["app", "main"]
