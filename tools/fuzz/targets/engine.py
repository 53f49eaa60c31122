"""The inputs of the engine's side: packets, plans, its settings, signals, versions, its trainer."""

import json
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import torch
from google.protobuf.message import DecodeError

from engine_shim.common.errors import PluginError
from engine_shim.link.errors import LinkSettingsError, PacketError, UnusablePlanError
from engine_shim.link.messages import (
    REQUEST,
    ArrivedPlan,
    SidecarState,
    encode_plan,
    encode_state,
    read_introduction,
    read_packet,
    read_request,
    table_digest,
)
from engine_shim.link.plan_follower import PlanFollower, make_safe_default
from engine_shim.link.settings import LinkSettings
from engine_shim.preflight.running_engine import parse_server_info
from engine_shim.preflight.verdict import InputError
from engine_shim.sglang.api.settings import load_settings
from engine_shim.sglang.training import signals
from engine_shim.sglang.training.exchange import Channel, Message, MessageKind
from engine_shim.sglang.training.versions import VersionError, VersionOrigin, Versions
from speculation.v1 import plan_pb2
from speculation.v1.engine_pb2 import CAPABILITY_SLEEP, LostCapability
from speculation.v1.service_pb2 import IntroduceRequest, SteerRequest
from tests.support.link_messages import GAMMAS, engine_spec
from tests.support.link_messages import plan as plan_message
from tests.support.training_rounds import make_student, make_target
from tools.fuzz.mutation import mutate_bytes, mutate_json, mutate_message
from tools.fuzz.target import (
    Target,
    environment,
    file_reader,
    parse_variables,
    reader,
    refusing,
    refusing_stored,
)


def _from_agent() -> Sequence[bytes]:
    plan = _plan()
    return [
        encode_plan(ArrivedPlan(plan, 5, table_digest(plan))),
        encode_state(SidecarState.REFUSED, 3, "the drafter ist unbekannt: γ"),
    ]


def _read_from_agent(data: bytes) -> None:
    """A packet that was read can be written and read again."""
    plan = read_packet(data)
    if isinstance(plan, ArrivedPlan):
        assert read_packet(encode_plan(plan)) == plan
        _steer(plan)


def _from_engine() -> Sequence[bytes]:
    lost_capability = LostCapability(capability=CAPABILITY_SLEEP, reason="it failed")
    return [
        IntroduceRequest(engine=engine_spec()).SerializeToString(),
        REQUEST + SteerRequest(dropped_reports=3, lost=[lost_capability]).SerializeToString(),
    ]


def _read_from_engine(data: bytes) -> None:
    """Reads it as the first packet, and as a later one, which must hold no report."""
    with suppress(PacketError):
        read_introduction(data)
    assert not read_request(data).reports


def _steer(arrived: ArrivedPlan) -> None:
    """Checks that the plan yields only choices that the engine can run."""
    steering = PlanFollower(engine_spec().drafters, make_safe_default(1), 10.0)
    now = 1.0
    if not steering.accept(arrived, now):
        return
    for batch_size in (1, 4, 5, 64, 65, 1000):
        for moment in (now, now + 1, now + 1e9):
            choice = steering.choose(batch_size, moment)
            assert (choice.drafter_index, choice.gamma in GAMMAS) == (0, True)
            assert not (choice.asleep and choice.gamma)
        steering.update_stride(now)
        steering.collects_signals(now)


def _plan() -> plan_pb2.Plan:
    probe = plan_pb2.Probe(probe_id=3, drafter="eagle3", gamma=5, steps=4)
    plan = plan_message(4, 3, probe=probe)
    plan.regime.mode, plan.regime.stride = plan_pb2.REGIME_MODE_ONLINE, 10
    plan.rows.add(max_batch_size=200, drafter="eagle3", gamma=0, drafter_asleep=True)
    return plan


def _plans() -> Sequence[bytes]:
    return [_plan().SerializeToString(), plan_message(1, 2).SerializeToString()]


def _read_plan(data: bytes) -> None:
    """Reads a plan from the sidecar as the engine does."""
    try:
        message = plan_pb2.Plan.FromString(data)
    except DecodeError as error:  # gRPC refuses it
        raise PacketError(str(error)) from error
    PlanFollower(engine_spec().drafters, make_safe_default(1), 10.0).check(ArrivedPlan(message, 5))
    _steer(ArrivedPlan(message, 5))


_LINK = """\
SIDECAR=unix:/run/speculation/controller.sock
GAMMAS=0,1,2,3,5
GRACE_SECONDS=5
SAFE_GAMMA=1
REPORT_BUFFER=64
"""
_PLUGIN = """\
SIDECAR=127.0.0.1:9400
GAMMAS=0,1,2,3,5
GRAPH_LIMITS=5:16,3:32
ONLINE_UPDATES=true
ONLINE_LEARNING_RATE=0.001
"""


