"""Files, variables and stored texts that a sidecar and its commands read."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from google.protobuf.message import DecodeError
from typer.testing import CliRunner

from controller.cli import app
from controller.core.acceptance import warm_start
from controller.core.acceptance.warm_start import AcceptanceSnapshot
from controller.core.clock import VirtualClock
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import DrafterSpec, EngineSpec
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.training import selective_training
from controller.core.training.selective_training import (
    RoundRecord,
    SelectiveTraining,
    TrainingResult,
    TrainingSettings,
    TrainingState,
    Trial,
)
from controller.profiling.profile_file import PartialCell, PartialMeasurement, load_partial
from controller.recording.recording import find_recording
from controller.recording.replay import replay
from controller.recording.segments import MAGIC, pack_frame, read_blocks
from controller.recording.window import Window
from controller.service.net.access import AccessList
from controller.service.state.profile_registry import ProfileRegistry
from controller.settings.policy_file import read_policy
from controller.settings.settings import Settings
from controller.wire.explanations import explain
from speculation.v1 import record_pb2
from tests.support import recorded_events
from tests.support.service_harness import make_profile
from tools.fuzz.mutation import mutate_bytes, mutate_json, mutate_message
from tools.fuzz.target import environment, parse_variables, refusing, refusing_file

_ENGINE = EngineSpec(
    "engine-0",
    make_profile().fingerprint,
    (DrafterSpec("mtp", DrafterKind.MTP, (0, 1, 2, 3)),),
    16,
)


def _profile_seeds() -> Sequence[bytes]:
    text = make_profile().to_json()
    return [
        text.encode(),
        text.replace('"seconds_per_kv_token": 0.0', '"seconds_per_kv_token": 1e-7').encode(),
    ]


def _read_profile(path: Path) -> None:
    """Read, and used: what is taken for a profile gives costs that are numbers."""
    profile_registry = ProfileRegistry()
    profile_registry.load([path])
    profile = profile_registry.find(_ENGINE)
    if profile is None:
        return
    core = EngineController(_ENGINE, PlannerSettings(), profile, VirtualClock())
    core.next_plan()
    for arm in explain(core, 4).arms:
        assert 0 < arm.step_seconds < math.inf, arm
        assert math.isfinite(arm.tokens_per_second), arm
    assert Profile.from_json(profile.to_json()) == profile


def _partial_seeds() -> Sequence[bytes]:
    profile = make_profile()
    cell = PartialCell("mtp", 2, 4, "grid", (0.01, 0.011), (4096, 4100), (1, 2))
    partial = {
        "format": "speculation-profile-partial/1",
        "started_at": "2030-01-01T00:00:00Z",
        "fingerprint": asdict(profile.fingerprint),
        "drafters": [asdict(drafter) for drafter in profile.drafters],
        "finished": ["mtp 2"],
        "cells": [asdict(cell)],
    }
    return [json.dumps(partial).encode()]


def _read_partial(path: Path) -> None:
    partial = load_partial(path)
    assert isinstance(partial, PartialMeasurement)
    partial.cells_by_key()
    partial.unusable_reason(_ENGINE, partial.started_at)


_SETTINGS = """\
# A sidecar of a fleet.
address: unix:/run/speculation/controller.sock
tcp: 127.0.0.1:9400
metrics_port: 9464
profiles: [profiles/a.json, "profiles/b"]
redis_url: redis://redis:6379/0
ready_with: profile
max_engines: 64
session_idle_seconds: 60.5
warm_start: false
otlp_endpoint: http://collector:4317
planner:
  probe_share: 0.02
  policy: goodput
training:
  threshold: 3
