"""Serves the PolicyService, which sets, clears, lists and watches overrides, and the audit."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

from controller.core.errors import SpeculationError, error_field_prefix
from controller.core.planning.overrides import (
    MAX_AUTHOR_CHARACTERS,
    MAX_REASON_CHARACTERS,
    InvalidOverrideError,
    Override,
    ScopeKind,
)
from controller.service.net.callers import current_caller
from controller.service.net.errors import (
    Context,
    ForbiddenError,
    NoEffectError,
    NoOverrideError,
    PolicyNotClearedError,
    UnknownEngineError,
)
from controller.service.net.limits import WAITING_READS_MAX, FairQueue
from controller.service.rpc import store_messages
from controller.service.rpc.request_ids import RequestIds, require_uuid
from controller.service.rpc.store_messages import health_to_proto
from controller.service.sessions.session import EngineSession
from controller.service.state.active_overrides import ActiveOverride
from controller.service.state.override_registry import OverrideOutcome, OverrideRegistry
from controller.service.views.paging import page_of
from controller.settings.policy_file import POLICY_PREFIX, Policy
from controller.store.interface import Actor, StoreUnavailableError
from controller.wire import overrides as messages
from controller.wire.field_mapping import message_of
from controller.wire.override_effects import effect_on, preview_plan
from speculation.v1 import policy_pb2, policy_pb2_grpc

# Engines and names that an error lists.
_NAMED_MAX = 4
_KINDS = {
    "present": policy_pb2.WatchOverridesResponse.KIND_PRESENT,
    "set": policy_pb2.WatchOverridesResponse.KIND_SET,
    "ended": policy_pb2.WatchOverridesResponse.KIND_ENDED,
}


@dataclass(eq=False, repr=False)
class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """Serves SetOverride, ClearOverride, GetOverride, ListOverrides, WatchOverrides, QueryAudit.

    default_lifetime_seconds, max_lifetime_seconds: lifetimes of overrides.
    """

    override_registry: OverrideRegistry
    request_ids: RequestIds
    default_lifetime_seconds: float
    max_lifetime_seconds: float

    def __post_init__(self) -> None:
        self._read_queue = FairQueue(WAITING_READS_MAX)
        # One page at a time is read and held in memory, for any number of calls.
        self._audit_semaphore = asyncio.Semaphore(1)

    async def SetOverride(
        self, request: policy_pb2.SetOverrideRequest, context: Context
    ) -> policy_pb2.SetOverrideResponse:
        """Sets an override.  When it returns, the override is durable and in force here.

        A dry run checks everything and sets nothing.
        """
        if request.dry_run:
            if request.request_id:
                require_uuid(request.request_id)
            return await self._set_override(request)
        return await self.request_ids.run_once(request, lambda: self._set_override(request))

    async def _set_override(
        self, request: policy_pb2.SetOverrideRequest
    ) -> policy_pb2.SetOverrideResponse:
        request.override.from_file = False
        with error_field_prefix("override"):
            override = replace(messages.override_from_proto(request.override), revision=0)
        _require_operator_id(override.override_id)
        _require_scope(override)
        seconds = messages.requested_lifetime_seconds(
            request, self.default_lifetime_seconds, self.max_lifetime_seconds
        )
        outcome = await self.override_registry.check_set(override, seconds, request.etag)
        before = self.override_registry.active()
        after = (
            before
            if outcome is OverrideOutcome.REPEATED
            else self.override_registry.active_with(override)
        )
        new_override = next(o for o in after if o.override_id == override.override_id)
        effects = await self._override_effects(new_override, before, after)
        if request.require_effect and outcome is OverrideOutcome.SET:
            self._require_effect(new_override, effects)
        if request.dry_run:
            self._require_store()
            shown = policy_pb2.HeldOverride(override=request.override, remaining_seconds=seconds)
        else:
            actor = Actor(override.author, override.reason, current_caller().origin)
            active, outcome = await self.override_registry.set_override(
                override, seconds, request.etag, actor
            )
            shown = held_override_to_proto(active)
        return policy_pb2.SetOverrideResponse(
            held=shown,
            effects=effects,
            repeated=outcome is OverrideOutcome.REPEATED,
            end_moved=outcome is OverrideOutcome.END_MOVED,
        )

    async def ClearOverride(
        self, request: policy_pb2.ClearOverrideRequest, context: Context
    ) -> policy_pb2.ClearOverrideResponse:
        """Ends an override: here when it returns, on other sidecars soon after."""
        return await self.request_ids.run_once(request, lambda: self._clear_override(request))

    async def _clear_override(
        self, request: policy_pb2.ClearOverrideRequest
    ) -> policy_pb2.ClearOverrideResponse:
        _require_printable("author", request.author, MAX_AUTHOR_CHARACTERS)
        _require_printable("reason", request.reason, MAX_REASON_CHARACTERS)
        try:
            effects = await self._end_override(request)
        except PolicyNotClearedError:
            raise
        except NoOverrideError:
            if not request.allow_missing:
                raise
            return policy_pb2.ClearOverrideResponse(missing=True)
        return policy_pb2.ClearOverrideResponse(effects=effects)

    async def _end_override(
        self, request: policy_pb2.ClearOverrideRequest
    ) -> list[policy_pb2.OverrideEffect]:
        """Ends an override, and returns the effects.  Raises NoOverrideError."""
        actor = Actor(request.author, request.reason, current_caller().origin)
        if self.override_registry.is_unusable(request.override_id):
            # Its scope is unknown, and it has no effect on any engine.
            _require_unrestricted()
            await self.override_registry.clear_override(request.override_id, request.etag, actor)
            return []
        active = self._find_active(request.override_id)
        if active.override.from_file:
            raise PolicyNotClearedError(
                f"{request.override_id} is an entry of the policy file: change {active.origin}, or "
                "set an override, which has precedence",
                resource=request.override_id,
            )
        _require_scope(active.override)
        overrides_before = self.override_registry.active()
        overrides_after = self.override_registry.active_without(request.override_id)
        effects = await self._override_effects(active.override, overrides_before, overrides_after)
        await self.override_registry.clear_override(request.override_id, request.etag, actor)
        return effects

    def _find_active(self, override_id: str) -> ActiveOverride:
        """Returns the override in force with an id.  Raises NoOverrideError."""
        for active in self.override_registry.list_active():
            if active.override.override_id == override_id:
                return active
        raise NoOverrideError(
            f"no override {override_id[:128]!r} is in force", resource=override_id
        )

    async def GetOverride(
        self, request: policy_pb2.GetOverrideRequest, context: Context
    ) -> policy_pb2.GetOverrideResponse:
        """Returns the override in force here with an id, file-based policy included."""
        active = self._find_active(request.override_id)
        return policy_pb2.GetOverrideResponse(held=held_override_to_proto(active))

    async def ListOverrides(
        self, request: policy_pb2.ListOverridesRequest, context: Context
    ) -> policy_pb2.ListOverridesResponse:
        """Lists a page of the overrides in force here, and the state of the store."""
        active_by_id = {
            active.override.override_id: active for active in self.override_registry.list_active()
        }
        rows, token = await page_of(
            self._read_queue,
            active_by_id,
            lambda name: held_override_to_proto(active_by_id[name]),
            None,
            request.page_size,
            request.page_token,
        )
        return policy_pb2.ListOverridesResponse(
            overrides=rows,
            next_page_token=token,
            store=health_to_proto(self.override_registry.health),
            policy=_policy_to_proto(self.override_registry.policy),
        )

    async def WatchOverrides(
        self, request: policy_pb2.WatchOverridesRequest, context: Context
    ) -> AsyncIterator[policy_pb2.WatchOverridesResponse]:
        """Streams changes until the client or the sidecar ends."""
        async with self.override_registry.watch() as changes:
            async for change in changes:
                yield policy_pb2.WatchOverridesResponse(
                    kind=_KINDS[change.kind], held=held_override_to_proto(change.active)
                )

    async def QueryAudit(
        self, request: policy_pb2.QueryAuditRequest, context: Context
    ) -> policy_pb2.QueryAuditResponse:
        """Returns records of the audit, the newest first."""
        limit, before = store_messages.page_limit(request), store_messages.page_position(request)
        async with self._audit_semaphore:
            # One more, to know whether another page follows.
            records = await self.override_registry.audit(limit + 1, request.override_id, before)
            return await store_messages.audit_page(records, limit)

    async def _override_effects(
        self,
        override: Override,
        overrides_before: Sequence[Override],
        overrides_after: Sequence[Override],
    ) -> list[policy_pb2.OverrideEffect]:
        """Returns its effects on this sidecar's engines in its scope, ordered by engine id."""
        effects = []
        for session in self.override_registry.sessions_in_scope(override.scope):
            tpot_max_seconds = session.core.settings.tpot_ceiling_seconds
            effect = effect_on(
                session.spec, override, overrides_before, overrides_after, tpot_max_seconds
            )
            rows = (
                preview_plan(session.core, overrides_after) if effect.arms or effect.bound else ()
            )
            effects.append(
                messages.effect_to_proto(session.engine_id, rows, effect, _timing(session))
            )
            # Every engine takes about a millisecond: yield to other calls in between.
            await asyncio.sleep(0)
        return effects

    def _require_effect(
        self, override: Override, effects: Sequence[policy_pb2.OverrideEffect]
    ) -> None:
        """Raises UnknownEngineError or NoEffectError."""
        if not effects:
            raise self._empty_scope_error(override)
        if all(effect.unable for effect in effects):
            raise NoEffectError(
                "no engine in its scope can do this: "
                + _engine_texts((effect.engine_id, effect.unable) for effect in effects),
                resource=override.override_id,
            )
        if not any(effect.constrains for effect in effects):
            raise NoEffectError(
                "it would change nothing: "
                + _engine_texts((effect.engine_id, no_effect_reason(effect)) for effect in effects),
                resource=override.override_id,
            )

    def _empty_scope_error(self, override: Override) -> SpeculationError:
        """Returns the error for a scope without engines here; it names the engines that exist."""
        sessions, scope = self.override_registry.known_engines(), override.scope
        if not sessions:
            return _scope_error(override, "no engine has introduced itself to this sidecar")
        if scope.kind is ScopeKind.ENGINE:
            known_names = sorted({session.engine_id for session in sessions})
        else:
            models = {session.spec.fingerprint.target_model for session in sessions}
            known_names = sorted(models - {""}) or ["no model by name"]
        more_text = (
            f" and {len(known_names) - _NAMED_MAX} more" if len(known_names) > _NAMED_MAX else ""
        )
        return _scope_error(
            override,
            f"this sidecar knows no {scope}; it knows "
            f"{', '.join(known_names[:_NAMED_MAX])}{more_text}",
        )

    def _require_store(self) -> None:
        """Raises StoreUnavailableError if the store would refuse a change."""
        health = self.override_registry.health
        if not health.ok:
            raise StoreUnavailableError(f"{health.detail}; nothing can be changed now")


