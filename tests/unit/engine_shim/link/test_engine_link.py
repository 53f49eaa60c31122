"""The engine's end on a real socket pair; the test holds the agent's end."""

import contextlib
import errno
import socket
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.errors import LinkStartError
from engine_shim.link.messages import (
    MAX_PACKET_BYTES,
    MAX_REPORT_BYTES,
    REPORT,
    ArrivedPlan,
    SidecarState,
    encode_plan,
    encode_state,
    read_request,
)
from engine_shim.link.plan_follower import MAX_ROWS, Source
from engine_shim.link.settings import LinkSettings
from speculation.v1.engine_pb2 import EngineSpec, StepReport
from speculation.v1.plan_pb2 import Plan, Probe
from tests.support import link_messages
from tests.support.link_messages import engine_spec
from tests.support.step_reports import read_report, send, send_plan, step_report
from tests.unit.engine_shim.link.in_process_agents import linked, report


def plan(
    epoch: int,
    gamma: int,
    *,
    session: int = 1,
    probe: Probe | None = None,
    age_seconds: int = 0,
) -> bytes:
    plan_message = link_messages.plan(epoch, gamma, lease_ms=600_000, probe=probe)
    plan_message.session = session
    arrival_ns = time.monotonic_ns() - age_seconds * 10**9
    return encode_plan(ArrivedPlan(plan_message, arrival_ns))


def received(agent: socket.socket) -> list[StepReport | int]:
    """Reports, and between them how many were dropped."""
    received_items: list[StepReport | int] = []
    with contextlib.suppress(BlockingIOError):
        while data := agent.recv(4096):
            is_report = data[:1] == REPORT
            received_items.append(
                read_report(data) if is_report else read_request(data).dropped_reports
            )
    return received_items


def steps_and_drops(agent: socket.socket) -> list[int]:
    """Steps of reports, and how many were dropped between them as a negative number."""
    return [-one if isinstance(one, int) else one.step for one in received(agent)]


def test_the_newest_of_several_plans_is_used():
    with linked() as (link, _, agent):
        assert link.choose(4).source is Source.SAFE_DEFAULT
        for epoch, gamma in [(1, 5), (2, 0), (3, 3)]:
            agent.send(plan(epoch, gamma))
        choice = link.choose(4)
        assert (choice.epoch, choice.gamma, choice.source) == (3, 3, Source.PLAN)
        assert link.status().plans_taken == 1


def test_no_receive_fails_on_the_way_to_a_plan():
    """An exception costs more than asking whether there is something to receive."""
    raised: list[object] = []

    def see(_: object, event: str, what: object) -> None:
        if event == "c_exception":
            raised.append(what)

    with linked() as (link, _, agent):
        for epoch in (1, 2):
            agent.send(plan(epoch, 3))
        sys.setprofile(see)
        try:
            epochs = [link.choose(4).epoch for _ in range(2)]
        finally:
            sys.setprofile(None)
    assert epochs == [2, 2]
    assert raised == []


def test_the_plan_in_use_again_does_not_hide_a_newer_one():
    with linked() as (link, _, agent):
        agent.send(plan(1, 3))
        assert link.choose(4).gamma == 3
        # The monotonic clock begins with the machine, which may have been started just now.
        for again in (plan(2, 5, age_seconds=30), plan(1, 3)):
            agent.send(again)
        assert link.choose(4).gamma == 5
        # By itself it is taken: its lease begins again.
        before = link.status().lease_seconds_left
        agent.send(plan(2, 5))
        assert link.choose(4).gamma == 5
        assert link.status().plans_taken == 3
        assert link.status().lease_seconds_left > before


def test_an_older_plan_and_one_for_another_engine_are_refused_and_counted():
    with linked() as (link, _, agent):
        agent.send(plan(7, 3))
        link.choose(4)
        agent.send(plan(6, 5))
        assert link.choose(4).epoch == 7
        agent.send(plan(8, 2))
        assert link.choose(4).epoch == 7
        assert link.status().packets_refused == 2


def test_a_report_arrives_whole_with_what_it_was_given():
    report = step_report(7, (0, 1, 1, 2), plan_epoch=5, probe_id=6, plan_session=99)
    report.flags.first_use = True
    with linked() as (link, _, agent):
        assert send(link, report)
        assert received(agent) == [report]


def test_a_report_has_nothing_of_the_one_before_it():
    with linked() as (link, _, agent):
        assert send(link, step_report(1, probe_id=6))
        assert link.report(lambda report: setattr(report, "step", 2))
        assert received(agent)[1] == StepReport(step=2)


def test_a_full_socket_drops_reports_counts_them_and_says_so_with_the_next():
    with linked() as (link, _, agent):
        step = 1
        while report(link, step):
            step += 1
            assert step < 100_000
        for _ in range(5):
            assert not report(link, step)
        before = received(agent)
        assert len(before) == step - 1
        assert report(link, step + 6)
        assert report(link, step + 7)
        assert steps_and_drops(agent) == [-6, step + 6, step + 7]
        status = link.status()
        assert (status.reports_sent, status.reports_dropped) == (step + 1, 6)
        assert status.agent_connected


def test_a_dead_agent_is_flagged_and_its_successor_taken_up():
    with linked() as (link, agents, agent):
        agent.send(plan(1, 3))
        assert link.choose(4).gamma == 3
        agent.close()
        assert link.choose(4).gamma == 3
        assert not link.status().agent_connected
        assert link.status().sidecar is SidecarState.UNKNOWN
        assert not report(link, 1)
        assert not report(link, 2)
        successor = agents.connect()
        assert report(link, 3)
        assert steps_and_drops(successor) == [-2, 3]
        successor.send(plan(1, 5, session=2))
        assert link.choose(4)[:2] == (0, 5)


