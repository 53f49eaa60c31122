"""Implements `controller override`: sets and clears overrides; `override_lists` shows them."""

import datetime as dt
import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from controller.cli import override_lists
from controller.cli.completion import engine_ids, override_ids
from controller.cli.connection import (
    DEFAULT_ADDRESS,
    UINT32_MAX,
    Address,
    open_connection,
    to_operators_address,
)
from controller.cli.output import Output, OutputOption, plain_values, print_line, print_result
from controller.util.exit_codes import Exit
from controller.wire.override_text import (
    PRECEDENCE,
    parse_batch_range,
    regime_text,
)

if TYPE_CHECKING:
    from speculation.v1 import policy_pb2

_ANSWER_SECONDS_MAX = 10.0
_NO_EFFECT_HINT = "nothing was set; add --allow-no-effect to set it anyway"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

override = typer.Typer(
    no_args_is_help=True,
    help=f"Pins, bounds or forbids draft lengths and drafters for a limited time.\n\n{PRECEDENCE}",
)


@override.command("set")
def set_(
    reason: Annotated[str, typer.Option(help="Reason of the change, for the audit log.")],
    engine: Annotated[
        str | None, typer.Option(help="Apply to this engine.", autocompletion=engine_ids)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Apply to all engines of this target model.")
    ] = None,
    fleet: Annotated[bool, typer.Option("--fleet", help="Apply to every engine.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Turn speculation off.")] = False,
    gamma: Annotated[
        int | None, typer.Option(min=0, max=UINT32_MAX, help="Pin the draft length (gamma).")
    ] = None,
    at_least: Annotated[
        int | None, typer.Option(min=0, max=UINT32_MAX, help="Smallest draft length.")
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(min=0, max=UINT32_MAX, help="Largest draft length.")
    ] = None,
    tpot_max_ms: Annotated[
        float | None,
        typer.Option(help="Bound on the mean time per output token, in milliseconds."),
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Use only this drafter.")] = None,
    regime: Annotated[
        str | None, typer.Option(help="Online updates: off, collect, or online:STRIDE.")
    ] = None,
    deny_drafter: Annotated[
        list[str] | None, typer.Option(help="Do not use this drafter; may be repeated.")
    ] = None,
    deny_updates: Annotated[
        bool, typer.Option("--deny-updates", help="Forbid online updates.")
    ] = False,
    deny_exploration: Annotated[
        bool, typer.Option("--deny-exploration", help="Forbid probing.")
    ] = False,
    batch: Annotated[
        str | None, typer.Option(help="Apply only to these batch sizes: 8, 8-32, 64- or -4.")
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(help="Time to live: 90s, 30m, 2h, 1d.  The sidecar has a default."),
    ] = None,
    permanent: Annotated[
        bool, typer.Option("--permanent", help="Keep the override until it is cleared.")
    ] = False,
    override_id: Annotated[
        str | None, typer.Option("--id", help="Id of the override; give the same id to retry.")
    ] = None,
    etag: Annotated[str, typer.Option(help="Replace the override that has this etag.")] = "",
    author: Annotated[
        str | None, typer.Option(envvar="CONTROLLER_AUTHOR", help="Author, for the audit log.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the effects; set nothing.")
    ] = False,
    allow_no_effect: Annotated[
        bool,
        typer.Option(
            "--allow-no-effect",
            help="Set it even if it has no effect on the engines of this sidecar.",
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Sets an override and shows what it changes on this sidecar's engines.

    Exit codes: 0 set, 1 refused, 2 options, 4 no sidecar answers, 6 the sidecar does not know the
    engine, 10 the store cannot be written, 11 it would have no effect, 12 permission denied.  With
    any code but 0 nothing was set.
    """
    from controller.client.channels import user_name
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    rule = policy_pb2.OverrideRule(
        off=off, gamma=gamma, gamma_min=at_least, gamma_max=at_most, drafter=drafter,
        deny_drafters=deny_drafter or [], deny_updates=deny_updates,
        deny_exploration=deny_exploration,
        tpot_max_seconds=None if tpot_max_ms is None else tpot_max_ms / 1e3,
    )  # fmt: skip
    _set_regime(rule, regime)
    low, high = _parse_batch_range(batch)
    name = override_id or f"{dt.datetime.now(dt.UTC):%Y%m%d-%H%M%S}-{_random_suffix()}"
    request = policy_pb2.SetOverrideRequest(
        override=policy_pb2.Override(
            override_id=name, scope=_make_scope(engine, model, fleet), rule=rule,
            min_batch_size=low,
            max_batch_size=high, author=author or user_name(), reason=reason,
        ),
        etag=etag,
        dry_run=dry_run,
        require_effect=not allow_no_effect,
    )  # fmt: skip
    if ttl is not None and permanent:
        raise typer.BadParameter("--ttl and --permanent contradict each other")
    if ttl is not None:
        request.ttl_seconds = _parse_ttl(ttl)
    elif permanent:
        request.for_ever = True
    hints = dict.fromkeys((Exit.NO_EFFECT, Exit.NOT_INTRODUCED), _NO_EFFECT_HINT)
    with open_connection(to_operators_address(address), hints) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).SetOverride(
            request, timeout=_ANSWER_SECONDS_MAX
        )
    values = {"override_id": name, "dry_run": dry_run, **plain_values(answer)}
    print_result(
        "OverrideResult",
        values,
        output,
        [name],
        lambda: _print_set_answer(name, answer, dry_run=dry_run),
    )


def _print_set_answer(
    name: str, answer: "policy_pb2.SetOverrideResponse", *, dry_run: bool
) -> None:
    lasts = override_lists.remaining_text(answer.held)
    if answer.repeated:
        print_line(f"{name} is already in force because of the same request, and ends in {lasts}")
    elif answer.end_moved:
        print_line(
            f"{name} is already in force; its end {'would move' if dry_run else 'has moved'}:"
        )
        print_line(f"{name} {'would last' if dry_run else 'lasts'} {lasts} from now on")
    else:
        print_line(f"{name} {'would last' if dry_run else 'lasts'} {lasts}")
    _print_effects(answer.effects, is_dry_run=dry_run, renewed=answer.repeated or answer.end_moved)
    if not dry_run:
        print_line(
            f"etag {answer.held.etag}; to end it: controller override clear {name} --reason ..."
        )


@override.command("clear")
def clear(
    override_id: Annotated[
        str,
        typer.Argument(
            help="Override id, as `controller override list` shows it.", autocompletion=override_ids
        ),
    ],
    reason: Annotated[str, typer.Option(help="Reason of the change, for the audit log.")],
    etag: Annotated[str, typer.Option(help="Clear it only if it still has this etag.")] = "",
    author: Annotated[
        str | None, typer.Option(envvar="CONTROLLER_AUTHOR", help="Author, for the audit log.")
    ] = None,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Ends an override now, and shows what that changes.

    Exit codes: 0 ended, 1 refused (another etag), 2 options, 4 no sidecar answers, 10 the store
    cannot be written, 12 permission denied, 13 no such override.
    """
    from controller.client.channels import user_name
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with open_connection(to_operators_address(address)) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).ClearOverride(
            policy_pb2.ClearOverrideRequest(
                override_id=override_id, etag=etag, author=author or user_name(), reason=reason,
            ),
            timeout=_ANSWER_SECONDS_MAX,
        )  # fmt: skip

    def print_text() -> None:
        print_line(f"{override_id} has ended")
        _print_effects(answer.effects, is_dry_run=False, renewed=False)

    values = {"override_id": override_id, **plain_values(answer)}
    print_result("OverrideResult", values, output, [override_id], print_text)


override.command("list")(override_lists.list_)
override.command("watch")(override_lists.watch)
override.command("log")(override_lists.log)


def _print_effects(
    effects: "Iterable[policy_pb2.OverrideEffect]", *, is_dry_run: bool, renewed: bool
) -> None:
    """Prints the effects by engine.

    renewed: the override was in force before, so nothing changes.
    """
    effects = list(effects)
    if not effects:
        print_line("no engine of this sidecar is in its scope")
    for effect in effects:
        lines = _effect_lines(effect)
        shadows = ", ".join(effect.shadowed_by)
        if effect.changes or effect.regime_changes:
            head = f" {'would change' if is_dry_run else 'changes'} {_timing_text(effect)}:"
        elif effect.constrains:
            head = " runs as now, but the allowed choices change"
        elif effect.unable:
            head = f": no effect: {effect.unable}"
        elif shadows:
            head = f": no effect: shadowed by {shadows}"
        else:
            head = ": unchanged" if renewed else ": no change"
        if effect.constrains and effect.unable:
            lines.append(f"  the engine cannot obey the whole override: {effect.unable}")
        if effect.constrains and shadows:
            lines.append(f"  partly shadowed by {shadows}")
        for line in (f"engine {effect.engine_id}{head}", *lines):
            print_line(line)


def _effect_lines(effect: "policy_pb2.OverrideEffect") -> list[str]:
    lines = [
        f"  B {_batch_range_text(change.batch_sizes)}: "
        f"{change.drafter_before} gamma {change.gamma_before} -> "
        f"{change.drafter_after} gamma {change.gamma_after}"
        for change in effect.changes
    ]
    lines += [
        f"  B {_batch_range_text(stuck)}: the overrides leave no choice that this "
        "engine can run, so it does not speculate there"
        for stuck in effect.stuck
    ]
    lines += [
        f"  B {_batch_range_text(batch_sizes)}: no allowed choice meets the bound on the time per "
        "output "
        "token, so the fastest one runs there"
        for batch_sizes in effect.above_bound
    ]
    if effect.regime_changes:
        before = regime_text(effect.regime_before) if effect.HasField("regime_before") else ""
        after = regime_text(effect.regime_after) if effect.HasField("regime_after") else ""
        default = "as the sidecar decides"
        lines.append(f"  online updates: {before or default} -> {after or default}")
    return lines


def _batch_range_text(batch_sizes: "policy_pb2.BatchRange") -> str:
    smallest, largest = batch_sizes.min_batch_size, batch_sizes.max_batch_size
    return str(smallest) if smallest == largest else f"{smallest}-{largest}"


def _timing_text(effect: "policy_pb2.OverrideEffect") -> str:
    from speculation.v1 import policy_pb2

    kind = policy_pb2.OverrideEffect
    return {
        kind.TIMING_NEXT_STEP: "at its next decode step",
        kind.TIMING_NEXT_CONTACT: "when it connects again (it is not connected now)",
        kind.TIMING_AFTER_MEASUREMENT: "when the running measurement has ended",
    }.get(effect.timing, "with its next plan")


def _make_scope(engine: str | None, model: str | None, fleet: bool) -> "policy_pb2.Scope":
    from speculation.v1 import policy_pb2

    if [engine is not None, model is not None, fleet].count(True) != 1:
        raise typer.BadParameter("name the engines: one of --engine ID, --model NAME and --fleet")
    if fleet:
        return policy_pb2.Scope(fleet=True)
    if engine is not None:
        return policy_pb2.Scope(engine_id=engine)
    return policy_pb2.Scope(target_model=model or "")


def _set_regime(rule: "policy_pb2.OverrideRule", text: str | None) -> None:
    from speculation.v1 import plan_pb2

    if text is None:
        return
    mode, _, stride = text.partition(":")
    modes = {
        "off": plan_pb2.REGIME_MODE_OFF,
        "collect": plan_pb2.REGIME_MODE_COLLECT,
        "online": plan_pb2.REGIME_MODE_ONLINE,
    }
    if mode not in modes or (mode == "online") != stride.isdecimal():
        raise typer.BadParameter("--regime is off, collect, or online:STRIDE (online:10)")
    rule.regime.mode = modes[mode]
    rule.regime.stride = _check_uint32("--regime", stride or "0")


def _parse_batch_range(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 0
    try:
        low, high = parse_batch_range(text)
    except ValueError as error:
        raise typer.BadParameter(f"--batch {text}: {error}") from error
    return _check_uint32("--batch", str(low)), _check_uint32("--batch", str(high))


def _check_uint32(option: str, digits: str) -> int:
    """Returns a number that fits a uint32 field; the sidecar checks its meaning."""
    if int(digits) > UINT32_MAX:
        raise typer.BadParameter(f"{option}: {digits} is too large")
    return int(digits)


def _parse_ttl(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not match:
        raise typer.BadParameter("--ttl needs a number and a unit: 90s, 30m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2]]


def _random_suffix() -> str:
    return secrets.token_hex(2)
