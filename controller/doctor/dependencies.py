"""Checks the dependencies: the engine's HTTP API and plugin, Redis, the health port."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controller.doctor.finding import Finding, fail, ok, warn
from controller.profiling.engine_http import VLLM, EngineHttp
from controller.profiling.errors import ProfilingError
from controller.settings.listeners import Listener
from controller.settings.redis_settings import redis_access
from controller.settings.settings import Settings
from controller.store.redis_url import redact

_ANSWER_SECONDS = 5.0
_CLOCK_SECONDS = 2.0
_PLUGIN = "speculation_controller"
# Characters of an engine's answer that a finding shows.
_DETAIL_MAX = 300


async def check_engine_http(
    url: str, api_key: str, introduced: Collection[str] | None
) -> list[Finding]:
    """Checks that the engine's HTTP API answers, and what it reports about the plugin.

    introduced: kinds of the engines that the sidecar knows ("vllm"); None if it did not answer.
    vLLM's API cannot report the plugin's state.
    """
    fix = "start the engine, or name its address with --engine-url"
    try:
        engine = EngineHttp(url, api_key)
        status, _ = await engine.call("GET", "/health", seconds=_ANSWER_SECONDS)
        if status != 200:
            return [fail("engine HTTP", f"{url}/health answers {status}", "read the engine's log")]
        if await engine.kind() is VLLM:
            return [ok("engine HTTP", f"{url} answers (vLLM)"), *_check_vllm_plugin(introduced)]
        status, info = await engine.call("GET", "/server_info", seconds=_ANSWER_SECONDS)
    except ProfilingError as error:
        return [fail("engine HTTP", str(error), fix)]
    findings = [ok("engine HTTP", f"{url} answers")]
    if status in {401, 403}:
        findings.append(warn("plugin", f"{url}/server_info answers {status}", "set --api-key"))
    elif status == 200 and isinstance(info, dict):
        findings.append(_check_plugin(info))
    return findings


def _check_vllm_plugin(introduced: Collection[str] | None) -> Iterator[Finding]:
    if introduced is None:
        return
    if "vllm" in introduced:
        yield ok("plugin", "a vLLM engine has introduced itself")
        return
    yield fail(
        "plugin",
        "no vLLM engine has introduced itself: this one runs without the plugin, or names "
        "another sidecar",
        "install 'speculation-controller-shim' in its image, set SPECULATION_SIDECAR, and leave "
        "VLLM_PLUGINS unset or name speculation_controller in it",
    )


def _check_plugin(info: dict[str, Any]) -> Finding:
    states = info.get("internal_states")
    status = next(
        (
            state[_PLUGIN]
            for state in (states if isinstance(states, list) else [])
            if isinstance(state, dict) and isinstance(state.get(_PLUGIN), dict)
        ),
        None,
    )
    if status is None:
        return fail(
            "plugin",
            "the engine runs without the plugin",
            "install 'speculation-controller-shim' in its image, and set SPECULATION_SIDECAR",
        )
    detail = str(status.get("sidecar_detail"))[:_DETAIL_MAX]
    if not status.get("agent_connected"):
        return fail(
            "plugin",
            f"its agent has ended ({detail})",
            "read the engine's log; the agent restarts automatically",
        )
    state = status.get("sidecar")
    if state != "STEERING":
        return fail(
            "plugin",
            f"its agent has no session: {str(state)[:_DETAIL_MAX]}: {detail}",
            "check that SPECULATION_SIDECAR names this sidecar, and that the directory of its "
            "socket is mounted in the engine's container",
        )
    return ok("plugin", f"steered, {str(status.get('plans_taken'))[:_DETAIL_MAX]} plans applied")


async def check_redis(settings: Settings) -> Finding:
    """Checks that Redis answers, and its clock.  The settings must have a redis_url."""
    from controller.store import redis_client  # noqa: PLC0415  # only if redis_url is set
    from controller.store.redis_client import RedisUrlError  # noqa: PLC0415  # same
    from controller.store.redis_errors import REDIS_ERRORS, explain_error  # noqa: PLC0415  # same

    assert settings.redis_url is not None
    url = settings.redis_url.get_secret_value()
    try:
        client = redis_client.connect(url, _ANSWER_SECONDS, access=redis_access(settings))
    except RedisUrlError as error:
        return fail("redis", str(error), "correct redis_url, or the other redis_ settings")
    try:
        asked_at = time.time()
        async with asyncio.timeout(_ANSWER_SECONDS):
            reply = await client.time()
        answered_at = time.time()
    except Exception as error:  # noqa: BLE001  # the three kinds of clients raise different errors
        reason, fix = explain_error(error)
        remark = "active overrides stay in force"
        return fail("redis", redact(reason, url), f"{fix}; {remark}" if fix else remark)
    finally:
        with contextlib.suppress(*REDIS_ERRORS, OSError):
            await redis_client.close(client)
    seconds, micros = next(iter(reply.values())) if isinstance(reply, dict) else reply
    redis_seconds = seconds + micros * 1e-6
    # Adding 0.0 turns -0.0 into 0.0.
    offset_seconds = (
        round(min(redis_seconds - asked_at, 0.0) or max(redis_seconds - answered_at, 0.0), 1) + 0.0
    )
    if abs(offset_seconds) > _CLOCK_SECONDS:
        return warn(
            "redis",
            f"its clock is {offset_seconds:+.1f} s from this machine's clock",
            "synchronize both by NTP: times in the audit are inconsistent (overrides end on time)",
        )
    return ok(
        "redis",
        f"answers in {(answered_at - asked_at) * 1e3:.0f} ms, clock {offset_seconds:+.1f} s",
    )


async def check_health_port(listener: Listener) -> Finding:
    """Makes the same health check as a kubelet, from inside the pod."""
    # If it listens on every address, localhost works with IPv4 and IPv6.
    is_every = listener.host in {"::", "0.0.0.0"}  # noqa: S104  # compared
    address = f"localhost:{listener.port}" if is_every else listener.address
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            return fail(
                "health port",
                f"{address} does not answer: {error.code().name}",
                "restart the sidecar: health_port is read only at the start",
            )
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return fail("health port", f"{address} says NOT_SERVING", "read the sidecar's log")
    return ok("health port", f"{address} says SERVING")
