"""No process that only reaches the engines' socket becomes an operator, by whatever name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from speculation.v1 import policy_pb2, policy_pb2_grpc
from tests.support.service_harness import ENVIRONMENT, PATIENCE_SECONDS, health_stub
from tests.system.abuse.conftest import Besieged
from tests.system.abuse.impostor import NO_NAMESPACE, OVERRIDE_ID

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
STRANGER = 54_321


@contextmanager
def impostor(besieged: Besieged, seconds: float) -> "Iterator[subprocess.Popen[str]]":
    """At work for so long, as a user who may open the engines' socket and no other."""
    path = Path(besieged.sidecar.address.removeprefix("unix:"))
    os.chown(path, -1, STRANGER)
    for folder in (path.parent, *path.parent.parents):
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o011)
    command = [sys.executable, "-m", "tests.system.abuse.impostor", str(path), str(STRANGER)]
    with subprocess.Popen(
        [*command, str(seconds)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            assert process.wait() == NO_NAMESPACE
            pytest.skip("no namespaces may be made here")
        yield process


def in_force(besieged: Besieged) -> set[str]:
    with grpc.insecure_channel(besieged.sidecar.address) as channel:
        answer = policy_pb2_grpc.PolicyServiceStub(channel).ListOverrides(
            policy_pb2.ListOverridesRequest(), timeout=PATIENCE_SECONDS
        )
    return {held.override.override_id for held in answer.overrides}


def tries(process: "subprocess.Popen[str]") -> int:
    output, _ = process.communicate(timeout=6 * PATIENCE_SECONDS)
    return int(output)


def test_an_operators_name_taken_in_another_network_is_worth_nothing(besieged: Besieged):
    with grpc.insecure_channel(besieged.operators) as operator:
        stub = policy_pb2_grpc.PolicyServiceStub(operator)
        stub.ListOverrides(policy_pb2.ListOverridesRequest(), timeout=PATIENCE_SECONDS)
        with impostor(besieged, 3.0) as process:
            assert tries(process) >= 1
    assert OVERRIDE_ID not in in_force(besieged)


def test_nor_is_one_taken_while_operators_come_and_go(besieged: Besieged, scale: int):
    alone = (("grpc.use_local_subchannel_pool", 1),)
    with impostor(besieged, 8.0 * scale) as process:
        while process.poll() is None:
            with grpc.insecure_channel(besieged.operators, alone) as operator:
                request = health_pb2.HealthCheckRequest()
                health_stub(operator).Check(request, timeout=PATIENCE_SECONDS)
        assert tries(process) >= 10
    assert OVERRIDE_ID not in in_force(besieged)
