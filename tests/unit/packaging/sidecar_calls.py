"""Run by test_packaging in small environments: does the sidecar answer its client and commands?

usage: sidecar_calls.py CONTROLLER     (the command of the environment)
"""

import json
import subprocess
import sys
import tempfile
import time

import grpc

from controller.client import Client, errors
from speculation.v1 import engine_pb2, service_pb2, service_pb2_grpc
from speculation.v1.policy_pb2 import Override, OverrideRule, Scope


def introduce(address: str) -> None:
    """Introduces an engine and reports a step of it."""
    drafter = engine_pb2.Drafter(
        name="mtp", kind=engine_pb2.DRAFTER_KIND_MTP, gammas=[0, 1, 3],
        batch_limits=[engine_pb2.BatchLimit(gamma=3, max_batch_size=8)],
    )  # fmt: skip
    engine = engine_pb2.EngineSpec(engine_id="engine-0", drafters=[drafter], max_batch_size=16)
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        opened = stub.Introduce(service_pb2.IntroduceRequest(engine=engine), timeout=60)
        report = engine_pb2.StepReport(
            step=1, batch_size=4, kv_tokens=4096, drafter="mtp", gamma=1, accepted_counts=[1, 3],
            step_seconds=0.01,
        )  # fmt: skip
        request = service_pb2.DecideRequest(session_id=opened.session_id, report=report)
        assert stub.Decide(request, timeout=60).drafter == "mtp"


def calls(client: Client) -> None:
    """One call of each kind, with messages that hold lists, options and errors."""
    rule = OverrideRule(gamma_max=3, deny_drafters=["a", "b"])
    held = client.set_override(
        Override(scope=Scope(fleet=True), rule=rule, reason="test"), require_effect=False
    ).held
    assert client.get_override(held.override.override_id).override == held.override
    rule.gamma_min = 4
    refused: list[str] = []
    try:
        client.set_override(Override(scope=Scope(fleet=True), rule=rule, reason="test"))
    except errors.InvalidRequestError as error:
        refused = [violation.field for violation in error.violations]
    assert refused == ["override.rule.gamma_min"], refused
    assert [engine.engine.engine_id for engine in client.engines()] == ["engine-0"]
    assert {arm.gamma for arm in client.explain("engine-0", 4).arms} == {0, 1, 3}
    assert client.profiles() == []
    client.clear_override(held.override.override_id, "test")
    assert [record.action for record in client.audit()] == ["clear", "set"]


def main() -> None:
    """Starts a sidecar, and calls it until it answers."""
    controller = sys.argv[1]
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/controller.sock"
        serve = [controller, "serve", "--address", address, "--metrics-port", "0"]
        with subprocess.Popen(serve, stderr=subprocess.PIPE) as process, Client(address) as client:
            try:
                for _ in range(600):
                    try:
                        client.sidecar()
                        break
                    except errors.UnavailableError:
                        assert process.poll() is None, process.communicate()
                        time.sleep(0.1)
                introduce(address)
                calls(client)
                asked = [controller, "engines", "--fleet", "-o", "json", "--address", address]
                shown = json.loads(subprocess.run(asked, check=True, capture_output=True).stdout)
                assert shown["totals"]["engines"] == 1, shown
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