def no_effect_reason(effect: policy_pb2.OverrideEffect) -> str:
    """Returns the reason why an override changes nothing on an engine."""
    if effect.unable:
        return str(effect.unable)
    if effect.shadowed_by:
        return f"shadowed by {', '.join(effect.shadowed_by)}"
    return "its choices stay the same"


def _engine_texts(texts: Iterable[tuple[str, str]]) -> str:
    """Joins the texts about engines, for the first few of them."""
    pairs = list(texts)
    more_text = f"; and {len(pairs) - _NAMED_MAX} more engines" if len(pairs) > _NAMED_MAX else ""
    return "; ".join(f"engine {name}: {text}" for name, text in pairs[:_NAMED_MAX]) + more_text


def _scope_error(override: Override, message: str) -> SpeculationError:
    if override.scope.kind is ScopeKind.ENGINE:
        return UnknownEngineError(message, resource=override.scope.name)
    return NoEffectError(message, resource=override.override_id)


def _timing(session: EngineSession) -> messages.Timing:
    """Returns when the engine of a session follows a new plan."""
    if session.measurement is not None:
        return policy_pb2.OverrideEffect.TIMING_AFTER_MEASUREMENT
    if session.open_streams:
        return policy_pb2.OverrideEffect.TIMING_NEXT_STEP
    return policy_pb2.OverrideEffect.TIMING_NEXT_CONTACT


