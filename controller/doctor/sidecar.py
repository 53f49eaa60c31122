"""Checks the answers of the sidecar: its health, its engines, and their step costs."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

import controller
from controller.client.channels import connection_failure_reason
from controller.client.paging import collect_pages_async
from controller.doctor.finding import Finding, fail, ok, warn
from controller.util.sockets import permission_denied_reason
from controller.wire.engines import lost_capability_text
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc

_ANSWER_SECONDS = 5.0
# Largest tolerated difference of wall clocks.  Beyond it, audits are hard to read.
_CLOCK_SECONDS = 2.0
# Number of overrides that a finding names.
_NAMED_MAX = 3
_STORE = "speculation.store"


@dataclass(frozen=True, slots=True)
class SidecarAnswers:
    """A sidecar's answers.  asked_at, answered_at: Unix seconds by this machine's clock."""

    engines: service_pb2.ListEnginesResponse
    overrides: policy_pb2.ListOverridesResponse
    asked_at: float
    answered_at: float


async def ask(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> SidecarAnswers:
    """Asks a sidecar for its health, engines and settings.  Raises grpc.aio.AioRpcError."""
    asked_at = time.time()
    inspection = service_pb2_grpc.InspectionServiceStub(channel)
    answered_at = 0.0

    async def page(token: str) -> service_pb2.ListEnginesResponse:
        nonlocal answered_at
        answer = await inspection.ListEngines(
            service_pb2.ListEnginesRequest(page_token=token),
            timeout=_ANSWER_SECONDS,
            metadata=metadata,
        )
        # The sidecar's clock is compared with this one's at the first page.
        answered_at = answered_at or time.time()
        return answer

    engines = await collect_pages_async(page)
    overrides = await policy_pb2_grpc.PolicyServiceStub(channel).ListOverrides(
        policy_pb2.ListOverridesRequest(), timeout=_ANSWER_SECONDS, metadata=metadata
    )
    return SidecarAnswers(engines, overrides, asked_at, answered_at)


def check_no_answer(address: str, error: grpc.aio.AioRpcError) -> Finding:
    """Explains why there is no answer."""
    if error.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}:
        return fail(
            "sidecar",
            f"{address}: {error.details()}",
            "use the unix socket, or name a token file in CONTROLLER_TOKEN_FILE",
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return fail(
            "sidecar",
            f"{address}: not a sidecar, or one of another version",
            "check which program listens there",
        )
    if denied_reason := permission_denied_reason(address):
        return fail("sidecar", f"{address} cannot be opened", denied_reason)
    return fail(
        "sidecar",
        f"{address} does not answer: {error.code().name}",
        f"read the sidecar's log; {connection_failure_reason(address, error.details())}",
    )


def check_sidecar(answers: SidecarAnswers) -> Iterator[Finding]:
    """Checks the sidecar's health, version, clock, store and policy."""
    sidecar = answers.engines.sidecar
    for service in sidecar.services:
        if not service.serving and service.service != _STORE:
            name = service.service or "the sidecar"
            fix = _not_serving_fix(service.service, has_engines=bool(answers.engines.engines))
            yield fail("sidecar", f"{name} is NOT_SERVING: {service.detail}", fix)
    if all(service.serving for service in sidecar.services if service.service != _STORE):
        yield ok("sidecar", f"SERVING for {sidecar.uptime_seconds:.0f} s")
    yield _check_version(sidecar.version)
    yield _check_clock(answers)
    yield _check_store(answers.overrides.store)
    if answers.overrides.HasField("policy"):
        yield _check_policy(answers.overrides)


def check_engines(answers: SidecarAnswers, address: str, engine_url: str) -> Iterator[Finding]:
    """Checks each engine: its stream and reports, its version, and the source of its step costs.

    engine_url: of an engine's HTTP API; "" if unknown.
    """
    if not answers.engines.engines:
        yield fail(
            "engine",
            "no engine has introduced itself",
            f"set SPECULATION_SIDECAR={address} in the engine's container, and read its log",
        )
    for engine in answers.engines.engines:
        if engine.unavailable:
            name = engine.engine.engine_id
            yield fail(f"engine {name}", engine.unavailable, "read the sidecar's log")
            continue
        yield _check_engine(engine)
        yield from _check_lost_capabilities(engine)
        yield from _check_warnings(engine)
        yield _check_shim(engine, answers.engines.sidecar.version)
        yield _check_profile(engine, engine_url)


def _not_serving_fix(service: str, *, has_engines: bool) -> str:
    if not service.endswith("SpeculationService"):
        return "wait until the sidecar has started, or read its log"
    if not has_engines:
        return "start an engine with the shim (see `engine` below), or load a profile (--profile)"
    return "measure a profile (controller profile), or accept a prior with ready_with"


def _check_version(version: str) -> Finding:
    own_version = controller.__version__
    if version != own_version:
        return warn(
            "version",
            f"the sidecar has version {version or 'unknown (older)'}, this command {own_version}",
            "run both from the same image",
        )
    return ok("version", version)


