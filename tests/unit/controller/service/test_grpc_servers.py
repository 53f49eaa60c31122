import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from controller.service.net.errors import StartRefusedError
from controller.service.server import Sidecar
from controller.settings.settings import Settings
from lab.harness.ports import free_port
from tests.support.service_harness import failure, serving, soon


def servers(channel: Any) -> Any:
    stub = channelz_pb2_grpc.ChannelzStub(channel)
    return stub.GetServers(channelz_pb2.GetServersRequest())


async def test_channelz_is_off_by_default(tmp_path: Path):
    async with serving(tmp_path) as running:
        assert (await failure(servers(running.channel)))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_channelz_is_served_on_the_unix_sockets_only(tmp_path: Path):
    tcp = f"127.0.0.1:{free_port()}"
    async with (
        serving(tmp_path, channelz=True, tcp=tcp) as running,
        grpc.aio.insecure_channel(tcp) as by_tcp,
    ):
        await running.introduce()
        for channel in (running.channel, running.operators):
            # Of the whole process: other tests' servers may be among them.
            found = (await soon(servers(channel))).server
            assert max(server.data.calls_started for server in found) >= 1
        assert (await failure(servers(by_tcp)))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_missing_package_refuses_the_start_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "grpc_channelz.v1", None)
    settings = Settings.load(
        {"address": f"unix:{tmp_path}/controller.sock", "metrics_port": 0, "channelz": True}
    )
    with pytest.raises(StartRefusedError, match=r"speculation-controller\[channelz\]"):
        await Sidecar(settings).start()
    assert not (tmp_path / "controller.sock").exists()
