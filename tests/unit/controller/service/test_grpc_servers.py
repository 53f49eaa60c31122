import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from controller.service.net.errors import StartRefusedError
from controller.service.server import Sidecar
from controller.settings.settings import Settings
from lab.harness.processes import free_port
from tests.support.service_harness import PATIENCE_SECONDS, failure, running_sidecar
from tests.support.sidecar_process import sidecar_process


def servers(channel: Any) -> Any:
    stub = channelz_pb2_grpc.ChannelzStub(channel)
    return stub.GetServers(channelz_pb2.GetServersRequest(), timeout=PATIENCE_SECONDS)


async def test_channelz_is_off_by_default(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        assert (await failure(servers(running.channel)))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_channelz_is_served_on_the_unix_sockets_only(tmp_path: Path):
    # In a process of its own: channelz shows every server there, those of other tests as well.
    tcp = f"127.0.0.1:{free_port()}"
    with sidecar_process(tmp_path, "--channelz", "--tcp", tcp) as sidecar:
        operators = f"unix:{tmp_path}/controller-operators.sock"
        for address in (sidecar.address, operators):
            with grpc.insecure_channel(address) as channel:
                listed = servers(channel).server
            # Of the engines, of the operators, and of TCP.
            assert len(listed) == 3
            assert max(server.data.calls_started for server in listed) >= 1
        with grpc.insecure_channel(tcp) as channel, pytest.raises(grpc.RpcError) as refused:
            servers(channel)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


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