def _read_link(data: bytes) -> None:
    with environment("SPECULATION_", parse_variables(data, "SPECULATION_")):
        LinkSettings.load()


def _read_plugin(data: bytes) -> None:
    with environment("SPECULATION_", parse_variables(data, "SPECULATION_")):
        load_settings()


_HEADER = struct.Struct("<Q")


def mutate_safetensors(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """The header as JSON, or the bytes."""
    if rng.random() < 0.5 or len(data) < _HEADER.size:
        return mutate_bytes(rng, data, seeds)
    (size,) = _HEADER.unpack_from(data)
    header, payload = data[_HEADER.size : _HEADER.size + size], data[_HEADER.size + size :]
    header = mutate_json(rng, header, [header])
    return _HEADER.pack(len(header)) + header + payload


def _signal() -> Sequence[bytes]:
    torch.manual_seed(0)
    signal = signals.Signal(
        tokens=torch.arange(6),
        features=torch.randn(6, 12).to(torch.bfloat16),
        top_tokens=torch.arange(16, dtype=torch.int32).view(4, 4),
        top_logs=-torch.rand(4, 4),
        start=40,
        accepted=3,
        tried=5,
        context=2,
    )
    return [signal.encode()]


def _read_signal(path: Path) -> None:
    """Checks types, shapes and values of a signal that was read."""
    signal = signals.load_signal(path)
    assert signal.tokens.dtype is torch.int64
    assert signal.features.dtype is torch.bfloat16
    assert signal.top_tokens.dtype is torch.int32
    assert signal.top_logs.dtype is torch.float32
    assert signal.tokens.dim() == 1
    assert signal.features.dim() == signal.top_tokens.dim() == 2
    assert torch.isfinite(signal.features.float()).all()
    assert not torch.isnan(signal.top_logs).any()
    assert int(signal.tokens.min()) >= 0


_VERSION_FACTS = VersionOrigin(0, 0.3, 0.6, 0.4, 50, 12.5)


def _versions(folder: Path) -> Callable[[], None]:
    """Stores a base and a version of it; returns the reader of both."""
    student = make_student(make_target())
    parameters = {name: part.detach() for name, part in student.named_parameters()}
    versions = Versions(folder)
    versions.adopt_base(student.shape, parameters, student.borrowed)
    versions.publish(parameters, _VERSION_FACTS)
    like_parameters = dict(versions.load_student(0).named_parameters())

    def read() -> None:
        versions.read_origin(1)
        for part in versions.load_parameters(1, like_parameters).values():
            assert torch.isfinite(part).all()
        versions.load_student(1)

    return read


def _messages() -> Sequence[bytes]:
    return [
        Message(MessageKind.LEARN, requests=3, gamma=4).encode(),
        Message(MessageKind.LEARNT, loss=0.5, seconds=0.02).encode(),
        Message(MessageKind.REFUSED, text="the loss is not a number").encode(),
    ]


def _read_message(data: bytes) -> None:
    """An engine's end: what comes is a message, or the trainer is gone."""
    engine_end, trainer_end = Channel.make_pair()
    with trainer_end:
        trainer_end.send(data)
        channel = Channel(engine_end)
        try:
            message = channel.receive(wait=False)
        finally:
            channel.close()
    assert data == b"" or message is not None


def _server_info() -> Sequence[bytes]:
    command = "python -m sglang.launch_server --model-path model --tp-size 2 --dtype half"
    server_info = {
        "launch_command": command,
        "version": "0.5.23",
        "internal_states": [{"a": [1.5]}],
    }
    return [json.dumps(server_info).encode()]


def _read_server_info(data: bytes) -> None:
    """The flags taken over are plain words, and none of them names a file to load."""
    flags = parse_server_info(data, "http://engine:30000").flags
    assert all(word.isascii() and word.isprintable() for word in flags)
    assert not any("path" in word or "/" in word for word in flags)


TARGETS = (
    refusing("link.packet", _from_agent, _read_from_agent, mutate_bytes, PacketError),
    refusing("link.request", _from_engine, _read_from_engine, mutate_bytes, PacketError),
    Target(
        "link.plan",
        _plans,
        mutate_message(plan_pb2.Plan),
        reader(_read_plan),
        (PacketError, UnusablePlanError),
    ),
    refusing("link.settings", _LINK, _read_link, error=LinkSettingsError),
    refusing("plugin.settings", _PLUGIN, _read_plugin, error=PluginError),
    Target(
        "training.signal",
        _signal,
        mutate_safetensors,
        file_reader(_read_signal, "1.safetensors"),
        (signals.SignalError,),
    ),
    refusing_stored(
        "training.base", "base.safetensors", _versions, mutate_safetensors, VersionError
    ),
    refusing_stored(
        "training.version", "00000001.safetensors", _versions, mutate_safetensors, VersionError
    ),
    refusing("training.exchange", _messages, _read_message, mutate_bytes, EOFError),
    refusing("would-steer.server_info", _server_info, _read_server_info, mutate_json, InputError),
)
