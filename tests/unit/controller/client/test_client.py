"""The client for programs, against real sidecars, and scripted servers where one has to fail."""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from controller.client import Client, errors
from speculation.v1 import policy_pb2, service_pb2
from tests.support.credentials import free_address, token_line
from tests.support.override_calls import make_override_request
from tests.support.service_harness import make_profile, running_sidecar, with_timeout

Code = grpc.StatusCode
FLEET = policy_pb2.Scope(fleet=True)
T = TypeVar("T")


def pin(gamma: int = 1, override_id: str = "", **fields: Any) -> policy_pb2.Override:
    rule = policy_pb2.OverrideRule(gamma=gamma)
    return policy_pb2.Override(
        override_id=override_id, scope=FLEET, rule=rule, reason="test", **fields
    )


async def by_client(tmp_path: Path, work: Callable[[Client], T], **options: Any) -> T:
    """What `work` makes with a client, which blocks, beside the sidecar's event loop."""

    def run() -> T:
        with Client(f"{tmp_path}/controller.sock", author="job", **options) as client:
            return work(client)

    return await with_timeout(asyncio.to_thread(run))


async def test_engines_are_listed_and_explained(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        await running.introduce("a")
        await running.introduce("b")
        listed, lines, explanation, sidecar = await by_client(
            tmp_path, lambda c: (c.engines(), c.overview(), c.explain("a", 3), c.sidecar())
        )
        (of_fleet,) = await by_client(tmp_path, lambda c: c.fleet("engine=b"))
    assert [status.engine.engine_id for status in listed] == ["a", "b"]
    assert [line.engine_id for line in lines] == ["a", "b"]
    assert of_fleet.engine_id == "b"
    assert (explanation.engine_id, explanation.batch_size) == ("a", 3)
    assert {service.service for service in sidecar.services} >= {"speculation.v1.PolicyService"}


@pytest.mark.parametrize("rights", ["override", "read"])
async def test_who_may_not_read_on_the_operators_socket_reads_on_the_engines_one(
    tmp_path: Path, rights: str
):
    """By an access list in which the user has another right, or none at all."""
    access = tmp_path / "access"
    access.write_text(f"{rights} uid:{os.getuid() + (rights == 'read')}\n")
    async with running_sidecar(tmp_path, access=access) as running:
        await running.introduce("a")
        engines = await by_client(tmp_path, Client.engines)
        # Only what reads is asked elsewhere.
        if rights == "read":
            with pytest.raises(errors.AccessDeniedError):
                await by_client(tmp_path, lambda c: c.set_override(pin()))
    assert [engine.engine.engine_id for engine in engines] == ["a"]


async def test_an_override_lives_from_set_to_clear(tmp_path: Path):
    def work(client: Client) -> list[str]:
        tried = client.set_override(pin(), dry_run=True)
        assert not tried.held.etag
        first = client.set_override(pin(), ttl_seconds=60.0).held
        assert (first.override.author, first.remaining_seconds <= 60) == ("job", True)
        second = client.set_override(
            pin(2, "mine", author="ann"), ttl_seconds=math.inf, require_effect=False
        ).held
        assert (second.override.author, second.HasField("remaining_seconds")) == ("ann", False)
        assert client.get_override("mine").etag == second.etag
        ids = [first.override.override_id, "mine"]
        assert [held.override.override_id for held in client.overrides()] == ids
        # With the newest etag, content is replaced; with an older one it is not.
        third = client.set_override(pin(3, "mine"), etag=second.etag).held
        with pytest.raises(errors.OverrideChangedError) as old:
            client.set_override(pin(0, "mine"), etag=second.etag)
        assert old.value.facts == {"etag": third.etag}
        with pytest.raises(errors.AlreadyExistsError) as taken:
            client.set_override(pin(0, "mine"))
        assert (taken.value.resource_type, taken.value.resource) == ("override", "mine")
        for override_id in ids:
            assert client.clear_override(override_id, "done").effects
        assert client.clear_override("mine", "done", allow_missing=True).missing
        with pytest.raises(errors.NotFoundError):
            client.clear_override("mine", "done")
        return [record.action for record in client.audit()]

    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        actions = await by_client(tmp_path, work)
    assert actions == ["clear", "clear", "replace", "set", "set"]


async def test_changes_are_watched_until_the_caller_stops_or_the_sidecar_ends(tmp_path: Path):
    seen: list[str] = []
    first = threading.Event()

    def one(client: Client) -> None:
        for news in client.watch_overrides():
            seen.append(news.held.override.override_id)
            break

    def all_(client: Client) -> None:
        for news in client.watch_overrides():
            seen.append(news.held.override.override_id)
            first.set()

    async with running_sidecar(tmp_path) as running:
        await with_timeout(
            running.policy.SetOverride(make_override_request("o1", scope={"fleet": True}, gamma=1))
        )
        await by_client(tmp_path, one)
        watching = asyncio.create_task(by_client(tmp_path, all_))
        assert await asyncio.to_thread(first.wait, 60)
    with pytest.raises(errors.UnavailableError):
        await watching
    assert seen == ["o1", "o1"]


async def test_profiles_are_pushed_listed_got_and_installed(tmp_path: Path):
    text = make_profile().to_json()

    def work(client: Client) -> None:
        pushed = client.push_profile(text)
        (shelved,) = client.profiles()
        assert shelved.identity == pushed.identity
        assert client.get_profile(profile_id=pushed.profile_id) == text
        assert client.get_profile(engine_id="engine-0") == text
        assert list(client.install_profile(text).engine_ids) == ["engine-0"]
        with pytest.raises(ValueError, match="either a profile or an engine"):
            client.get_profile()
        with pytest.raises(errors.InvalidRequestError) as bad:
            client.push_profile("{}")
        assert bad.value.violations[0].field == "profile_json"
        with pytest.raises(errors.PreconditionError) as other:
            client.install_profile(make_profile("another model").to_json())
        assert other.value.reason == "NO_MATCHING_ENGINE"
        with pytest.raises(errors.NotFoundError) as gone:
            client.get_profile(profile_id="0" * 16)
        assert (gone.value.reason, gone.value.status) == ("PROFILE_NOT_FOUND", Code.NOT_FOUND)

    async with running_sidecar(tmp_path) as running:
        await running.introduce()
        await by_client(tmp_path, work)


async def test_a_caller_on_tcp_shows_its_token_and_has_the_rights_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    address, access = free_address(), tmp_path / "access"
    access.write_text(token_line("read", "secret", "dashboard"))
    (tmp_path / "token").write_text("secret\n")

    def work() -> None:
        with Client(address) as stranger, pytest.raises(errors.AccessDeniedError) as nobody:
            stranger.engines()
        assert nobody.value.reason == "UNAUTHENTICATED"
        monkeypatch.setenv("CONTROLLER_TOKEN_FILE", str(tmp_path / "token"))
        with Client(address) as client:
            assert client.engines() == []
            with pytest.raises(errors.AccessDeniedError) as denied:
                client.set_override(pin())
            assert denied.value.reason == "FORBIDDEN"

    async with running_sidecar(tmp_path, tcp=address, access=access):
        await with_timeout(asyncio.to_thread(work))


def test_no_sidecar_is_an_error_that_names_what_to_check(tmp_path: Path):
    with Client(f"unix:{tmp_path}/none.sock") as client:
        with pytest.raises(errors.UnavailableError, match="is `controller serve` running") as away:
            client.engines()
        assert (away.value.reason, away.value.status) == ("", Code.UNAVAILABLE)
        with pytest.raises(errors.UnavailableError):
            list(client.watch_overrides())
    with pytest.raises(ValueError, match="is not an address"):
        Client("nowhere")


class Scripted:
    """Ends each call as the script says, and as a sidecar without error details does."""

    def __init__(self, *codes: Code) -> None:
        self.codes = list(codes)
        self.requests: list[Any] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _answer(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.may_answer.wait(60)
        if self.codes:
            context.set_trailing_metadata((("speculation-error", "SomeError"),))
            context.abort(self.codes.pop(0), "as the script says")

    def SetOverride(self, request: Any, context: Any) -> Any:
        self._answer(request, context)
        return policy_pb2.SetOverrideResponse()

    def ClearOverride(self, request: Any, context: Any) -> Any:
        self._answer(request, context)
        return policy_pb2.ClearOverrideResponse()

    def ListOverrides(self, request: Any, context: Any) -> Any:
        held = policy_pb2.HeldOverride(override=pin(override_id="old"), etag="1-1")
        return policy_pb2.ListOverridesResponse(overrides=[held])

    def Explain(self, request: Any, context: Any) -> Any:
        self._answer(request, context)
        return service_pb2.ExplainResponse()


# Other calls are unknown to such a sidecar.
SCRIPTED: dict[str, dict[str, Any]] = {
    "InspectionService": {"Explain": service_pb2.ExplainRequest},
    "PolicyService": {
        "SetOverride": policy_pb2.SetOverrideRequest,
        "ClearOverride": policy_pb2.ClearOverrideRequest,
        "ListOverrides": policy_pb2.ListOverridesRequest,
    },
}


@contextmanager
def scripted(tmp_path: Path, *codes: Code, timeout: float = 30.0) -> Iterator[tuple[Any, Client]]:
    servicer = Scripted(*codes)
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        for service, methods in SCRIPTED.items():
            handlers: dict[str, Any] = {
                name: grpc.unary_unary_rpc_method_handler(
                    getattr(servicer, name),
                    kind.FromString,
                    lambda reply: reply.SerializeToString(),
                )
                for name, kind in methods.items()
            }
            generic = grpc.method_handlers_generic_handler(f"speculation.v1.{service}", handlers)
            server.add_generic_rpc_handlers([generic])
        # One for both roles.
        server.add_insecure_port(f"unix:{tmp_path}/c.sock")
        server.add_insecure_port(f"unix:{tmp_path}/c-operators.sock")
        server.start()
        try:
            with Client(f"unix:{tmp_path}/c.sock", timeout_seconds=timeout) as client:
                yield servicer, client
        finally:
            servicer.may_answer.set()
            server.stop(None).wait()


def test_where_the_sidecar_is_away_for_a_moment_the_same_request_is_sent_again(tmp_path: Path):
    with scripted(tmp_path, Code.UNAVAILABLE, Code.UNAVAILABLE) as (server, client):
        client.set_override(pin())
        assert len(server.requests) == 3
        assert server.requests[0].request_id
        assert all(request == server.requests[0] for request in server.requests)
        client.set_override(pin())
        assert server.requests[3].request_id != server.requests[0].request_id
        server.codes = [Code.UNAVAILABLE] * 10
        with pytest.raises(errors.UnavailableError, match=r"^as the script says$"):
            client.explain("e")
        assert len(server.requests) == 4 + 5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.ABORTED, errors.OverrideChangedError),
        (Code.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (Code.INTERNAL, errors.CallError),
        (Code.OUT_OF_RANGE, errors.InvalidRequestError),
        (Code.FAILED_PRECONDITION, errors.PreconditionError),
    ],
)
def test_no_other_error_is_tried_again_and_an_older_sidecars_has_its_class(
    tmp_path: Path, code: Code, kind: type[errors.CallError]
):
    with scripted(tmp_path, code) as (server, client):
        with pytest.raises(errors.CallError, match="as the script says") as failed:
            client.set_override(pin())
        assert type(failed.value) is kind
        assert (failed.value.status, failed.value.reason) == (code, "")
        assert len(server.requests) == 1


def test_a_sidecar_that_does_not_answer_is_given_up_at_the_deadline(tmp_path: Path):
    with scripted(tmp_path, timeout=0.2) as (server, client):
        server.may_answer.clear()
        with pytest.raises(errors.DeadlineExceededError):
            client.explain("e")


def test_an_older_sidecar_is_asked_in_the_way_it_knows(tmp_path: Path):
    with scripted(tmp_path, Code.NOT_FOUND, Code.NOT_FOUND) as (_, client):
        assert client.get_override("old").etag == "1-1"
        with pytest.raises(errors.NotFoundError) as missing:
            client.get_override("new")
        assert (missing.value.status, missing.value.resource) == (Code.NOT_FOUND, "new")
        assert client.clear_override("new", "done", allow_missing=True).missing
        with pytest.raises(errors.NotFoundError):
            client.clear_override("new", "done")
        with pytest.raises(errors.UnsupportedError):
            client.engines()
