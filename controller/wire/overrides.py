"""Converts overrides between protobuf, the core and the JSON of the store and the audit."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from google.protobuf import json_format

from controller.core.errors import error_field_prefix
from controller.core.planning.overrides import (
    InvalidOverrideError,
    Limits,
    Override,
    Rule,
    Scope,
    ScopeKind,
)
from controller.wire.field_mapping import message_of, value_of
from controller.wire.override_effects import OverrideEffect, PreviewRow
from controller.wire.plans import regime_from_proto, regime_to_proto
from speculation.v1 import policy_pb2, service_pb2

Timing: TypeAlias = "policy_pb2.OverrideEffect.Timing.ValueType"


def override_from_proto(message: policy_pb2.Override) -> Override:
    """Converts an override.  Raises InvalidOverrideError."""
    scope = _scope_from_proto(message.scope)
    with error_field_prefix("rule"):
        rule = _rule_from_proto(message.rule)
    return value_of(Override, message, scope=scope, rule=rule)


def _scope_from_proto(message: policy_pb2.Scope) -> Scope:
    which = message.WhichOneof("kind")
    if which == "engine_id":
        return Scope(ScopeKind.ENGINE, message.engine_id)
    if which == "target_model":
        return Scope(ScopeKind.MODEL, message.target_model)
    if which == "fleet" and message.fleet:
        return Scope(ScopeKind.FLEET)
    raise InvalidOverrideError(
        "scope: an engine, a model or the fleet has to be named", field_path="scope"
    )


def _rule_from_proto(message: policy_pb2.OverrideRule) -> Rule:
    regime = None
    if message.HasField("regime"):
        regime = regime_from_proto(message.regime)
        if regime is None:
            raise InvalidOverrideError(
                f"regime {message.regime.mode} is unspecified or unknown",
                field_path="regime.mode",
            )
    return value_of(Rule, message, regime=regime)


def override_to_proto(override: Override) -> policy_pb2.Override:
    """Converts an override."""
    rule, scope = override.rule, policy_pb2.Scope()
    if override.scope.kind is ScopeKind.ENGINE:
        scope.engine_id = override.scope.name
    elif override.scope.kind is ScopeKind.MODEL:
        scope.target_model = override.scope.name
    else:
        scope.fleet = True
    regime = None if rule.regime is None else regime_to_proto(rule.regime)
    rule_message = message_of(policy_pb2.OverrideRule, rule, regime=regime)
    return message_of(policy_pb2.Override, override, scope=scope, rule=rule_message)


def override_to_json(override: Override) -> str:
    """Writes an override as JSON; equal overrides give equal texts.

    The text has no revision, which the store adds.
    """
    document = json_format.MessageToDict(override_to_proto(replace(override, revision=0)))
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def override_from_json(body: str) -> Override:
    """Reads an override from JSON.

    The store holds operators' overrides only, so the result is never file-based policy.  Raises
    InvalidOverrideError, for example for a text of a newer sidecar.
    """
    try:
        message = json_format.Parse(body, policy_pb2.Override())
        message.from_file = False
        return override_from_proto(message)
    except json_format.ParseError as error:
        raise InvalidOverrideError(f"the stored override cannot be read: {error}") from error


def requested_lifetime_seconds(
    request: policy_pb2.SetOverrideRequest, default_seconds: float, max_seconds: float
) -> float | None:
    """Returns the requested lifetime in seconds, None if it is permanent.

    Raises InvalidOverrideError.
    """
    which = request.WhichOneof("lifetime")
    if which is None:
        return default_seconds
    if which == "for_ever":
        if request.for_ever:
            return None
        raise InvalidOverrideError(
            "for_ever must be true; otherwise set ttl_seconds", field_path="for_ever"
        )
    seconds = request.ttl_seconds
    if not (math.isfinite(seconds) and 0 < seconds <= max_seconds):
        raise InvalidOverrideError(
            f"ttl_seconds {seconds:g} must be above 0 and at most {max_seconds:g}; for "
            "a permanent override, set for_ever",
            field_path="ttl_seconds",
        )
    return seconds


def effect_to_proto(
    engine_id: str, rows: Iterable[PreviewRow], override_effect: OverrideEffect, timing: Timing
) -> policy_pb2.OverrideEffect:
    """Converts an effect; adjacent rows with the same change become one."""
    effect = policy_pb2.OverrideEffect(
        engine_id=engine_id,
        constrains=override_effect.constrains,
        shadowed_by=override_effect.shadowed_by,
        unable=override_effect.unable,
        timing=timing,
    )
    if override_effect.regime_before != override_effect.regime_after:
        if override_effect.regime_before is not None:
            effect.regime_before.CopyFrom(regime_to_proto(override_effect.regime_before))
        if override_effect.regime_after is not None:
            effect.regime_after.CopyFrom(regime_to_proto(override_effect.regime_after))
        effect.regime_changes = True
    low = 1
    for row in rows:
        batch_range = policy_pb2.BatchRange(min_batch_size=low, max_batch_size=row.max_batch_size)
        if row.before != row.after:
            _add_change(effect, batch_range, row)
        for applies, ranges in ((row.stuck, effect.stuck), (row.above_bound, effect.above_bound)):
            if applies and ranges and ranges[-1].max_batch_size == low - 1:
                ranges[-1].max_batch_size = row.max_batch_size
            elif applies:
                ranges.append(batch_range)
        low = row.max_batch_size + 1
    return effect


def _add_change(
    effect: policy_pb2.OverrideEffect, batch_range: policy_pb2.BatchRange, row: PreviewRow
) -> None:
    change = policy_pb2.RowChange(
        batch_sizes=batch_range,
        drafter_before=row.before.drafter,
        gamma_before=row.before.gamma,
        drafter_after=row.after.drafter,
        gamma_after=row.after.gamma,
    )
    if effect.changes:
        last_change = effect.changes[-1]
        same_change = policy_pb2.RowChange()
        same_change.CopyFrom(change)
        same_change.batch_sizes.CopyFrom(last_change.batch_sizes)
        if (
            same_change == last_change
            and last_change.batch_sizes.max_batch_size == batch_range.min_batch_size - 1
        ):
            last_change.batch_sizes.max_batch_size = batch_range.max_batch_size
            return
    effect.changes.append(change)


def limits_to_proto(limits: Limits) -> service_pb2.OverrideLimits:
    """Converts what overrides allow at one batch size."""
    return message_of(
        service_pb2.OverrideLimits,
        limits,
        denied_drafters=sorted(limits.denied_drafters),
        exploration_denied=not limits.can_explore,
    )
