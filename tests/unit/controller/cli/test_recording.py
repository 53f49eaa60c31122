"""`controller serve` that records: a ring that wraps, a kill, a disk that is full."""

import json
import os
import resource
import select
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from controller.recording.recording import find_recording
from controller.recording.replay import replay
from controller.recording.segments import pack_frame
from engine_shim.link.plan_follower import Source
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.eventually import eventually
from tests.support.linked_engine import linked_engine
from tests.support.recorded_events import segments
from tests.support.service_harness import engine_message
from tests.support.sidecar_process import SidecarProcess, controller
from tests.unit.controller.cli.recording_process import recording, reports_of, rich_reports, steer


def test_a_ring_that_wrapped_is_decided_the_same_again(tmp_path: Path):
    with recording(tmp_path, "--log-level", "error", megabytes=1) as sidecar:
        steer(sidecar.address, rich_reports(5500, gamma=20), 64)
        assert sidecar.stop()[0] == 0
    paths = segments(tmp_path / "record")
    assert sum(path.stat().st_size for path in paths) <= 1_000_000
    assert int(paths[0].name.split("@")[1].split(".")[0]) > 1
    verdict = replay(find_recording(tmp_path / "record"))
    assert (verdict.is_same, verdict.gaps) == (True, [])
    assert verdict.states == len(paths) - 1 > 4
    assert 0 < verdict.reports < 5500


def test_a_kill_in_mid_write_leaves_what_was_written(tmp_path: Path):
    reports = rich_reports(20_000)
    with (
        recording(tmp_path, "--log-level", "error") as sidecar,
        grpc.insecure_channel(sidecar.address) as channel,
    ):
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        engine = engine_message("odd", gammas=(0, 1, 2, 3, 5, 20), max_batch_size=32)
        token = stub.Introduce(service_pb2.IntroduceRequest(engine=engine)).session_id
        call = stub.Steer(
            service_pb2.SteerRequest(session_id=token, reports=reports[i : i + 64])
            for i in range(0, len(reports), 64)
        )

        def written() -> int:
            return sum(path.stat().st_size for path in segments(tmp_path / "record"))

        # More than one frame: the kill may come in the midst of writing the last one.
        eventually(lambda: written() > 300_000 or None, timeout_seconds=60.0)
        sidecar.process.kill()
        sidecar.process.wait()
        call.cancel()
    before = segments(tmp_path / "record")
    # A kill may come between two writes: what it leaves at worst is a frame that is not whole.
    with before[-1].open("ab") as torn:
        torn.write(pack_frame([])[:5])
    verdict = replay(find_recording(tmp_path / "record"))
    assert verdict.is_same
    assert verdict.reports > 100
    assert verdict.gaps[-1][1].endswith("it ends within a frame's header")
    with recording(tmp_path, "--log-level", "error") as sidecar:
        steer(sidecar.address, reports[:100], 50)
        assert sidecar.stop()[0] == 0
    assert segments(tmp_path / "record")[: len(before)] == before
    again = replay(find_recording(tmp_path / "record"))
    assert (again.is_same, again.reports, again.sessions) == (True, verdict.reports + 100, 2)


class Said:
    """What a sidecar says while it runs."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        assert sidecar.process.stderr is not None
        self._descriptor = sidecar.process.stderr.fileno()
        self._text = ""

    def so_far(self) -> str:
        """All of it; nothing of it is left for `stop`."""
        while select.select([self._descriptor], [], [], 0)[0]:
            chunk = os.read(self._descriptor, 65536)
            if not chunk:
                break
            self._text += chunk.decode()
        return self._text


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[SidecarProcess]:
    with recording(tmp_path) as sidecar:
        yield sidecar


def test_a_disk_that_is_full_hurts_no_steering_and_is_said_once(
    tmp_path: Path, limited: SidecarProcess
):
    """The kernel refuses to let files of this process grow, then allows it again."""
    pid, forever = limited.process.pid, resource.RLIM_INFINITY
    with linked_engine(limited.address, "pod-7") as engine:
        engine.run(50)
        directory = tmp_path / "record"
        eventually(lambda: segments(directory) or None, timeout_seconds=60.0)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, forever))
        stderr_reader = Said(limited)

        def refused() -> bool | None:
            engine.run(10)
            return "recording_failed" in stderr_reader.so_far() or None

        eventually(refused, timeout_seconds=60.0, description="the disk refuses")
        engine.run(100)
        steps = engine.step
        eventually(
            lambda: reports_of(limited.address, "pod-7") == steps or None, timeout_seconds=60.0
        )
        assert engine.link.choose(4).source is Source.PLAN
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (forever, forever))

        def again() -> bool | None:
            engine.run(5)
            return "recording_again" in stderr_reader.so_far() or None

        eventually(again, timeout_seconds=60.0, description="recording again")
        steps = engine.step
        eventually(
            lambda: reports_of(limited.address, "pod-7") == steps or None, timeout_seconds=60.0
        )
    lines = [json.loads(line) for line in stderr_reader.so_far().splitlines()]
    code, rest = limited.stop()
    assert code == 0
    events = [line["event"] for line in [*lines, *rest]]
    assert [event for event in events if event.startswith("recording_")] == [
        "recording_failed", "recording_gap", "recording_again",
    ]  # fmt: skip
    verdict = replay(find_recording(tmp_path / "record"))
    assert verdict.is_same
    assert verdict.lost > 0
    assert verdict.reports < steps


def test_a_directory_that_cannot_be_used_refuses_the_start(tmp_path: Path):
    (tmp_path / "record").write_text("")
    environment = {"CONTROLLER_RECORD_DIRECTORY": str(tmp_path / "record")}
    done = controller(
        "serve", "--address", f"unix:{tmp_path}/s", "--metrics-port", "0", environment=environment
    )
    assert done.returncode == 1
    assert "cannot be used for recordings" in done.stderr
    assert "Traceback" not in done.stderr
