"""Operators in command: PolicyService over the override book."""

import re
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from controller.core.errors import SpeculationError
from controller.core.overrides import (
    MAX_AUTHOR_CHARACTERS,
    MAX_REASON_CHARACTERS,
    InvalidOverrideError,
    Override,
)
from controller.service import override_messages as messages
from controller.service.errors import InvalidQuestionError, NoOverrideError, abort
from controller.service.operator_door import OperatorDoor
from controller.service.override_book import Held, OverrideBook
from controller.store.port import Who
from speculation.v1 import policy_pb2, policy_pb2_grpc

_AUDIT_DEFAULT, _AUDIT_MAX = 100, 1000
# Of a journal, or of Redis, which puts a dash into it.
_SEQUENCE = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")
_KINDS = {
    "present": policy_pb2.WatchOverridesResponse.KIND_PRESENT,
    "set": policy_pb2.WatchOverridesResponse.KIND_SET,
    "ended": policy_pb2.WatchOverridesResponse.KIND_ENDED,
}


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """SetOverride, ClearOverride, ListOverrides, WatchOverrides, QueryAudit.

    default_seconds, max_seconds: times to live.  door: whom the kernel says operators are.
    """

    def __init__(
        self, book: OverrideBook, door: OperatorDoor, default_seconds: float, max_seconds: float
    ) -> None:
        self._book = book
        self._door = door
        self.default_seconds = default_seconds
        self.max_seconds = max_seconds

    async def SetOverride(
        self,
        request: policy_pb2.SetOverrideRequest,
        context: grpc.aio.ServicerContext[
            policy_pb2.SetOverrideRequest, policy_pb2.SetOverrideResponse
        ],
    ) -> policy_pb2.SetOverrideResponse:
        """Durable and in force here when it returns."""
        try:
            override = messages.override_from_proto(request.override)
            seconds = messages.lifetime_of(request, self.default_seconds, self.max_seconds)
            effects = self._effects(self._book.with_(override), override)
            if request.dry_run:
                shown = policy_pb2.HeldOverride(
                    override=request.override, remaining_seconds=seconds
                )
                return policy_pb2.SetOverrideResponse(held=shown, effects=effects)
            who = Who(override.author, override.reason, self._origin(context))
            held, repeated = await self._book.set(override, seconds, request.etag, who)
            return policy_pb2.SetOverrideResponse(
                held=held_to_proto(held), effects=[] if repeated else effects, repeated=repeated
            )
        except SpeculationError as error:
            await abort(context, error)

    async def ClearOverride(
        self,
        request: policy_pb2.ClearOverrideRequest,
        context: grpc.aio.ServicerContext[
            policy_pb2.ClearOverrideRequest, policy_pb2.ClearOverrideResponse
        ],
    ) -> policy_pb2.ClearOverrideResponse:
        """Ended everywhere soon, here when it returns."""
        try:
            _require("author", request.author, MAX_AUTHOR_CHARACTERS)
            _require("reason", request.reason, MAX_REASON_CHARACTERS)
            known = [h for h in self._book.held() if h.override.override_id == request.override_id]
            if not known:
                raise NoOverrideError(f"no override {request.override_id[:128]!r} is in force")
            effects = self._effects(self._book.without(request.override_id), known[0].override)
            who = Who(request.author, request.reason, self._origin(context))
            await self._book.clear(request.override_id, request.etag, who)
            return policy_pb2.ClearOverrideResponse(effects=effects)
        except SpeculationError as error:
            await abort(context, error)

    async def ListOverrides(
        self,
        request: policy_pb2.ListOverridesRequest,
        context: grpc.aio.ServicerContext[
            policy_pb2.ListOverridesRequest, policy_pb2.ListOverridesResponse
        ],
    ) -> policy_pb2.ListOverridesResponse:
        """Those in force here, and how the store is doing."""
        return policy_pb2.ListOverridesResponse(
            overrides=map(held_to_proto, self._book.held()),
            store=messages.health_to_proto(self._book.health),
        )

    async def WatchOverrides(
        self,
        request: policy_pb2.WatchOverridesRequest,
        context: grpc.aio.ServicerContext[
            policy_pb2.WatchOverridesRequest, policy_pb2.WatchOverridesResponse
        ],
    ) -> AsyncIterator[policy_pb2.WatchOverridesResponse]:
        """Until the client or the sidecar goes."""
        try:
            async with self._book.watching() as changes:
                async for change in changes:
                    yield policy_pb2.WatchOverridesResponse(
                        kind=_KINDS[change.kind], held=held_to_proto(change.held)
                    )
        except SpeculationError as error:
            await abort(context, error)

    async def QueryAudit(
        self,
        request: policy_pb2.QueryAuditRequest,
        context: grpc.aio.ServicerContext[
            policy_pb2.QueryAuditRequest, policy_pb2.QueryAuditResponse
        ],
    ) -> policy_pb2.QueryAuditResponse:
        """Newest first."""
        try:
            limit = request.limit or _AUDIT_DEFAULT
            if limit > _AUDIT_MAX:
                raise InvalidQuestionError(f"limit {limit}: at most {_AUDIT_MAX}, ask in pages")
            before = request.before_sequence
            if before and not _SEQUENCE.fullmatch(before):
                raise InvalidQuestionError(f"before_sequence {before[:40]!r} is none")
            records = await self._book.audit(limit, request.override_id, before)
            return policy_pb2.QueryAuditResponse(records=map(messages.audit_to_proto, records))
        except SpeculationError as error:
            await abort(context, error)

    def _origin(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Where a call comes from, for the audit."""
        name = context.peer() or "unknown"
        return str(self._door.peers.get(name, name))

    def _effects(
        self, overrides: tuple[Override, ...], of: Override
    ) -> list[policy_pb2.OverrideEffect]:
        return [
            messages.effect_to_proto(engine, rows)
            for engine, rows in self._book.previews(overrides, of)
        ]


def held_to_proto(held: Held) -> policy_pb2.HeldOverride:
    """With the time that is left now."""
    return policy_pb2.HeldOverride(
        override=messages.override_to_proto(held.override),
        etag=held.etag,
        remaining_seconds=held.remaining_seconds,
        created_at=held.created_at,
    )


def _require(what: str, text: str, most: int) -> None:
    if not (1 <= len(text) <= most and text.isprintable()):
        raise InvalidOverrideError(f"{what}: 1 to {most} printable characters are needed")
