"""What an engine has lost reaches the sidecar, whatever is dropped or restarted on the way."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.errors import PacketError
from engine_shim.link.lost_capabilities import (
    MAX_LOST_CAPABILITY_BYTES,
    MAX_REASON_CHARACTERS,
    LostCapabilities,
    error_reason,
    make_lost_capability,
)
from engine_shim.link.messages import REPORT, SidecarState, read_request
from engine_shim.link.settings import LinkSettings
from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1.engine_pb2 import (
    CAPABILITY_DRAFTER,
    CAPABILITY_SLEEP,
    EngineSpec,
    LostCapability,
)
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.unit.engine_shim.link.in_process_agents import linked, report

DRAFTER = make_lost_capability(CAPABILITY_DRAFTER, "MemoryError: no room", "eagle3")
SLEEP = make_lost_capability(CAPABILITY_SLEEP, "MemoryError: no room")
StartLink = Callable[[EngineSpec], EngineLink]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    with ScriptedSidecar(f"unix:{tmp_path}/s.sock", plans_once=True) as running:
        yield running


@pytest.fixture
def start_link(sidecar: ScriptedSidecar) -> Iterator[StartLink]:
    links: list[EngineLink] = []

    def start(spec: EngineSpec) -> EngineLink:
        settings = LinkSettings(sidecar=sidecar.target)
        links.append(EngineLink.start(spec, settings, startup_gamma=1))
        eventually(lambda: steers(links[-1]), description="a session is open")
        return links[-1]

    yield start
    for link in links:
        link.close()


def steers(link: EngineLink) -> bool:
    link.poll()
    return link.status().sidecar is SidecarState.STEERING


def list_reported_losses(sidecar: ScriptedSidecar) -> list[list[LostCapability]]:
    """The losses that the messages of all streams report."""
    return [list(request.lost) for request in list(sidecar.requests) if request.lost]


def taken(agent: socket.socket) -> list[bytes]:
    """The packets that wait at the agent's end."""
    packets: list[bytes] = []
    while True:
        try:
            packets.append(agent.recv(4096))
        except BlockingIOError:
            return packets


def losses_in(packets: list[bytes]) -> list[LostCapability]:
    return [loss for packet in packets for loss in read_request(packet).lost]


@given(st.text(max_size=600))
def test_a_reason_is_one_printable_line_that_fits_a_packet(text: str):
    loss = make_lost_capability(CAPABILITY_DRAFTER, text, "d" * 64, list(range(64)))
    assert loss.reason.isprintable()
    assert len(loss.reason) <= MAX_REASON_CHARACTERS
    assert loss.ByteSize() <= MAX_LOST_CAPABILITY_BYTES


def test_an_error_is_named_by_its_kind():
    assert error_reason(MemoryError("no room")) == "MemoryError: no room"


def test_a_loss_waits_while_the_socket_is_full():
    with linked() as (link, _, agent):
        step = 0
        while report(link, step := step + 1):
            pass
        link.report_lost_capability(DRAFTER)
        taken(agent)
        assert report(link, step + 1)
        first = taken(agent)[0]
        assert losses_in([first]) == [DRAFTER]
        report(link, step + 2)
        assert all(packet[:1] == REPORT for packet in taken(agent))


def test_it_goes_out_between_steps_too():
    with linked() as (link, _, agent):
        while report(link, 1):
            pass
        link.report_lost_capability(DRAFTER)
        taken(agent)
        link.poll()
        assert losses_in(taken(agent)) == [DRAFTER]


def test_every_new_agent_is_told_of_all():
    with linked() as (link, agents, agent):
        link.report_lost_capability(DRAFTER)
        link.report_lost_capability(SLEEP)
        assert len(taken(agent)) == 2
        agent.close()
        report(link, 1)
        link.poll()
        successor = agents.connect()
        link.poll()
        assert losses_in(taken(successor)) == [DRAFTER, SLEEP]


def test_what_is_lost_while_there_is_no_agent_is_told_to_the_next_one():
    with linked() as (link, agents, agent):
        agent.close()
        link.poll()
        link.report_lost_capability(DRAFTER)
        successor = agents.connect()
        assert report(link, 1)
        assert losses_in(taken(successor)[:1]) == [DRAFTER]


def test_the_agent_keeps_each_loss_once_and_refuses_what_is_too_much():
    known = LostCapabilities()
    for loss in (DRAFTER, SLEEP, DRAFTER):
        known.add(loss)
    assert known.all == [DRAFTER, SLEEP]
    with pytest.raises(PacketError, match="limit 1024"):
        known.add(LostCapability(capability=CAPABILITY_SLEEP, reason="x" * 1024))
    many = [
        make_lost_capability(CAPABILITY_DRAFTER, str(number), "eagle3") for number in range(511)
    ]
    for loss in many[:510]:
        known.add(loss)
    with pytest.raises(PacketError, match="more than 512"):
        known.add(many[510])
    known.add(SLEEP)


def test_a_loss_reaches_the_open_stream_at_once(sidecar, start_link):
    link = start_link(engine_spec())
    link.report_lost_capability(DRAFTER)
    eventually(lambda: list_reported_losses(sidecar) == [[DRAFTER]])
    link.report_lost_capability(SLEEP)
    eventually(lambda: list_reported_losses(sidecar) == [[DRAFTER], [DRAFTER, SLEEP]])


def test_a_sidecar_that_comes_later_hears_of_it_in_the_introduction(sidecar, start_link):
    link = start_link(engine_spec())
    link.report_lost_capability(DRAFTER)
    eventually(lambda: list_reported_losses(sidecar))
    sidecar.stop()
    link.report_lost_capability(SLEEP)
    sidecar.start()
    eventually(lambda: len(sidecar.introductions) > 1, description="it introduces itself again")
    assert list(sidecar.introductions[-1].lost) == [DRAFTER, SLEEP]
    assert list_reported_losses(sidecar) == [[DRAFTER]]


def test_an_agent_that_comes_later_is_told_and_tells(sidecar, start_link):
    link = start_link(engine_spec())
    link.report_lost_capability(DRAFTER)
    eventually(lambda: list_reported_losses(sidecar))
    pid = link.status().agent_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    def told_again() -> bool:
        link.poll()
        return len(sidecar.introductions) > 1 and (
            bool(sidecar.introductions[-1].lost) or len(list_reported_losses(sidecar)) > 1
        )

    eventually(told_again, description="the loss is reported by the new agent")


def test_what_was_lost_before_the_link_was_is_in_the_first_introduction(sidecar, start_link):
    spec = engine_spec()
    spec.lost.append(SLEEP)
    link = start_link(spec)
    assert list(sidecar.introductions[0].lost) == [SLEEP]
    link.report_lost_capability(DRAFTER)
    eventually(lambda: list_reported_losses(sidecar) == [[DRAFTER]])
