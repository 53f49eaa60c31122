"""Runs all checks, each one after those that it depends on."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from controller.client.channels import Credentials, CredentialsError
from controller.client.paging import EndlessListError
from controller.doctor import dependencies, local, processes, sidecar
from controller.doctor.finding import Finding, fail, ok
from controller.settings.settings import DEFAULT_ADDRESS, Settings, SettingsError
from controller.util.sockets import reading_addresses, socket_path


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """The settings of one run of the checks.

    config: the settings file.  address: of the sidecar; "": as in the settings.  engine_url: of the
    engine's HTTP API; "" skips its checks.
    """

    config: Path | None = None
    address: str = ""
    engine_url: str = ""
    api_key: str = ""


async def diagnose(request: DoctorRequest) -> AsyncIterator[Finding]:
    """Yields each finding as soon as its check is done."""
    settings = None
    try:
        settings = Settings.load({}, request.config)
        yield ok("settings", "can be used")
    except SettingsError as error:
        first_line, *other_lines = str(error).splitlines()
        more_text = f" (and {len(other_lines)} more)" if other_lines else ""
        yield fail(
            "settings", f"{first_line}{more_text}", "correct it; `controller config` shows them all"
        )
    address = request.address or (settings.address if settings else DEFAULT_ADDRESS)
    if address.startswith("unix:"):
        yield local.check_socket(socket_path(address))
        for finding in processes.check_callers(socket_path(address)):
            yield finding
    findings, introduced = await _check_sidecar(address, request.engine_url)
    for finding in findings:
        yield finding
    if request.engine_url:
        for finding in await dependencies.check_engine_http(
            request.engine_url, request.api_key, introduced
        ):
            yield finding
    for finding in processes.check_processes(address):
        yield finding
    if settings is None:
        return
    # The state directory is next to the socket that was asked; the settings may name another one.
    address_update = {"address": address} if request.address and address.startswith("unix:") else {}
    state = settings.model_copy(update=address_update).state_path
    for finding in local.check_state(state, has_redis=settings.redis_url is not None):
        yield finding
    if settings.redis_url is not None:
        yield await dependencies.check_redis(settings)
    if settings.health_port:
        yield await dependencies.check_health_port(settings.listener("health"))


async def _check_sidecar(address: str, engine_url: str) -> tuple[list[Finding], set[str] | None]:
    """Returns the sidecar's findings and its kinds of engines ("vllm"); None without an answer."""
    try:
        credentials = Credentials.for_address(address)
    except CredentialsError as error:
        finding = fail("sidecar", str(error), "correct the variable, or ask on the unix socket")
        return [finding], None
    answers: sidecar.SidecarAnswers | None = None
    no_answer: list[Finding] = []
    for reading_address in reading_addresses(address):
        async with credentials.aio_channel(reading_address) as channel:
            try:
                answers = await sidecar.ask(channel, credentials.metadata())
                break
            except grpc.aio.AioRpcError as error:
                no_answer = [sidecar.check_no_answer(address, error)]
            except EndlessListError as error:
                return [fail("sidecar", f"{address}: {error}", "see what runs there")], None
    if answers is None:
        return no_answer, None
    kinds = {engine.engine.fingerprint.engine for engine in answers.engines.engines}
    engines = sidecar.check_engines(answers, address, engine_url)
    return [*sidecar.check_sidecar(answers), *engines], kinds