def held_override_to_proto(active: ActiveOverride) -> policy_pb2.HeldOverride:
    """Converts an override in force, with its remaining lifetime."""
    return message_of(
        policy_pb2.HeldOverride,
        active,
        override=messages.override_to_proto(active.override),
        remaining_seconds=active.remaining_seconds,
    )


def _policy_to_proto(policy: Policy) -> policy_pb2.PolicyStatus | None:
    """Converts the state of the policy file; None without one."""
    if policy.path is None:
        return None
    return policy_pb2.PolicyStatus(
        path=str(policy.path), ok=not policy.error, detail=policy.error, read_at=policy.read_at
    )


def _require_operator_id(override_id: str) -> None:
    """Raises InvalidOverrideError for an id that is reserved for file-based policy."""
    if override_id.startswith(POLICY_PREFIX):
        raise InvalidOverrideError(
            f"override id {override_id!r}: ids that begin with {POLICY_PREFIX!r} are reserved for "
            "file-based policy; choose another one",
            field_path="override.override_id",
        )


def _require_scope(override: Override) -> None:
    """Raises ForbiddenError for an override on engines that the caller may not act on."""
    if override.scope.kind is ScopeKind.ENGINE:
        current_caller().require_engines([override.scope.name])
    else:
        _require_unrestricted()


def _require_unrestricted() -> None:
    """Raises ForbiddenError for a caller that may act on some engines only."""
    caller = current_caller()
    if caller.is_restricted:
        raise ForbiddenError(
            f"{caller.name} may act only on the engines {', '.join(caller.engines)}: set one of "
            "them as the scope"
        )


def _require_printable(field_name: str, text: str, characters_max: int) -> None:
    if not (1 <= len(text) <= characters_max and text.isprintable()):
        raise InvalidOverrideError(
            f"{field_name} must have 1 to {characters_max} printable characters",
            field_path=field_name,
        )
