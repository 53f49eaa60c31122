"""Implements `controller override`: sets, clears and lists overrides, and shows their audit."""

import datetime as dt
import getpass
import json
import os
import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.connection import (
    DEFAULT_ADDRESS,
    UINT32_MAX,
    Address,
    connected,
    for_operators,
    print_wide,
)
from controller.util.exit_codes import Exit
from controller.wire.override_text import (
    PRECEDENCE,
    author_text,
    batch_range,
    regime_text,
    rule_text,
    scope_text,
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

AsJson = Annotated[bool, typer.Option("--json", help="As JSON lines, for programs.")]


@override.command("set")
def set_(
    reason: Annotated[str, typer.Option(help="Why; stays in the audit.")],
    engine: Annotated[str | None, typer.Option(help="For this engine.")] = None,
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
    for_ever: Annotated[bool, typer.Option("--for-ever", help="Until it is cleared.")] = False,
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
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Sets an override and shows what it changes on this sidecar's engines.

    Exit codes: 0 set, 1 refused, 2 options, 4 no sidecar answers, 6 the sidecar does not know the
    engine, 10 the store takes nothing, 11 it would have no effect.  Only with 0 it is set.
    """
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
            max_batch_size=high, author=author or _caller(), reason=reason,
        ),
        etag=etag,
        dry_run=dry_run,
        require_effect=not allow_no_effect,
    )  # fmt: skip
    if ttl is not None and for_ever:
        raise typer.BadParameter("--ttl and --for-ever contradict each other")
    if ttl is not None:
        request.ttl_seconds = _seconds(ttl)
    elif for_ever:
        request.for_ever = True
    hints = dict.fromkeys((Exit.NO_EFFECT, Exit.NOT_INTRODUCED), _ALLOW)
    with connected(for_operators(address), hints) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).SetOverride(
            request, timeout=_ANSWER_SECONDS_MAX
        )
    lasts = _lasts(answer.held)
    if answer.repeated:
        print(f"{name} is in force by this very request already, and ends in {lasts}")
    elif answer.end_moved:
        print(f"{name} is in force already; its end {'would move' if dry_run else 'has moved'}:")
        print(f"{name} {'would last' if dry_run else 'lasts'} {lasts} from now on")
    else:
        print(f"{name} {'would last' if dry_run else 'lasts'} {lasts}")
    _print_effects(answer.effects, would=dry_run, renewed=answer.repeated or answer.end_moved)
    if not dry_run:
        print(f"etag {answer.held.etag}; to end it: controller override clear {name} --reason ...")


@override.command("clear")
def clear(
    override_id: Annotated[str, typer.Argument(help="As `controller override list` shows it.")],
    reason: Annotated[str, typer.Option(help="Why; stays in the audit.")],
    etag: Annotated[str, typer.Option(help="Only if it still has this etag.")] = "",
    author: Annotated[str | None, typer.Option(envvar="CONTROLLER_AUTHOR", help="Who.")] = None,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Ends an override now, and shows what that changes.

    Exit codes: 0 ended, 1 refused (no such override, another etag), 2 options, 4 no sidecar
    answers, 10 the store takes nothing.
    """
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with connected(for_operators(address)) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).ClearOverride(
            policy_pb2.ClearOverrideRequest(
                override_id=override_id, etag=etag, author=author or _caller(), reason=reason,
            ),
            timeout=_ANSWER_SECONDS_MAX,
        )  # fmt: skip
    print(f"{override_id} has ended")
    _print_effects(answer.effects, would=False, renewed=False)


@override.command("list")
def list_(as_json: AsJson = False, address: Address = DEFAULT_ADDRESS) -> None:
    """Shows the overrides in force, and which one wins."""
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with connected(address) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).ListOverrides(
            policy_pb2.ListOverridesRequest(), timeout=_ANSWER_SECONDS_MAX
        )
    if as_json:
        _print_json(answer.overrides)
    elif answer.overrides:
        _print_overrides(answer.overrides)
        print(PRECEDENCE)
    else:
        print("no override is in force")
    if answer.HasField("policy") and not answer.policy.ok:
        typer.echo(
            f"the policy file cannot be used, so what it said before stays in force: "
            f"{answer.policy.detail}", err=True,
        )  # fmt: skip
    if not answer.store.ok:
        typer.echo(f"the store is in trouble: {answer.store.detail}", err=True)


