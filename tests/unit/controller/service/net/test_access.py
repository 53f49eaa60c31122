"""Reading, steering and overriding are different rights, on every line that leads in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from controller.service.net import guard, tcp
from controller.service.net.access import AccessFileError, AccessList
from controller.service.net.callers import Right
from controller.service.net.errors import StartRefusedError
from controller.service.net.guard import required_right
from controller.service.server import Sidecar
from controller.settings.settings import Settings
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc
from tests.support.credentials import free_address, make_authority, token_line
from tests.support.override_calls import make_override_request
from tests.support.permitted_calls import CallProbe
from tests.support.service_harness import (
    engine_message,
    failure,
    running_sidecar,
    wait_until,
    with_timeout,
)

DENIED = grpc.StatusCode.PERMISSION_DENIED
UNKNOWN = grpc.StatusCode.UNAUTHENTICATED


OK = grpc.StatusCode.OK


async def test_without_an_access_list_tcp_reads_and_steers_and_never_overrides(tmp_path: Path):
    address = free_address()
    async with running_sidecar(tmp_path, tcp=address) as running:
        async with grpc.aio.insecure_channel(address) as channel:
            called = CallProbe(channel)
            assert await called.read() is OK
            assert await called.steer() is OK
            code, text = await failure(
                policy_pb2_grpc.PolicyServiceStub(channel).SetOverride(
                    make_override_request(off=True)
                )
            )
            assert code is DENIED
            assert "use the operators' socket, unix:" in text
        assert await CallProbe(running.operators).override("o1") is OK


async def test_the_engines_socket_reads_and_steers_and_never_overrides(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        called = CallProbe(running.channel)
        statuses = (await called.read(), await called.steer(), await called.override("o1"))
        assert statuses == (OK, OK, DENIED)


async def test_each_token_has_its_rights_and_no_others(tmp_path: Path):
    address, access = free_address(), tmp_path / "access"
    access.write_text(
        "# who may what\n"
        + token_line("read", "r-secret", "dashboard")
        + token_line("steer", "s-secret", "engine")
        + token_line("read,override", "o-secret", "ann")
    )
    async with (
        running_sidecar(tmp_path, tcp=address, access=access),
        grpc.aio.insecure_channel(address) as channel,
    ):
        expected = {
            "r-secret": (OK, DENIED, DENIED, OK),
            "s-secret": (DENIED, OK, DENIED, DENIED),
            "o-secret": (OK, DENIED, OK, OK),
            "guessed": (UNKNOWN,) * 4,
            "": (UNKNOWN,) * 4,
        }
        await CallProbe(channel, "o-secret").override("seen")
        for number, (token, codes) in enumerate(expected.items()):
            called = CallProbe(channel, token)
            statuses = (
                await called.read(),
                await called.steer(),
                await called.override(f"o{number}"),
                await called.watch(),
            )
            assert statuses == codes, token


async def test_a_token_that_is_taken_out_of_the_file_is_out(tmp_path: Path):
    address, access = free_address(), tmp_path / "access"
    access.write_text(token_line("read", "old", "x"))
    async with (
        running_sidecar(tmp_path, tcp=address, access=access),
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert await CallProbe(channel, "old").read() is OK
        access.write_text(token_line("read", "new-one", "x"))
        codes: list[grpc.StatusCode] = []

        async def rotated() -> bool:
            codes[:] = [
                await CallProbe(channel, "old").read(), await CallProbe(channel, "new-one").read(),
            ]  # fmt: skip
            return codes == [UNKNOWN, OK]

        for _ in range(100):
            if await rotated():
                break
            await asyncio.sleep(0.1)
        assert codes == [UNKNOWN, OK]
        # A file that is half-written changes nothing.
        with structlog.testing.capture_logs() as lines:
            access.write_text("read token-sha256:12")
            await wait_until(lambda: lines)
        assert lines[0]["event"] == "access_not_read"
        assert await CallProbe(channel, "new-one").read() is OK


async def silence() -> AsyncIterator[bytes]:
    """Requests of a call that stays open, and has none."""
    await asyncio.Event().wait()
    yield b""


async def test_on_tcp_nobody_waits_for_the_message_of_a_call_that_may_not_be_made(tmp_path: Path):
    address, access = free_address(), tmp_path / "access"
    access.write_text(token_line("read", "known", "x"))
    async with (
        running_sidecar(tmp_path, tcp=address, access=access),
        grpc.aio.insecure_channel(address) as channel,
    ):
        raw: Any = channel
        for token, code in (("", UNKNOWN), ("known", DENIED)):
            call: Any = raw.stream_unary("/speculation.v1.SpeculationService/Introduce")(
                silence(), metadata=(("authorization", f"Bearer {token}"),)
            )
            assert await with_timeout(call.code()) is code


@pytest.mark.parametrize(
    ("line", "code"),
    [("", UNKNOWN), ("read", DENIED), ("read,steer engine:other-*", DENIED)],
)
async def test_a_stream_ends_with_the_right_to_it(tmp_path: Path, line: str, code: grpc.StatusCode):
    address, access = free_address(), tmp_path / "access"
    kept = token_line("read,steer", "kept", "kept")
    access.write_text(kept + token_line("read,steer", "revoked", "engine"))
    async with (
        running_sidecar(tmp_path, tcp=address, access=access),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = service_pb2_grpc.SpeculationServiceStub(channel)
        streams = []
        for token in ("revoked", "kept"):
            metadata = (("authorization", f"Bearer {token}"),)
            request = service_pb2.IntroduceRequest(engine=engine_message(token))
            session = (await with_timeout(stub.Introduce(request, metadata=metadata))).session_id
            stream = stub.Steer(metadata=metadata)
            await with_timeout(stream.write(service_pb2.SteerRequest(session_id=session)))
            await with_timeout(stream.read())
            streams.append(stream)
        rights, _, engines = line.partition(" ")
        changed = token_line(rights, "revoked", f"engine {engines}".strip()) if rights else ""
        access.write_text(kept + changed)
        assert await with_timeout(streams[0].code()) is code
        assert not streams[1].done()


async def test_an_entry_acts_on_its_own_engines_only(tmp_path: Path):
    address, access = free_address(), tmp_path / "access"
    access.write_text(
        token_line("read,steer,measure,override", "secret", "pod-a engine:pod-a-*,spare")
    )
    metadata = (("authorization", "Bearer secret"),)
    async with (
        running_sidecar(tmp_path, tcp=address, access=access) as running,
        grpc.aio.insecure_channel(address) as channel,
    ):
        await running.introduce("pod-b-0")
        stub: Any = service_pb2_grpc.SpeculationServiceStub(channel)
        for name in ("pod-a-0", "spare"):
            request = service_pb2.IntroduceRequest(engine=engine_message(name))
            await with_timeout(stub.Introduce(request, metadata=metadata))
        request = service_pb2.IntroduceRequest(engine=engine_message("pod-b-1"))
        code, text = await failure(stub.Introduce(request, metadata=metadata))
        assert code is DENIED
        assert "pod-a may act on the engines pod-a-*, spare, but not on 'pod-b-1'" in text
        measure: Any = service_pb2_grpc.ProfilingServiceStub(channel).Measure(metadata=metadata)
        asking = service_pb2.MeasureRequest(engine_id="pod-b-0", drafter="mtp", gamma=1)
        await with_timeout(measure.write(asking))
        assert await with_timeout(measure.code()) is DENIED
        policy: Any = policy_pb2_grpc.PolicyServiceStub(channel)
        for scope in ({"engine_id": "pod-b-0"}, {"fleet": True}, {"target_model": "target"}):
            setting = policy.SetOverride(
                make_override_request("o", scope=scope, off=True), metadata=metadata
            )
            assert (await failure(setting))[0] is DENIED
        mine = make_override_request("mine", scope={"engine_id": "pod-a-0"}, off=True)
        await with_timeout(policy.SetOverride(mine, metadata=metadata))
        others = make_override_request("others", scope={"fleet": True}, off=True)
        await with_timeout(running.policy.SetOverride(others))
        for name, code in (("mine", OK), ("others", DENIED)):
            clearing = policy_pb2.ClearOverrideRequest(
                override_id=name, author="ann", reason="done"
            )
            call = policy.ClearOverride(clearing, metadata=metadata)
            assert await with_timeout(call.code()) is code


@asynccontextmanager
async def dialled(folder: Path, address: str, name: str) -> AsyncIterator[grpc.aio.Channel]:
    credentials = grpc.ssl_channel_credentials(
        (folder / "ca.pem").read_bytes(),
        (folder / f"{name}.key").read_bytes(),
        (folder / f"{name}.pem").read_bytes(),
    )
    target = address.replace("127.0.0.1", "localhost")
    async with grpc.aio.secure_channel(target, credentials) as channel:
        yield channel


async def test_a_client_certificate_is_a_name_and_the_name_has_rights(tmp_path: Path):
    make_authority(tmp_path, ["sidecar", "ann.example", "stranger.example"])
    address, access = free_address(), tmp_path / "access"
    access.write_text("read,override cert:ann.example ann\n")
    tls: dict[str, Any] = {
        "tls_certificate": tmp_path / "sidecar.pem",
        "tls_key": tmp_path / "sidecar.key",
        "tls_client_ca": tmp_path / "ca.pem",
    }
    async with running_sidecar(tmp_path, tcp=address, access=access, **tls):
        async with dialled(tmp_path, address, "ann.example") as channel:
            assert await CallProbe(channel).read() is OK
            assert await CallProbe(channel).override("o1") is OK
            assert await CallProbe(channel).steer() is DENIED
        async with dialled(tmp_path, address, "stranger.example") as channel:
            assert await CallProbe(channel).read() is UNKNOWN
        # Another authority's certificate does not even get a connection.
        other = tmp_path / "other"
        other.mkdir()
        make_authority(other, ["ann.example"])
        (other / "ca.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
        async with dialled(other, address, "ann.example") as channel:
            assert await CallProbe(channel).read() is grpc.StatusCode.UNAVAILABLE


async def test_operators_who_hammer_are_told_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Nothing is added while the calls come, however slow they are.
    monkeypatch.setitem(guard.LIMITS, Right.OVERRIDE, (0.0, 200.0))
    async with running_sidecar(tmp_path) as running:
        codes = set()
        for _ in range(400):
            codes.add(await CallProbe(running.operators).override("bad id"))
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_certificate": "nobody.pem", "tls_key": "sidecar.key"}, "No such file"),
        ({"access": "nobody"}, "No such file"),
    ],
)
async def test_a_start_that_would_be_less_safe_than_meant_is_refused(
    tmp_path: Path, settings: dict[str, str], text: str
):
    make_authority(tmp_path, ["sidecar"])
    paths: dict[str, Any] = {name: tmp_path / value for name, value in settings.items()}
    with pytest.raises(AccessFileError, match=text):
        async with running_sidecar(tmp_path, tcp=free_address(), **paths):
            pass


async def test_tokens_do_not_go_over_an_open_line(tmp_path: Path):
    access = tmp_path / "access"
    access.write_text(token_line("read", "x", "y"))
    settings = {
        "address": f"unix:{tmp_path}/s", "metrics_port": 0, "tcp": "0.0.0.0:0", "access": access,
    }  # fmt: skip
    with pytest.raises(StartRefusedError, match="be sent unencrypted"):
        async with Sidecar(Settings.load(settings)):
            pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("read", "line 1: RIGHTS KEY"),
        ("# fine\nwrite cert:x", "line 2: rights are read, steer, measure, install, override"),
        ("read token:secret", "line 1: the key is token-sha256:HEX"),
        ("read token-sha256:abc", "64 digits"),
        ("read cert:a b c", "line 1: RIGHTS KEY"),
        ("steer cert:a b engine:pod/7", "line 1: engine:GLOBS are"),
        ("install cert:a b engine:pod-7", "line 1: a profile applies to every engine"),
        ("read uid:1\nread cert:x\nsteer uid:1\n", "line 3: repeats the key of line 1"),
        ("read uid:1 ann\nread uid:2 ann\n", "line 2: repeats the name of line 1"),
        ("read uid:1\nread cert:x uid:1\n", "line 2: repeats the name of line 1"),
        ("read uid:01\n", "line 1: the key is"),
        ("read uid:1 \x1b[31mann\n", "line 1: only printable characters"),
        # What is left of `steer cert:engine.example x engine:pod-7`, say.
        ("read uid:1\nsteer cert:engine.example x", "the last line has no line break"),
        ("# \u2028override uid:1\nread", "line 2: RIGHTS KEY"),
        ("#" * 300_000, "larger than 256 KiB"),
    ],
)
def test_a_broken_access_list_is_refused_with_its_line_and_without_its_secrets(
    tmp_path: Path, text: str, message: str
):
    path = tmp_path / "access"
    path.write_text(text)
    with pytest.raises(AccessFileError, match=message) as error:
        AccessList(path)
    assert "secret" not in str(error.value)


def test_every_entry_is_known_by_its_whole_key_and_shown_by_its_name(tmp_path: Path):
    path, digest = tmp_path / "access", "0123456789abcdef" * 4
    path.write_text(
        "steer cert:engine-prod-a.example\nsteer cert:engine-prod-b.example engine-b\n"
        f"read token-sha256:{digest}\nread uid:1000\nread gid:1000\n"
    )
    access = AccessList(path)
    keys = {
        "cert:engine-prod-a.example": "cert:engine-prod-a.example",
        "cert:engine-prod-b.example": "engine-b",
        f"token-sha256:{digest}": "token-sha256:0123456789ab",
        "uid:1000": "uid:1000",
        "gid:1000": "gid:1000",
    }
    for key, name in keys.items():
        entry = access.find(key)
        assert entry is not None
        assert (entry.access_key, entry.name) == (key, name)


def changed(access: AccessList, path: Path, text: str) -> None:
    """The list after as many looks as a change takes."""
    path.write_text(text)
    access.reload_if_changed()
    access.reload_if_changed()


def test_a_change_counts_when_two_looks_agree(tmp_path: Path):
    path = tmp_path / "access"
    path.write_text("read uid:1\n")
    access = AccessList(path)
    for number in range(2, 6):
        path.write_text(f"read uid:{number}\n")
        access.reload_if_changed()
        assert access.find("uid:1") is not None
        assert access.version == 0
    access.reload_if_changed()
    assert access.find("uid:1") is None
    assert access.find("uid:5") is not None
    assert access.version == 1


@pytest.mark.parametrize("left", ["", "# no users yet\n", "read cert:x\n"])
def test_a_list_that_loses_its_users_does_not_open_the_operators_socket(tmp_path: Path, left: str):
    path = tmp_path / "access"
    path.write_text("read uid:1\n")
    access = AccessList(path)
    changed(access, path, left)
    assert access.find("uid:1") is None
    assert access.governs_operators
    changed(access, path, "read uid:2\n")
    assert access.governs_operators


@pytest.mark.parametrize(("text", "governs"), [("read cert:x\n", False), ("", True), ("#\n", True)])
def test_the_start_decides_whether_the_list_governs_the_operators_socket(
    tmp_path: Path, text: str, governs: bool
):
    path = tmp_path / "access"
    path.write_text(text)
    access = AccessList(path)
    assert access.governs_operators is governs
    changed(access, path, "read cert:y\n")
    assert access.governs_operators is governs
    # Users who are named later do close it: no other user may get in.
    changed(access, path, "read uid:1\n")
    assert access.governs_operators


def test_what_refuses_a_list_at_the_start_refuses_it_at_a_change(tmp_path: Path):
    settings = Settings.load({"tcp": "pod.example:1", "address": f"unix:{tmp_path}/s"})
    path, check = tmp_path / "access", partial(tcp.require_no_unencrypted_token, settings)
    token = token_line("read", "x", "y")
    path.write_text(token)
    with pytest.raises(StartRefusedError, match="be sent unencrypted"):
        AccessList(path, check)
    path.write_text("read uid:1\n")
    access = AccessList(path, check)
    for bad in (
        token,
        "read uid:2\nread uid:2\n",
        "read uid:2\n\xff",
        "write uid:2\n",
        "read uid:2",
    ):
        changed(access, path, bad)
        assert access.find("uid:1") is not None
        assert access.version == 0
    path.unlink()
    access.reload_if_changed()
    access.reload_if_changed()
    assert access.find("uid:1") is not None


def test_what_each_call_needs():
    prefix = "/speculation.v1."
    assert required_right(prefix + "PolicyService/SetOverride") is Right.OVERRIDE
    assert required_right(prefix + "PolicyService/ClearOverride") is Right.OVERRIDE
    assert required_right(prefix + "PolicyService/QueryAudit") is Right.READ
    assert required_right(prefix + "InspectionService/Explain") is Right.READ
    assert required_right(prefix + "SpeculationService/Steer") is Right.STEER
    assert required_right(prefix + "ProfilingService/Measure") is Right.MEASURE
    assert required_right(prefix + "ProfilingService/InstallProfile") is Right.INSTALL
    assert required_right(prefix + "ProfilingService/PushProfile") is Right.INSTALL
    assert required_right(prefix + "ProfilingService/GetProfile") is Right.READ
    assert required_right(prefix + "TrainingService/Attend") is Right.STEER
    assert required_right("/grpc.health.v1.Health/Check") is Right.NONE
    assert required_right("/anything/Else") is Right.READ


async def test_the_unix_socket_is_as_open_as_its_mode(tmp_path: Path):
    async with running_sidecar(tmp_path):
        assert (tmp_path / "controller.sock").stat().st_mode & 0o007 == 0
    await wait_until(lambda: not (tmp_path / "controller.sock").exists())
