"""Calls of the override service as an operator makes them."""

from typing import Any

from speculation.v1 import plan_pb2, policy_pb2
from tests.support.service_harness import RunningSidecar, SteerClient, with_timeout

ENGINE: dict[str, Any] = {"engine_id": "engine-0"}


FLEET: dict[str, Any] = {"fleet": True}


def make_override_request(
    name: str = "o1",
    scope: dict[str, Any] | None = None,
    low: int = 0,
    high: int = 0,
    author: str = "ann",
    reason: str = "the drafter is ill",
    request: dict[str, Any] | None = None,
    **rule: Any,
) -> policy_pb2.SetOverrideRequest:
    return policy_pb2.SetOverrideRequest(
        override=policy_pb2.Override(
            override_id=name,
            scope=policy_pb2.Scope(**(ENGINE if scope is None else scope)),
            rule=policy_pb2.OverrideRule(**rule),
            min_batch_size=low,
            max_batch_size=high,
            author=author,
            reason=reason,
        ),
        **(request or {}),
    )


async def set_override(running: RunningSidecar, **fields: Any) -> policy_pb2.SetOverrideResponse:
    return await with_timeout(running.policy.SetOverride(make_override_request(**fields)))


async def clear_override(running: RunningSidecar, name: str = "o1", etag: str = "") -> Any:
    request = policy_pb2.ClearOverrideRequest(
        override_id=name, etag=etag, author="bob", reason="it is well again"
    )
    return await with_timeout(running.policy.ClearOverride(request))


async def plan_under(stream: SteerClient, *overrides: str) -> plan_pb2.Plan:
    """The first plan under exactly these; one that only renews the lease may come before it."""
    while list((plan := await stream.plan()).overrides) != list(overrides):
        pass
    return plan


def gammas(plan: plan_pb2.Plan) -> dict[int, int]:
    return {row.max_batch_size: row.gamma for row in plan.rows}


async def list_overrides(running: RunningSidecar) -> dict[str, policy_pb2.HeldOverride]:
    answer = await with_timeout(running.policy.ListOverrides(policy_pb2.ListOverridesRequest()))
    return {held_override.override.override_id: held_override for held_override in answer.overrides}
