"""Describes overrides and plans as text for people."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from speculation.v1 import plan_pb2, policy_pb2

# Which override wins (`controller.core.planning.overrides`).  Every listing shows this sentence.
PRECEDENCE = (
    "Off and denials beat every pin; otherwise the narrower scope wins, then the newer override; "
    "file-based policy is weakest."
)


def rule_text(override: "policy_pb2.Override") -> str:
    """Describes what an override demands."""
    rule = override.rule
    demands = {
        "gamma": f"gamma = {rule.gamma}",
        "gamma_min": f"gamma >= {rule.gamma_min}",
        "gamma_max": f"gamma <= {rule.gamma_max}",
        "tpot_max_seconds": f"at most {1e3 * rule.tpot_max_seconds:g} ms a token",
        "drafter": f"drafter {rule.drafter}",
        "regime": f"regime {regime_text(rule.regime)}",
    }
    parts = ["no speculation"] * rule.off
    set_fields = {field.name for field, _ in rule.ListFields()}
    parts += [text for name, text in demands.items() if name in set_fields]
    parts += [f"not drafter {name}" for name in rule.deny_drafters]
    parts += ["no online updates"] * rule.deny_updates + ["no probing"] * rule.deny_exploration
    return ", ".join(parts)


def scope_text(override: "policy_pb2.Override") -> str:
    """Describes the engines and batch sizes that an override applies to."""
    which = override.scope.WhichOneof("kind")
    scope_name = {
        "engine_id": f"engine {override.scope.engine_id}",
        "target_model": f"model {override.scope.target_model}",
    }.get(which or "", "fleet")
    low, high = override.min_batch_size, override.max_batch_size
    if low <= 1 and not high:
        return scope_name
    return f"{scope_name} at B {low or 1}-{high or ''}"


def held_override_text(held_override: "policy_pb2.HeldOverride") -> str:
    """Describes an override in force: its scope, its rule, who set it, and why."""
    override = held_override.override
    demand = f"{scope_text(override)}: {rule_text(override)}"
    return f"{demand}; {author_text(held_override)}: {override.reason}"


def author_text(held_override: "policy_pb2.HeldOverride") -> str:
    """Names the author of an override, or the file that a policy entry comes from."""
    return f"{held_override.override.author} {held_override.origin}".rstrip()


def parse_batch_range(text: str) -> tuple[int, int]:
    """Parses a range of batch sizes: 8, 8-32, 64- or -4.

    Returns the smallest and the largest size; 0 = no upper limit.  Raises ValueError.
    """
    match = re.fullmatch(r"(\d{0,20})(-?)(\d{0,20})", text, re.ASCII)
    if not match or not (match[1] or match[3]):
        raise ValueError("a batch size or a range is needed: 8, 8-32, 64- or -4")
    low = int(match[1] or "1")
    return low, (int(match[3] or "0") if match[2] else low)


def regime_text(regime: "plan_pb2.Regime") -> str:
    """Writes a regime as on the command line: off, collect, online:STRIDE."""
    name = enum_name(regime, "mode", "REGIME_MODE_")
    return f"{name}:{regime.stride}" if regime.stride else name


def reason_text(plan: "plan_pb2.Plan | plan_pb2.PlanRow") -> str:
    """Names the reason of a plan, or of one of its rows, as logs do."""
    return enum_name(plan, "reason", "REASON_")


def enum_name(message: "Message", field: str, prefix: str) -> str:
    """Names an enumeration's value without its prefix; an unknown value is its number."""
    number = getattr(message, field)
    kind = message.DESCRIPTOR.fields_by_name[field].enum_type
    enum_value = None if kind is None else kind.values_by_number.get(number)
    if enum_value is None:
        return str(number)
    return str(enum_value.name).removeprefix(prefix).lower().replace("_", "-")