def _check_clock(answers: SidecarAnswers) -> Finding:
    sidecar = answers.engines.sidecar
    jump_seconds = (
        sidecar.now_unix_seconds - sidecar.started_at_unix_seconds - sidecar.uptime_seconds
    )
    # The sidecar read its clock at some time between the request and the answer.
    seconds_before_question = sidecar.now_unix_seconds - answers.asked_at
    seconds_after_answer = sidecar.now_unix_seconds - answers.answered_at
    offset_seconds = (
        seconds_before_question if seconds_before_question < 0 else max(seconds_after_answer, 0.0)
    )
    if abs(offset_seconds) > _CLOCK_SECONDS:
        return warn(
            "clock",
            f"the sidecar's clock is {offset_seconds:+.1f} s from this machine's clock",
            "synchronize both by NTP: times in the audit are inconsistent",
        )
    if abs(jump_seconds) > _CLOCK_SECONDS:
        return warn(
            "clock",
            f"the wall clock was set by {jump_seconds:+.1f} s since the sidecar started",
            "check what sets it; leases and overrides use the monotonic clock and are not affected",
        )
    return ok(
        "clock",
        f"set by {_signed(jump_seconds)} since the sidecar started, {_signed(offset_seconds)} from "
        "this machine's",
    )


def _signed(seconds: float) -> str:
    # Adding 0.0 turns -0.0, a small negative number that was rounded, into 0.0.
    return f"{round(seconds, 1) + 0.0:+.1f} s"


def _check_store(store: policy_pb2.StoreStatus) -> Finding:
    if not store.ok:
        return fail(
            "store",
            f"failing for {store.since_seconds:.0f} s: {store.detail}",
            "repair it; active overrides stay in force, new ones are refused",
        )
    if store.unusable_count:
        return warn(
            "store",
            f"{store.unusable_count} overrides in it are not in force: {_shorten(store.unusable)}",
            "clear them with `controller override clear ID`, or delete their keys in Redis",
        )
    return ok("store", store.detail or "can be read and written")


def _shorten(names: Sequence[str]) -> str:
    ellipsis = "; ..." if len(names) > _NAMED_MAX else ""
    return "; ".join(names[:_NAMED_MAX]) + ellipsis


def _check_policy(overrides: policy_pb2.ListOverridesResponse) -> Finding:
    policy = overrides.policy
    if not policy.ok:
        return fail(
            "policy",
            f"{policy.detail}; the previous version of the file is in force",
            "correct the file, or its ConfigMap; the sidecar reads it again automatically",
        )
    entries = sum(entry.override.from_file for entry in overrides.overrides)
    return ok("policy", f"{entries} entries of {policy.path} are in force")


def _check_engine(engine: service_pb2.EngineStatus) -> Finding:
    name = f"engine {engine.engine.engine_id}"
    if not engine.steering:
        return fail(
            name,
            "introduced, but its stream is closed: it runs without a valid plan",
            "check whether the engine still runs, and read its agent's lines in its log",
        )
    if not engine.reports:
        return warn(name, "no step was reported yet", "send it a request, then check again")
    lost_reports_text = (
        f"{engine.rejected_reports} reports refused, {engine.dropped_reports} dropped"
    )
    if engine.rejected_reports:
        return warn(
            name,
            lost_reports_text,
            "read report_rejected in the sidecar's log: the versions may differ",
        )
    if engine.dropped_reports:
        return warn(
            name, lost_reports_text, "the agent gets too little CPU time: give the pod more"
        )
    unsteered_text = f", {engine.unsteered_steps} without a lease" if engine.unsteered_steps else ""
    return ok(
        name,
        f"{engine.reports} steps{unsteered_text}, the last {engine.seconds_since_last_report:.1f} "
        "s ago",
    )


def _check_lost_capabilities(engine: service_pb2.EngineStatus) -> Iterator[Finding]:
    for loss in engine.engine.lost:
        yield fail(
            f"engine {engine.engine.engine_id}",
            lost_capability_text(loss),
            "read the engine's log for the full error; restart the engine to try again",
        )


def _check_warnings(engine: service_pb2.EngineStatus) -> Iterator[Finding]:
    for warning in engine.warnings:
        name = f"{warning.kind} of {engine.engine.engine_id}"
        yield warn(name, warning.found, warning.advice)


def _check_shim(engine: service_pb2.EngineStatus, sidecar_version: str) -> Finding:
    name, shim_version = (
        f"shim of {engine.engine.engine_id}",
        engine.engine.fingerprint.shim_version,
    )
    if shim_version != sidecar_version:
        return warn(
            name,
            f"version {shim_version or 'unknown'}, the sidecar "
            f"{sidecar_version or 'unknown (older)'}",
            "install the same version of speculation-controller and speculation-controller-shim",
        )
    return ok(name, f"version {shim_version}")


def _check_profile(engine: service_pb2.EngineStatus, engine_url: str) -> Finding:
    name = f"profile of {engine.engine.engine_id}"
    if engine.profile_id:
        return ok(name, f"{engine.profile_id} matches")
    return warn(
        name,
        f"step costs are a {engine.costs} prior: {engine.no_profile}",
        f"measure one: controller profile --engine-url {engine_url or 'http://127.0.0.1:PORT'}",
    )