"""
_VARIABLES = """\
ADDRESS=unix:/run/speculation/controller.sock
PROFILES=/a.json:/b
METRICS_PORT=9464
MAX_ENGINES=64
WARM_START=false
PLANNER__PROBE_SHARE=0.02
TRAINING__THRESHOLD=3
OTLP_TRACE_RATIO=0.5
REDIS_URL=redis://redis:6379/0
"""
_FLAGS = """\
--address=unix:/run/speculation/controller.sock
--tcp=127.0.0.1:9400
--metrics-port=0
--profile=profiles/a.json
--log-level=debug
--state-directory=/var/lib/speculation
"""


def _read_settings(path: Path) -> None:
    with environment("CONTROLLER_", {}):
        Settings.load(config=path)


def _read_variables(data: bytes) -> None:
    with environment("CONTROLLER_", parse_variables(data, "CONTROLLER_")):
        Settings.load()


def _read_flags(data: bytes) -> None:
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    with environment("CONTROLLER_", {}):
        completed = CliRunner().invoke(app, ["config", "--check", *lines])
    if completed.exception is not None and not isinstance(completed.exception, SystemExit):
        raise completed.exception
    if completed.exit_code:
        raise UsageError


class UsageError(Exception):
    """A command line that is refused."""


_ACCESS = f"""\
# operators
read,steer,override token-sha256:{"a" * 64} ann
read cert:spiffe://pod/engine
override uid:1000 bob
steer gid:2000
"""
_POLICY = """\
policies:
  - name: chat
    model: org/model
    reason: measured in May
    schedule: [{batch: 1-8, gamma: 5}, {batch: 9-, gamma: 3, drafter: eagle3}]
  - {name: bounds, fleet: true, reason: memory, at_least: 1, at_most: 5, batch: -16}
"""


@lru_cache(maxsize=1)
def _recording() -> bytes:
    """A short one of an engine that can do everything."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        recorded_events.record(directory, steps=6)
        return recorded_events.segments(directory)[0].read_bytes()


def _segment_seeds() -> Sequence[bytes]:
    return [_recording(), MAGIC]


def _block_seeds() -> Sequence[bytes]:
    """The blocks of a recording, plain: a mutated record has a right checksum."""
    return [block.SerializeToString() for _, block in read_blocks(_recording())]


def _replay(path: Path) -> None:
    window = Window()
    replay(find_recording(path), [window])


def _read_blocks(path: Path) -> None:
    try:
        block = record_pb2.Block.FromString(path.read_bytes())
    except DecodeError:
        return
    segment = path.with_name("engine-0@00000001.record")
    segment.write_bytes(MAGIC + pack_frame(block.records))
    _replay(segment)


def _training_seeds() -> Sequence[bytes]:
    result = TrainingResult(1, 1, 0.4, 0.6, 0.3, "")
    state = TrainingState(
        measured=9, short=0.5, long=0.4, round=1, version=1, trial=Trial(0.4, 3, 1.2),
        history=(RoundRecord(result, "deployed"),),
    )  # fmt: skip
    return [selective_training.to_json(state).encode()]


def _read_training(data: bytes) -> None:
    """Read, and gone on from."""
    state = selective_training.from_json(data.decode("utf-8", "replace"))
    training = SelectiveTraining("mtp", TrainingSettings())
    training.state = state
    training.is_trainer_connected = True
    training.record_stored_signals(10_000)
    selective_training.from_json(selective_training.to_json(training.state))


def _snapshot_seeds() -> Sequence[bytes]:
    snapshot = AcceptanceSnapshot("mtp", "", (0.9, 0.8, 0.7), (100.0, 90.0, 70.0))
    return [warm_start.to_json([snapshot, replace(snapshot, label="chat")]).encode()]


def _read_snapshots(data: bytes) -> None:
    """Read, pooled, and begun from."""
    snapshots = warm_start.pool_snapshots(
        (snapshot, 1.0) for snapshot in warm_start.from_json(data.decode("utf-8", "replace"))
    )
    core = EngineController(_ENGINE, PlannerSettings(), None, VirtualClock())
    core.warm_start_from(snapshots, "a fuzzer")
    core.next_plan()
    for arm in explain(core, 4).arms:
        assert 0 <= arm.expected_accepted <= arm.arm.gamma, arm


TARGETS = (
    refusing_file("profile", _profile_seeds, _read_profile, "profile.json", mutate_json),
    refusing_file("profile.partial", _partial_seeds, _read_partial, "a.partial.json", mutate_json),
    refusing_file("settings.file", _SETTINGS, _read_settings, "controller.yaml"),
    refusing("settings.environment", _VARIABLES, _read_variables),
    refusing("settings.flags", _FLAGS, _read_flags, error=UsageError),
    refusing_file("access", _ACCESS, AccessList, "access"),
    refusing_file("policy", _POLICY, read_policy, "policy.yaml"),
    refusing_file(
        "recording.segment", _segment_seeds, _replay, "engine-0@00000001.record", mutate_bytes
    ),
    refusing_file(
        "recording.records",
        _block_seeds,
        _read_blocks,
        "block",
        mutate_message(record_pb2.Block),
    ),
    refusing("training.state", _training_seeds, _read_training, mutate_json),
    refusing("beliefs", _snapshot_seeds, _read_snapshots, mutate_json),
)
