"""A fork of the engine's process: it is not the engine, whatever it does."""

import json
import subprocess
import sys

from engine_shim.link.plan_follower import Source
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.service_harness import ENVIRONMENT, PATIENCE_SECONDS
from tests.system.abuse import forking_engine
from tests.system.abuse.conftest import Besieged


def test_a_fork_of_the_engine_neither_reports_nor_takes_its_plans(besieged: Besieged, channel):
    command = [sys.executable, "-m", forking_engine.__name__, besieged.sidecar.address]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        outcome = json.loads(process.stdout.readline())
        inspection = service_pb2_grpc.InspectionServiceStub(channel)
        answer = inspection.ListEngines(service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS)
        process.communicate()
    (status,) = [e for e in answer.engines if e.engine.engine_id == forking_engine.ENGINE_ID]
    assert outcome["forked"] == {"reported": 0, "sources": [Source.SAFE_DEFAULT.value]}
    assert outcome["fork_ended_with"] == 0
    # The engine's own agent, session and lease continued.
    assert outcome["agent_is_the_same"]
    assert outcome["agent_starts"] == 1
    assert outcome["lapses"] == 0
    assert outcome["steered"]
    assert status.rejected_reports == status.dropped_reports == 0
    assert status.reports <= outcome["sent"] == outcome["steps"]
