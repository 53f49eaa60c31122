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
    connected,
    for_operators,
)
from controller.cli.output import Output, OutputOption, plain_values, print_line, show_one
from controller.util.exit_codes import Exit
from controller.wire.override_text import (
    PRECEDENCE,
    batch_range,
    regime_text,
)

if TYPE_CHECKING:
    from speculation.v1 import policy_pb2

_ANSWER_SECONDS_MAX = 10.0
_ALLOW = "nothing is set; --allow-no-effect sets it all the same"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

override = typer.Typer(
    no_args_is_help=True,
    help=f"Pins, bounds and forbids what engines may run, for a while.\n\n{PRECEDENCE}",
)


@override.command("set")
def set_(
    reason: Annotated[str, typer.Option(help="Why; stays in the audit.")],
    engine: Annotated[
        str | None, typer.Option(help="For this engine.", autocompletion=engine_ids)
    ] = None,
    model: Annotated[str | None, typer.Option(help="For all engines of this target model.")] = None,
    fleet: Annotated[bool, typer.Option("--fleet", help="For every engine.")] = False,
    off: Annotated[bool, typer.Option("--off", help="No speculation.")] = False,
    gamma: Annotated[
        int | None, typer.Option(min=0, max=UINT32_MAX, help="Exactly this draft length.")
    ] = None,
    at_least: Annotated[
        int | None, typer.Option(min=0, max=UINT32_MAX, help="No shorter drafts.")
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(min=0, max=UINT32_MAX, help="No longer drafts.")
    ] = None,
    tpot_max_ms: Annotated[
        float | None,
        typer.Option(help="At most so many milliseconds per output token, on the mean."),
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Only this drafter.")] = None,
    regime: Annotated[
        str | None, typer.Option(help="Online updates: off, collect, or online:STRIDE.")
    ] = None,
    deny_drafter: Annotated[list[str] | None, typer.Option(help="Not this drafter.")] = None,
    deny_updates: Annotated[
        bool, typer.Option("--deny-updates", help="No online updates.")
    ] = False,
    deny_exploration: Annotated[
        bool, typer.Option("--deny-exploration", help="No probing.")
    ] = False,
    batch: Annotated[
        str | None, typer.Option(help="Only in batches of this size: 8, 8-32, 64- or -4.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="How long: 90s, 30m, 2h, 1d.  By default the sidecar's.")
    ] = None,
    permanent: Annotated[
        bool, typer.Option("--permanent", help="Keep the override until it is cleared.")
    ] = False,
    override_id: Annotated[
        str | None, typer.Option("--id", help="Its name; repeating a request needs the same.")
    ] = None,
    etag: Annotated[str, typer.Option(help="Replaces the override that has this etag.")] = "",
    author: Annotated[str | None, typer.Option(envvar="CONTROLLER_AUTHOR", help="Who.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Checks everything, shows the effects, sets nothing.")
    ] = False,
    allow_no_effect: Annotated[
        bool,
        typer.Option(
            "--allow-no-effect",
            help="Set it even if it does nothing to the engines of this sidecar.",
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Sets an override and shows what it changes on this sidecar's engines.

    Exit codes: 0 set, 1 refused, 2 options, 4 no sidecar answers, 6 the sidecar does not know the
    engine, 10 the store takes nothing, 11 it would have no effect, 12 the caller may not.  Only
    with 0 it is set.
    """
    from controller.client.channels import user_name
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    rule = policy_pb2.OverrideRule(
        off=off, gamma=gamma, gamma_min=at_least, gamma_max=at_most, drafter=drafter,
        deny_drafters=deny_drafter or [], deny_updates=deny_updates,
        deny_exploration=deny_exploration,
        tpot_max_seconds=None if tpot_max_ms is None else tpot_max_ms / 1e3,
    )  # fmt: skip
    _add_regime(rule, regime)
    low, high = _batch_range(batch)
    name = override_id or f"{dt.datetime.now(dt.UTC):%Y%m%d-%H%M%S}-{_random()}"
    request = policy_pb2.SetOverrideRequest(
        override=policy_pb2.Override(
            override_id=name, scope=_scope(engine, model, fleet), rule=rule, min_batch_size=low,
            max_batch_size=high, author=author or user_name(), reason=reason,
        ),
        etag=etag,
        dry_run=dry_run,
        require_effect=not allow_no_effect,
    )  # fmt: skip
    if ttl is not None and permanent:
        raise typer.BadParameter("--ttl and --permanent contradict each other")
    if ttl is not None:
        request.ttl_seconds = _seconds(ttl)
    elif permanent:
        request.for_ever = True
    hints = dict.fromkeys((Exit.NO_EFFECT, Exit.NOT_INTRODUCED), _ALLOW)
    with connected(for_operators(address), hints) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).SetOverride(
            request, timeout=_ANSWER_SECONDS_MAX
        )
    values = {"override_id": name, "dry_run": dry_run, **plain_values(answer)}
    show_one(
        "OverrideResult",
        values,
        output,
        [name],
        lambda: _print_answer(name, answer, dry_run=dry_run),
    )


def _print_answer(name: str, answer: "policy_pb2.SetOverrideResponse", *, dry_run: bool) -> None:
    lasts = override_lists.lasts_text(answer.held)
    if answer.repeated:
        print_line(f"{name} is in force by this very request already, and ends in {lasts}")
    elif answer.end_moved:
        print_line(
            f"{name} is in force already; its end {'would move' if dry_run else 'has moved'}:"
        )
        print_line(f"{name} {'would last' if dry_run else 'lasts'} {lasts} from now on")
    else:
        print_line(f"{name} {'would last' if dry_run else 'lasts'} {lasts}")
    _print_effects(answer.effects, would=dry_run, renewed=answer.repeated or answer.end_moved)
    if not dry_run:
        print_line(
            f"etag {answer.held.etag}; to end it: controller override clear {name} --reason ..."
        )


@override.command("clear")
def clear(
    override_id: Annotated[
        str,
        typer.Argument(help="As `controller override list` shows it.", autocompletion=override_ids),
    ],
    reason: Annotated[str, typer.Option(help="Why; stays in the audit.")],
    etag: Annotated[str, typer.Option(help="Only if it still has this etag.")] = "",
    author: Annotated[str | None, typer.Option(envvar="CONTROLLER_AUTHOR", help="Who.")] = None,
    output: OutputOption = Output.TABLE,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Ends an override now, and shows what that changes.

    Exit codes: 0 ended, 1 refused (another etag), 2 options, 4 no sidecar answers, 10 the store
    takes nothing, 12 the caller may not, 13 no such override.
    """
    from controller.client.channels import user_name
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with connected(for_operators(address)) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).ClearOverride(
            policy_pb2.ClearOverrideRequest(
                override_id=override_id, etag=etag, author=author or user_name(), reason=reason,
            ),
            timeout=_ANSWER_SECONDS_MAX,
        )  # fmt: skip

    def tell() -> None:
        print_line(f"{override_id} has ended")
        _print_effects(answer.effects, would=False, renewed=False)

    values = {"override_id": override_id, **plain_values(answer)}
    show_one("OverrideResult", values, output, [override_id], tell)


override.command("list")(override_lists.list_)
override.command("watch")(override_lists.watch)
override.command("log")(override_lists.log)


def _print_effects(
    effects: "Iterable[policy_pb2.OverrideEffect]", *, would: bool, renewed: bool
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
            head = f" {'would change' if would else 'changes'} {_timing_text(effect)}:"
        elif effect.constrains:
            head = " runs as now, but what it may choose from changes"
        elif effect.unable:
            head = f": no effect: {effect.unable}"
        elif shadows:
            head = f": no effect: shadowed by {shadows}"
        else:
            head = ": as before" if renewed else ": no change"
        if effect.constrains and effect.unable:
            lines.append(f"  it cannot do all of this: {effect.unable}")
        if effect.constrains and shadows:
            lines.append(f"  in part shadowed by {shadows}")
        for line in (f"engine {effect.engine_id}{head}", *lines):
            print_line(line)


def _effect_lines(effect: "policy_pb2.OverrideEffect") -> list[str]:
    lines = [
        f"  B {_sizes(change.batch_sizes)}: "
        f"{change.drafter_before} gamma {change.gamma_before} -> "
        f"{change.drafter_after} gamma {change.gamma_after}"
        for change in effect.changes
    ]
    lines += [
        f"  B {_sizes(stuck)}: the overrides leave nothing that this "
        "engine can run, so it does not speculate there"
        for stuck in effect.stuck
    ]
    lines += [
        f"  B {_sizes(above)}: no choice that is left keeps the bound on the time per output "
        "token, so the one with the smallest time runs there"
        for above in effect.above_bound
    ]
    if effect.regime_changes:
        before = regime_text(effect.regime_before) if effect.HasField("regime_before") else ""
        after = regime_text(effect.regime_after) if effect.HasField("regime_after") else ""
        chosen = "as the sidecar decides"
        lines.append(f"  online updates: {before or chosen} -> {after or chosen}")
    return lines


def _sizes(batch_sizes: "policy_pb2.BatchRange") -> str:
    first, last = batch_sizes.min_batch_size, batch_sizes.max_batch_size
    return str(first) if first == last else f"{first}-{last}"


def _timing_text(effect: "policy_pb2.OverrideEffect") -> str:
    from speculation.v1 import policy_pb2

    kind = policy_pb2.OverrideEffect
    return {
        kind.TIMING_NEXT_STEP: "at its next decode step",
        kind.TIMING_NEXT_CONTACT: "when it next asks (it is not connected now)",
        kind.TIMING_AFTER_MEASUREMENT: "when the measurement under way has ended",
    }.get(effect.timing, "with its next plan")


def _scope(engine: str | None, model: str | None, fleet: bool) -> "policy_pb2.Scope":
    from speculation.v1 import policy_pb2

    if [engine is not None, model is not None, fleet].count(True) != 1:
        raise typer.BadParameter("one of --engine ID, --model NAME and --fleet says whom it is for")
    if fleet:
        return policy_pb2.Scope(fleet=True)
    if engine is not None:
        return policy_pb2.Scope(engine_id=engine)
    return policy_pb2.Scope(target_model=model or "")


def _add_regime(rule: "policy_pb2.OverrideRule", text: str | None) -> None:
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
    rule.regime.stride = _count("--regime", stride or "0")


def _batch_range(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 0
    try:
        low, high = batch_range(text)
    except ValueError as error:
        raise typer.BadParameter(f"--batch {text}: {error}") from error
    return _count("--batch", str(low)), _count("--batch", str(high))


def _count(option: str, digits: str) -> int:
    """A number that a message can carry; the sidecar says whether it makes sense."""
    if int(digits) > UINT32_MAX:
        raise typer.BadParameter(f"{option}: {digits} is too large")
    return int(digits)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not found:
        raise typer.BadParameter("--ttl is a number and a unit: 90s, 30m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


def _random() -> str:
    return secrets.token_hex(2)