@override.command("watch")
def watch(as_json: AsJson = False, address: Address = DEFAULT_ADDRESS) -> None:
    """Shows what is in force, then every change, until it is interrupted."""
    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with connected(address) as channel:
        stub = policy_pb2_grpc.PolicyServiceStub(channel)
        if not as_json:
            print(PRECEDENCE, flush=True)
        for news in stub.WatchOverrides(policy_pb2.WatchOverridesRequest()):
            if as_json:
                _print_json([news])
                continue
            kind = policy_pb2.WatchOverridesResponse.Kind.Name(news.kind).removeprefix("KIND_")
            held = news.held
            print(
                f"{kind.lower():8} {held.override.override_id}  {scope_text(held.override)}: "
                f"{rule_text(held.override)}; {author_text(held)}: {held.override.reason}",
                flush=True,
            )


@override.command("log")
def log(
    override_id: Annotated[str, typer.Argument(help="Only of this override.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 50,
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Shows who changed what, when, why and from where; the newest first."""
    from rich.table import Table

    from speculation.v1 import policy_pb2, policy_pb2_grpc

    with connected(address) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).QueryAudit(
            policy_pb2.QueryAuditRequest(limit=limit, override_id=override_id),
            timeout=_ANSWER_SECONDS_MAX,
        )
    if as_json:
        _print_json(answer.records)
        return
    table = Table("when", "what", "override", "who", "why", "from", "before", "after")
    for record in answer.records:
        table.add_row(
            _moment(record.at), record.action, record.override_id, record.author or "-",
            record.reason, record.origin,
            _in_short(record.before) if record.HasField("before") else "-",
            _in_short(record.after) if record.HasField("after") else "-",
        )  # fmt: skip
    print_wide(table)


def _moment(seconds: float) -> str:
    """A Unix time, in UTC."""
    return f"{dt.datetime.fromtimestamp(seconds, dt.UTC):%Y-%m-%d %H:%M:%S}"


def _in_short(override: "policy_pb2.Override") -> str:
    return f"{scope_text(override)}: {rule_text(override)}"


def _print_overrides(overrides: "Iterable[policy_pb2.HeldOverride]") -> None:
    from rich.table import Table

    table = Table("override", "for", "what", "origin", "who", "why", "set at", "ends in", "etag")
    for held in overrides:
        it = held.override
        table.add_row(
            it.override_id, scope_text(it), rule_text(it), held.origin or "operator", it.author,
            it.reason, _moment(held.created_at), _lasts(held), held.etag or "-",
        )  # fmt: skip
    print_wide(table)


def _print_effects(
    effects: "Iterable[policy_pb2.OverrideEffect]", *, would: bool, renewed: bool
) -> None:
    """Prints the effects by engine.

    renewed: the override was in force before, so nothing changes.
    """
    effects = list(effects)
    if not effects:
        print("no engine of this sidecar is in its scope")
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
        print(f"engine {effect.engine_id}{head}")
        print(*lines, sep="\n", end="\n" if lines else "")


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


def _print_json(messages: Iterable[Any]) -> None:
    from google.protobuf import json_format

    for message in messages:
        found = json_format.MessageToDict(message, preserving_proto_field_name=True)
        print(json.dumps(found, ensure_ascii=False), flush=True)


def _lasts(held: "policy_pb2.HeldOverride") -> str:
    if held.origin:
        return "with its file"
    if not held.HasField("remaining_seconds"):
        return "permanent"
    seconds = round(held.remaining_seconds)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds} s"


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


def _caller() -> str:
    """The name of the user who calls; the number where nobody has named it, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _random() -> str:
    return secrets.token_hex(2)