def test_an_agent_that_dies_with_unread_reports_is_noticed_by_the_report():
    with linked() as (link, _, agent):
        assert report(link, 1)
        agent.close()
        assert not report(link, 2)
        assert not link.status().agent_connected


def test_a_plan_sent_before_the_agent_closed_is_still_taken():
    with linked() as (link, _, agent):
        agent.send(plan(1, 3))
        agent.close()
        assert link.choose(4).source is Source.PLAN


def test_the_sidecars_state_is_passed_on():
    with linked() as (link, _, agent):
        assert link.status().sidecar is SidecarState.UNKNOWN
        agent.send(encode_state(SidecarState.REFUSED, 3, "no drafter is listed"))
        link.poll()
        assert link.status().sidecar is SidecarState.REFUSED
        assert link.status().sidecar_detail == "no drafter is listed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1),
        ("batch_size", 4.5),
        ("batch_size", 2**32),
        ("kv_tokens", 2**64),
        ("gamma", -1),
        ("gamma", None),
        ("step_seconds", "0.01"),
        ("drafter", 3),
        ("drafter", "\ud800"),
        ("drafter", "x" * MAX_REPORT_BYTES),
    ],
)
def test_a_report_that_fits_no_message_is_counted_never_raised(name: str, value: object):
    with linked() as (link, _, agent):
        assert not link.report(lambda report: setattr(report, name, value))
        assert not link.report(lambda report: report.accepted_counts.extend([1, -1]))
        assert link.status().reports_invalid == 2
        assert received(agent) == []
        assert report(link, 2)


@settings(max_examples=200)
@given(st.lists(st.binary(min_size=1, max_size=60), max_size=6))
def test_whatever_bytes_come_the_engine_goes_on(garbage):
    with linked() as (link, _, agent):
        agent.send(plan(1, 3))
        for data in garbage:
            agent.send(data)
        for data in garbage:
            agent.send(plan(1, 3)[:10] + data)
        assert link.choose(4).epoch == 1
        agent.send(plan(2, 5))
        assert link.choose(4).epoch == 2


def test_a_broken_plan_after_a_good_one_leaves_the_good_one_in_use():
    with linked() as (link, _, agent):
        agent.send(plan(1, 3))
        link.choose(4)
        agent.send(plan(2, 5)[:-1])
        assert link.choose(4).epoch == 1
        assert link.status().packets_refused == 1


def test_the_largest_plan_is_taken():
    largest = Plan(epoch=1, lease_ms=600_000, session=1)
    for size in range(1, MAX_ROWS + 1):
        largest.rows.add(max_batch_size=size, drafter="eagle3", gamma=3)
    with linked() as (link, _, agent):
        send_plan(agent, largest)
        assert link.choose(400).gamma == 3


def test_an_oversized_packet_is_refused():
    with linked() as (link, _, agent):
        agent.send(plan(1, 3) + bytes(MAX_PACKET_BYTES))
        assert link.choose(4).source is Source.SAFE_DEFAULT
        assert link.status().packets_refused == 1


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.EMSGSIZE, errno.ENOMEM])
def test_an_error_of_the_moment_drops_the_report_and_keeps_the_agent(number):
    class Failing:
        def send(self, *_: object) -> int:
            raise OSError(number, "now")

        def recv_into(self, *_: object) -> int:
            raise OSError(number, "now")

        def close(self) -> None:
            pass

    with linked() as (link, _, agent):
        link.poll()
        agent.send(plan(1, 3))
        real, link._socket = link._socket, Failing()  # type: ignore[assignment]
        assert not report(link, 1)
        assert link.choose(4).source is Source.SAFE_DEFAULT
        assert link.status().agent_connected
        link._socket = real
        assert report(link, 2)
        assert link.choose(4).source is Source.PLAN


def test_after_close_reports_are_dropped_and_choices_go_on():
    with linked() as (link, agents, agent):
        agent.send(plan(1, 3))
        link.choose(4)
        link.close()
        link.close()
        agents.connect()
        assert not report(link, 1)
        assert link.choose(4).gamma == 3
        assert not link.status().agent_connected


def test_probes_are_counted_by_the_steps_that_choose():
    with linked() as (link, _, agent):
        agent.send(plan(1, 1, probe=Probe(probe_id=9, drafter="eagle3", gamma=5, steps=2)))
        assert [link.choose(4).probe_id for _ in range(3)] == [9, 9, 0]


@pytest.mark.parametrize(
    ("hello", "changes", "startup_gamma", "message"),
    [
        (engine_spec(), {"sidecar": ""}, 3, "SPECULATION_SIDECAR is not set"),
        (engine_spec(), {}, None, "set SPECULATION_SAFE_GAMMA"),
        (engine_spec(), {}, 4, "safe draft length 4 is not among those of drafter 'eagle3'"),
        (engine_spec(), {"safe_gamma": 6}, 3, "safe draft length 6"),
        (EngineSpec(engine_id="e"), {}, 3, "0 drafters"),
        (engine_spec("x" * MAX_PACKET_BYTES), {}, 3, "cannot be sent"),
    ],
)
def test_it_refuses_to_start_on_what_cannot_work(hello, changes, startup_gamma, message):
    settings = LinkSettings(**{"sidecar": "unix:/nowhere.sock", **changes})
    with pytest.raises(LinkStartError, match=message):
        EngineLink.start(hello, settings, startup_gamma)


def test_it_refuses_to_start_when_no_agent_can_be_run(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LinkStartError, match="the agent cannot be started"):
        EngineLink.start(engine_spec(), LinkSettings(sidecar="unix:/nowhere.sock"), 3)
