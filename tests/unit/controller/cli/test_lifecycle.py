"""A real sidecar process, and the shim's real agent beside it: settings again, and the end."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.cli.serve import _exit_code
from controller.core.errors import SpeculationError
from controller.service.net.access import AccessFileError
from controller.service.net.errors import AddressTakenError, StartRefusedError
from controller.service.net.unix_sockets import SocketTakenError
from controller.service.state.profile_registry import ProfileFileError
from controller.store.interface import StoreBrokenError, StoreUnavailableError
from controller.store.redis_client import RedisUrlError
from controller.util.exit_codes import Exit
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.messages import SidecarState
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.link.settings import LinkSettings
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.support.service_harness import PATIENCE_SECONDS, engine_message, secret_of
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process

# More than a lease, less than a last one, on a machine that is busy for a while.
LONG_SECONDS = 60.0


def lease_ms(channel: grpc.Channel, engine_id: str) -> int:
    answer = service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
        service_pb2.IntroduceRequest(
            engine=engine_message(engine_id), engine_secret=secret_of(engine_id)
        ),
        timeout=PATIENCE_SECONDS,
    )
    return answer.plan.lease_ms


def logged(sidecar: SidecarProcess, event: str) -> dict[str, Any]:
    """The next log line of that event."""
    assert sidecar.process.stderr is not None
    for line in sidecar.process.stderr:
        entry: dict[str, Any] = json.loads(line)
        if entry["event"] == event:
            return entry
    raise AssertionError(f"it ended without {event}")


def test_sighup_reads_the_file_again_and_a_bad_one_changes_nothing(tmp_path: Path):
    config = tmp_path / "controller.yaml"
    config.write_text("planner: {lease_seconds: 4}\n")
    with (
        sidecar_process(tmp_path, "--config", str(config)) as sidecar,
        grpc.insecure_channel(sidecar.address) as channel,
    ):
        assert lease_ms(channel, "a") == 4000
        config.write_text("planner: {lease_seconds: 2}\nreflection: no\n")
        sidecar.process.send_signal(signal.SIGHUP)
        assert logged(sidecar, "settings_reloaded")["changed"] == ["planner.lease_seconds"]
        assert logged(sidecar, "settings_need_restart")["settings"] == ["reflection"]
        assert lease_ms(channel, "a") == 2000
        config.write_text("planner: {lease_seconds: 1}\nplaner: 1\n")
        sidecar.process.send_signal(signal.SIGHUP)
        refused = logged(sidecar, "settings_not_reloaded")
        assert f"{config}, line 2: planer is not a setting" in refused["error"]
        assert lease_ms(channel, "a") == 2000
        sidecar.process.send_signal(signal.SIGTERM)
        logged(sidecar, "stopped")
        assert sidecar.process.wait(PATIENCE_SECONDS) == Exit.DONE


def test_a_bad_file_and_a_store_in_use_have_their_exit_codes(tmp_path: Path):
    (tmp_path / "bad.yaml").write_text("tcp: 1\ntcp: 2\n")
    state = f"{tmp_path}/controller.sock.state"
    with sidecar_process(tmp_path) as sidecar:
        for flags, code, text in (
            (("--config", f"{tmp_path}/bad.yaml"), Exit.USAGE, "line 2: tcp is set twice"),
            (("--state-directory", state), Exit.NO_STORE, "in use by another sidecar"),
        ):
            here = ("--address", f"unix:{tmp_path}/other.sock", "--metrics-port", "0")
            done = controller("serve", *here, *flags)
            assert done.returncode == code, done.stderr
            assert text in done.stderr
            assert "Traceback" not in done.stderr
        assert sidecar.stop()[0] == Exit.DONE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AccessFileError("x"), Exit.BAD_FILE),
        (ProfileFileError("x"), Exit.BAD_FILE),
        (SocketTakenError("x"), Exit.TAKEN),
        (AddressTakenError("x"), Exit.TAKEN),
        (StoreBrokenError("x"), Exit.NO_STORE),
        (StoreUnavailableError("x"), Exit.NO_STORE),
        (RedisUrlError("x"), Exit.USAGE),
        (StartRefusedError("x"), Exit.FAILED),
    ],
)
def test_what_refuses_the_start_has_its_exit_code(error: SpeculationError, code: Exit):
    assert _exit_code(error) is code


@contextmanager
def linked(sidecar: SidecarProcess) -> Iterator[EngineLink]:
    """An engine's end of the link, with a real agent, steered."""
    link = EngineLink.start(
        engine_spec(), LinkSettings(sidecar=sidecar.address, grace_seconds=0.0), startup_gamma=1
    )
    try:
        eventually(
            lambda: steered(link), timeout_seconds=LONG_SECONDS, description="steered by a plan"
        )
        with grpc.insecure_channel(sidecar.address) as channel:
            inspection = service_pb2_grpc.InspectionServiceStub(channel)
            eventually(
                lambda: (
                    inspection.ListEngines(
                        service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
                    )
                    .engines[0]
                    .steering
                ),
                timeout_seconds=LONG_SECONDS,
                description="its stream is open",
            )
        yield link
    finally:
        link.close()


def steered(link: EngineLink) -> StepChoice | None:
    choice = link.choose(4)
    return choice if choice.source is Source.PLAN else None


def away(link: EngineLink) -> bool:
    link.choose(4)
    return link.status().sidecar is SidecarState.AWAY


def test_a_stopping_sidecar_leaves_its_engines_a_last_lease_and_the_next_one_takes_over(
    tmp_path: Path,
):
    environment = {"CONTROLLER_LAST_LEASE_SECONDS": "300"}
    with sidecar_process(tmp_path, environment=environment) as sidecar, linked(sidecar) as link:
        before = link.choose(4)
        assert link.status().lease_seconds_left <= 5
        code, lines = sidecar.stop()
        assert code == Exit.DONE
        assert "drain_ran_out" not in {line["event"] for line in lines}
        eventually(lambda: away(link), timeout_seconds=LONG_SECONDS)
        # Whole minutes, whatever this machine is busy with.
        assert link.status().lease_seconds_left > 200
        held = link.choose(4)
        assert (held.source, held.gamma, held.session) == (
            Source.PLAN,
            before.gamma,
            before.session,
        )
        assert held.epoch > before.epoch
        assert "shutting down" in link.status().sidecar_detail
        with sidecar_process(tmp_path) as second:
            eventually(
                lambda: link.choose(4).session != before.session, timeout_seconds=LONG_SECONDS
            )
            assert link.choose(4).source is Source.PLAN
            assert link.status().lease_seconds_left <= 5
            assert link.status().lapses == 0
            assert second.stop()[0] == Exit.DONE


def test_without_a_last_lease_the_engine_goes_to_its_safe_default(tmp_path: Path):
    environment = {"CONTROLLER_LAST_LEASE_SECONDS": "0", "CONTROLLER_PLANNER__LEASE_SECONDS": "0.5"}
    with sidecar_process(tmp_path, environment=environment) as sidecar, linked(sidecar) as link:
        sidecar.stop()
        safe = eventually(
            lambda: choice if (choice := link.choose(4)).source is Source.SAFE_DEFAULT else None,
            timeout_seconds=LONG_SECONDS,
        )
        assert safe.gamma == 1
