"""Serves the PolicyService, which sets, clears, lists and watches overrides, and the audit."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

from controller.core.errors import SpeculationError, within
from controller.core.planning.overrides import (
    MAX_AUTHOR_CHARACTERS,
    MAX_REASON_CHARACTERS,
    InvalidOverrideError,
    Override,
    ScopeKind,
)
from controller.service.net.callers import calling
from controller.service.net.errors import (
    Context,
    ForbiddenError,
    NoEffectError,
    NoOverrideError,
    PolicyNotClearedError,
    UnknownEngineError,
)
from controller.service.net.limits import READS_WAITING, Turns
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
from controller.wire.override_effects import effect_on, preview
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

    default_seconds, max_seconds: lifetimes of overrides.
    """

    override_registry: OverrideRegistry
    request_ids: RequestIds
    default_seconds: float
    max_seconds: float

    def __post_init__(self) -> None:
        self._turns = Turns(READS_WAITING)
        # One page at a time is read and held in memory, for any number of calls.
        self._audit_turn = asyncio.Semaphore(1)

    async def SetOverride(
        self, request: policy_pb2.SetOverrideRequest, context: Context
    ) -> policy_pb2.SetOverrideResponse:
        """Sets an override.  When it returns, the override is durable and in force here.

        A dry run checks everything and sets nothing.
        """
        if request.dry_run:
            if request.request_id:
                require_uuid(request.request_id)
            return await self._set(request)
        return await self.request_ids.once(request, lambda: self._set(request))

    async def _set(self, request: policy_pb2.SetOverrideRequest) -> policy_pb2.SetOverrideResponse:
        request.override.from_file = False
        with within("override"):
            override = replace(messages.override_from_proto(request.override), revision=0)
        _require_own_id(override.override_id)
        _require_scope(override)
        seconds = messages.lifetime_of(request, self.default_seconds, self.max_seconds)
        outcome = await self.override_registry.try_set(override, seconds, request.etag)
        before = self.override_registry.active()
        after = (
            before
            if outcome is OverrideOutcome.REPEATED
            else self.override_registry.with_(override)
        )
        of = next(o for o in after if o.override_id == override.override_id)
        effects = await self._effects(of, before, after)
        if request.require_effect and outcome is OverrideOutcome.SET:
            self._require_effect(of, effects)
        if request.dry_run:
            self._require_store()
            shown = policy_pb2.HeldOverride(override=request.override, remaining_seconds=seconds)
        else:
            who = Actor(override.author, override.reason, calling().origin)
            held, outcome = await self.override_registry.set(override, seconds, request.etag, who)
            shown = held_to_proto(held)
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
        return await self.request_ids.once(request, lambda: self._clear(request))

    async def _clear(
        self, request: policy_pb2.ClearOverrideRequest
    ) -> policy_pb2.ClearOverrideResponse:
        _require("author", request.author, MAX_AUTHOR_CHARACTERS)
        _require("reason", request.reason, MAX_REASON_CHARACTERS)
        try:
            effects = await self._ended(request)
        except PolicyNotClearedError:
            raise
        except NoOverrideError:
            if not request.allow_missing:
                raise
            return policy_pb2.ClearOverrideResponse(missing=True)
        return policy_pb2.ClearOverrideResponse(effects=effects)

    async def _ended(
        self, request: policy_pb2.ClearOverrideRequest
    ) -> list[policy_pb2.OverrideEffect]:
        """Ends an override, and returns the effects.  Raises NoOverrideError."""
        who = Actor(request.author, request.reason, calling().origin)
        if self.override_registry.is_unusable(request.override_id):
            # Its scope is unknown, and it has no effect on any engine.
            _require_unrestricted()
            await self.override_registry.clear(request.override_id, request.etag, who)
            return []
        known = self._held(request.override_id)
        if known.override.from_file:
            raise PolicyNotClearedError(
                f"{request.override_id} is an entry of the policy file: change {known.origin}, or "
                "set an override, which has precedence",
                resource=request.override_id,
            )
        _require_scope(known.override)
        before = self.override_registry.active()
        after = self.override_registry.without(request.override_id)
        effects = await self._effects(known.override, before, after)
        await self.override_registry.clear(request.override_id, request.etag, who)
        return effects

    def _held(self, override_id: str) -> ActiveOverride:
        """Returns the override in force with an id.  Raises NoOverrideError."""
        for held in self.override_registry.held():
            if held.override.override_id == override_id:
                return held
        raise NoOverrideError(
            f"no override {override_id[:128]!r} is in force", resource=override_id
        )

    async def GetOverride(
        self, request: policy_pb2.GetOverrideRequest, context: Context
    ) -> policy_pb2.GetOverrideResponse:
        """Returns the override in force here with an id, file-based policy included."""
        held = self._held(request.override_id)
        return policy_pb2.GetOverrideResponse(held=held_to_proto(held))

    async def ListOverrides(
        self, request: policy_pb2.ListOverridesRequest, context: Context
    ) -> policy_pb2.ListOverridesResponse:
        """Lists a page of the overrides in force here, and the state of the store."""
        held = {h.override.override_id: h for h in self.override_registry.held()}
        rows, token = await page_of(
            self._turns,
            held,
            lambda name: held_to_proto(held[name]),
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
        async with self.override_registry.watching() as changes:
            async for change in changes:
                yield policy_pb2.WatchOverridesResponse(
                    kind=_KINDS[change.kind], held=held_to_proto(change.held)
                )

    async def QueryAudit(
        self, request: policy_pb2.QueryAuditRequest, context: Context
    ) -> policy_pb2.QueryAuditResponse:
        """Returns records of the audit, the newest first."""
        limit, before = store_messages.limit_of(request), store_messages.position_of(request)
        async with self._audit_turn:
            # One more, to know whether another page follows.
            records = await self.override_registry.audit(limit + 1, request.override_id, before)
            return await store_messages.page_of(records, limit)

    async def _effects(
        self, of: Override, before: Sequence[Override], after: Sequence[Override]
    ) -> list[policy_pb2.OverrideEffect]:
        """Returns its effects on this sidecar's engines in its scope, ordered by engine id."""
        found = []
        for session in self.override_registry.sessions_of(of.scope):
            ceiling_seconds = session.core.settings.tpot_ceiling_seconds
            effect = effect_on(session.spec, of, before, after, ceiling_seconds)
            rows = preview(session.core, after) if effect.arms or effect.bound else ()
            found.append(
                messages.effect_to_proto(session.engine_id, rows, effect, _timing(session))
            )
            # Every engine takes about a millisecond: yield to other calls in between.
            await asyncio.sleep(0)
        return found

    def _require_effect(self, of: Override, effects: Sequence[policy_pb2.OverrideEffect]) -> None:
        """Raises UnknownEngineError or NoEffectError."""
        if not effects:
            raise self._nobody(of)
        if all(effect.unable for effect in effects):
            raise NoEffectError(
                "no engine in its scope can do this: "
                + _by_engine((effect.engine_id, effect.unable) for effect in effects),
                resource=of.override_id,
            )
        if not any(effect.constrains for effect in effects):
            raise NoEffectError(
                "it would change nothing: "
                + _by_engine((effect.engine_id, why_nothing(effect)) for effect in effects),
                resource=of.override_id,
            )

    def _nobody(self, of: Override) -> SpeculationError:
        """Returns the error for a scope without engines here; it names the engines that exist."""
        sessions, scope = self.override_registry.known_engines(), of.scope
        if not sessions:
            return _absent(of, "no engine has introduced itself to this sidecar")
        if scope.kind is ScopeKind.ENGINE:
            known = sorted({session.engine_id for session in sessions})
        else:
            models = {session.spec.fingerprint.target_model for session in sessions}
            known = sorted(models - {""}) or ["no model by name"]
        more = f" and {len(known) - _NAMED_MAX} more" if len(known) > _NAMED_MAX else ""
        return _absent(
            of, f"this sidecar knows no {scope}; it knows {', '.join(known[:_NAMED_MAX])}{more}"
        )

    def _require_store(self) -> None:
        """Raises StoreUnavailableError if the store would refuse a change."""
        health = self.override_registry.health
        if not health.ok:
            raise StoreUnavailableError(f"{health.detail}; nothing can be changed now")


def why_nothing(effect: policy_pb2.OverrideEffect) -> str:
    """Returns the reason why an override changes nothing on an engine."""
    if effect.unable:
        return str(effect.unable)
    if effect.shadowed_by:
        return f"shadowed by {', '.join(effect.shadowed_by)}"
    return "its choices stay the same"


def _by_engine(found: Iterable[tuple[str, str]]) -> str:
    """Joins the texts about engines, for the first few of them."""
    pairs = list(found)
    more = f"; and {len(pairs) - _NAMED_MAX} more engines" if len(pairs) > _NAMED_MAX else ""
    return "; ".join(f"engine {name}: {text}" for name, text in pairs[:_NAMED_MAX]) + more


def _absent(of: Override, message: str) -> SpeculationError:
    if of.scope.kind is ScopeKind.ENGINE:
        return UnknownEngineError(message, resource=of.scope.name)
    return NoEffectError(message, resource=of.override_id)


def _timing(session: EngineSession) -> messages.Timing:
    """Returns when the engine of a session follows a new plan."""
    if session.measurement is not None:
        return policy_pb2.OverrideEffect.TIMING_AFTER_MEASUREMENT
    if session.listeners:
        return policy_pb2.OverrideEffect.TIMING_NEXT_STEP
    return policy_pb2.OverrideEffect.TIMING_NEXT_CONTACT


def held_to_proto(held: ActiveOverride) -> policy_pb2.HeldOverride:
    """Converts an override in force, with its remaining lifetime."""
    return message_of(
        policy_pb2.HeldOverride,
        held,
        override=messages.override_to_proto(held.override),
        remaining_seconds=held.remaining_seconds,
    )


def _policy_to_proto(policy: Policy) -> policy_pb2.PolicyStatus | None:
    """Converts the state of the policy file; None without one."""
    if policy.path is None:
        return None
    return policy_pb2.PolicyStatus(
        path=str(policy.path), ok=not policy.error, detail=policy.error, read_at=policy.read_at
    )


def _require_own_id(override_id: str) -> None:
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
        calling().require_engines([override.scope.name])
    else:
        _require_unrestricted()


def _require_unrestricted() -> None:
    """Raises ForbiddenError for a caller that may act on some engines only."""
    caller = calling()
    if caller.is_restricted:
        raise ForbiddenError(
            f"{caller.name} may act only on the engines {', '.join(caller.engines)}: set one of "
            "them as the scope"
        )


def _require(what: str, text: str, most: int) -> None:
    if not (1 <= len(text) <= most and text.isprintable()):
        raise InvalidOverrideError(
            f"{what} must have 1 to {most} printable characters", field_path=what
        )
