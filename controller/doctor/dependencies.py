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
# Characters of what an engine says that are shown.
_DETAIL_MAX = 300


async def check_engine_http(
    url: str, api_key: str, introduced: Collection[str] | None
) -> list[Finding]:
    """Reachable, and steered as it sees it itself.

    introduced: what kinds of engines the sidecar knows ("vllm"); None if it does not say.  vLLM's
    API has no room for the plugin's state.
    """
    another = "start the engine, or name its address with --engine-url"
    try:
        engine = EngineHttp(url, api_key)
        status, _ = await engine.call("GET", "/health", seconds=_ANSWER_SECONDS)
        if status != 200:
            return [fail("engine HTTP", f"{url}/health answers {status}", "see the engine's log")]
        if await engine.kind() is VLLM:
            return [ok("engine HTTP", f"{url} answers (vLLM)"), *_vllm_plugin(introduced)]
        status, said = await engine.call("GET", "/server_info", seconds=_ANSWER_SECONDS)
    except ProfilingError as error:
        return [fail("engine HTTP", str(error), another)]
    found = [ok("engine HTTP", f"{url} answers")]
    if status in {401, 403}:
        found.append(warn("plugin", f"{url}/server_info answers {status}", "give its --api-key"))
    elif status == 200 and isinstance(said, dict):
        found.append(_plugin(said))
    return found


def _vllm_plugin(introduced: Collection[str] | None) -> Iterator[Finding]:
    if introduced is None:
        return
    if "vllm" in introduced:
        yield ok("plugin", "an engine of vLLM has introduced itself")
        return
    yield fail(
        "plugin",
        "no engine of vLLM has introduced itself: this one runs without the plugin, or names "
        "another sidecar",
        "install 'speculation-controller-shim' in its image, set SPECULATION_SIDECAR, and leave "
        "VLLM_PLUGINS unset or name speculation_controller in it",
    )


def _plugin(said: dict[str, Any]) -> Finding:
    states = said.get("internal_states")
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
            "the engine runs without it",
            "install 'speculation-controller-shim' in its image, and set SPECULATION_SIDECAR",
        )
    detail = str(status.get("sidecar_detail"))[:_DETAIL_MAX]
    if not status.get("agent_connected"):
        return fail(
            "plugin",
            f"its agent is gone ({detail})",
            "see the engine's log; the agent is started again by itself",
        )
    state = status.get("sidecar")
    if state != "STEERING":
        return fail(
            "plugin",
            f"its agent has no session: {str(state)[:_DETAIL_MAX]}: {detail}",
            "see whether SPECULATION_SIDECAR names this sidecar, and the sockets' directory is "
            "mounted in the engine's container",
        )
    return ok("plugin", f"steered, {str(status.get('plans_taken'))[:_DETAIL_MAX]} plans taken")


async def check_redis(settings: Settings) -> Finding:
    """Answers, and its clock.  Only for settings with a redis_url."""
    from controller.store import redis_client  # noqa: PLC0415  # only where there is one
    from controller.store.redis_client import RedisUrlError  # noqa: PLC0415  # same
    from controller.store.redis_errors import REDIS_ERRORS, explained  # noqa: PLC0415  # same

    assert settings.redis_url is not None
    url = settings.redis_url.get_secret_value()
    try:
        client = redis_client.connect(url, _ANSWER_SECONDS, access=redis_access(settings))
    except RedisUrlError as error:
        return fail("redis", str(error), "correct redis_url, or the settings beside it")
    try:
        asked = time.time()
        async with asyncio.timeout(_ANSWER_SECONDS):
            said = await client.time()
        answered = time.time()
    except Exception as error:  # noqa: BLE001  # whatever a client of three kinds may raise
        reason, fix = explained(error)
        remark = "overrides in force stay"
        return fail("redis", redact(reason, url), f"{fix}; {remark}" if fix else remark)
    finally:
        with contextlib.suppress(*REDIS_ERRORS, OSError):
            await redis_client.close(client)
    seconds, micros = next(iter(said.values())) if isinstance(said, dict) else said
    there = seconds + micros * 1e-6
    # Adding 0.0 turns -0.0 into 0.0.
    apart = round(min(there - asked, 0.0) or max(there - answered, 0.0), 1) + 0.0
    if abs(apart) > _CLOCK_SECONDS:
        return warn(
            "redis",
            f"its clock is {apart:+.1f} s from the one here",
            "set both by NTP: times in the audit do not fit together (overrides end on time)",
        )
    return ok("redis", f"answers in {(answered - asked) * 1e3:.0f} ms, clock {apart:+.1f} s")


async def check_health_port(listener: Listener) -> Finding:
    """A kubelet's question, from inside."""
    # Of every address, localhost is one, in whatever family this machine has.
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
                "restart the sidecar: health_port is read at its start",
            )
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return fail("health port", f"{address} says NOT_SERVING", "see the sidecar's log")
    return ok("health port", f"{address} says SERVING")
