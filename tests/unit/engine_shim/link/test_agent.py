"""The whole link: real agent process, real gRPC server; the test is the engine."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import grpc
import psutil
import pytest

from engine_shim.link import messages
from engine_shim.link.agent import EXIT_BAD_INTRODUCTION
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.messages import SidecarState
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.link.settings import LinkSettings
from lab.harness.scripted_sidecar import ScriptedSidecar
from speculation.v1.plan_pb2 import Probe
from speculation.v1.service_pb2 import (
    ListEnginesRequest,
    Received,
    ReportRejection,
    SteerRequest,
    SteerResponse,
)
from speculation.v1.service_pb2_grpc import InspectionServiceStub
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec, plan
from tests.support.sidecar_process import sidecar_process
from tests.support.step_reports import send, step_report

StartLink = Callable[..., EngineLink]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    with ScriptedSidecar(f"unix:{tmp_path}/s.sock", plans_once=True) as running:
        yield running


@pytest.fixture
def start_link(sidecar: ScriptedSidecar) -> Iterator[StartLink]:
    links: list[EngineLink] = []

    def start(**settings: object) -> EngineLink:
        link_settings = LinkSettings(**{"sidecar": sidecar.target, **settings})  # type: ignore[arg-type]
        links.append(EngineLink.start(engine_spec(), link_settings, startup_gamma=1))
        return links[-1]

    yield start
    for link in links:
        link.close()


def steered(link: EngineLink) -> StepChoice:
    def choose() -> StepChoice | None:
        choice = link.choose(4)
        return choice if choice.source is Source.PLAN else None

    choice = eventually(choose, description="steered by a plan")
    assert choice is not None
    return choice


def report(link: EngineLink, step: int, choice: StepChoice | None = None) -> bool:
    return send(link, step_report(step, choice=choice))


def renewing(sidecar: ScriptedSidecar, gamma: int, lease_ms: int) -> None:
    """Every message is answered with a fresh lease."""
    epochs = count(2)
    sidecar.first_plan = lambda: plan(1, gamma, lease_ms)
    sidecar.answer = lambda _: SteerResponse(plan=plan(next(epochs), gamma, lease_ms))


def test_reports_go_out_and_plans_come_in(sidecar, start_link):
    link = start_link()
    choice = steered(link)
    assert (choice.gamma, choice.epoch) == (3, 1)
    introduced = engine_spec()
    introduced.safe_gamma = 1
    assert sidecar.introductions == [introduced]
    assert report(link, 1, choice)
    [arrived] = eventually(lambda: sidecar.reports)
    assert (arrived.step, arrived.drafter, arrived.plan_epoch) == (1, "eagle3", 1)
    assert list(arrived.accepted_counts) == [1, 1, 1, 1]
    sidecar.push(plan(2, 5))
    eventually(lambda: link.choose(4).gamma == 5)
    assert link.status().sidecar is SidecarState.STEERING


def test_what_piled_up_goes_in_few_messages(sidecar, start_link):
    link = start_link(report_interval_ms=200)
    choice = steered(link)
    for step in range(1, 101):
        assert report(link, step, choice)
    eventually(lambda: len(sidecar.reports) == 100)
    assert [r.step for r in sidecar.reports] == list(range(1, 101))
    assert len(sidecar.requests) < 20


def test_reports_wait_for_a_sidecar_that_is_behind_and_go_together(sidecar, start_link):
    sidecar.messages_in_flight_max = 2
    link = start_link(report_interval_ms=0)
    choice = steered(link)

    def messages() -> list[list[int]]:
        sizes = [[r.step for r in request.reports] for request in list(sidecar.requests)]
        return [steps for steps in sizes if steps]

    for step in (1, 2):
        assert report(link, step, choice)
        eventually(lambda step=step: len(sidecar.reports) == step)  # type: ignore[misc]
    for step in range(3, 23):
        assert report(link, step, choice)
    # By the second sign of life all reports have been looked at.
    signs = len(sidecar.requests)
    acknowledgement = Received(reports=0)
    sidecar.send(SteerResponse(plan=plan(2, 3, lease_ms=400), received_so_far=acknowledgement))
    eventually(lambda: len(sidecar.requests) > signs + 1)
    assert messages() == [[1], [2]]
    sidecar.send(SteerResponse(received_so_far=Received(reports=2)))
    eventually(lambda: len(sidecar.reports) == 22)
    assert messages() == [[1], [2], list(range(3, 23))]


def test_plans_are_used_in_the_order_they_were_issued(sidecar, start_link):
    link = start_link()
    steered(link)
    for epoch in range(2, 301):
        sidecar.push(plan(epoch, epoch % 2))
    seen: list[StepChoice] = []

    def last() -> bool:
        seen.append(link.choose(4))
        return seen[-1].epoch == 300

    eventually(last)
    assert [c.epoch for c in seen] == sorted(c.epoch for c in seen)
    assert all(c.gamma == c.epoch % 2 for c in seen if c.epoch > 1)


def test_an_idle_engine_keeps_its_lease_by_signs_of_life(sidecar, start_link):
    renewing(sidecar, gamma=5, lease_ms=4000)
    link = start_link()
    eventually(lambda: link.choose(4).epoch >= 3)
    assert link.status().lapses == 0
    assert sidecar.reports == []


def test_an_idle_engines_stream_says_at_once_whose_it_is(sidecar, start_link):
    steered(start_link())  # its lease is a minute: no other sign is due
    [request] = eventually(lambda: sidecar.requests)
    assert (request.session_id, len(request.reports)) == ("session-1", 0)


def test_a_lease_shorter_than_the_one_before_is_kept_too(sidecar, start_link):
    renewing(sidecar, gamma=5, lease_ms=4000)
    sidecar.first_plan = lambda: plan(1, 3, lease_ms=60_000)
    link = start_link()
    steered(link)
    sidecar.push(plan(1, 3, lease_ms=4000))
    eventually(lambda: link.choose(4).epoch >= 3)
    assert link.status().lapses == 0


def test_a_probe_runs_once_over_renewals(sidecar, start_link):
    probe = Probe(probe_id=7, drafter="eagle3", gamma=7, steps=3)
    sidecar.first_plan = lambda: plan(1, 3, probe=probe)
    link = start_link()
    first = steered(link)
    sidecar.push(plan(2, 3, probe=probe))
    chosen = [first]

    def has_probe_ended() -> bool:
        chosen.append(link.choose(4))
        return chosen[-1].epoch == 2 and not chosen[-1].probe_id

    eventually(has_probe_ended)
    assert [c.gamma for c in chosen if c.probe_id == 7] == [7, 7, 7]
    assert chosen[-1].gamma == 3


def test_a_killed_agent_is_replaced_and_the_engine_is_steered_all_along(
    sidecar, start_link, monkeypatch
):
    link = start_link()
    before = steered(link)
    pid = link.status().agent_pid
    assert pid is not None
    with monkeypatch.context() as successor:
        # The next agent starts within moments; it is taken up once the gap has been looked at.
        successor.setattr(link._supervisor, "take_socket", lambda: None)
        os.kill(pid, signal.SIGKILL)

        def flagged() -> bool:
            assert link.choose(4).source is Source.PLAN
            return not link.status().agent_connected

        eventually(flagged)
        assert "no agent" in link.status().sidecar_detail
        assert not report(link, 1, before)
    eventually(lambda: link.choose(4).session != before.session)
    assert link.status().agent_starts == 2
    # The report ran under the old session's plan, and names it.
    assert report(link, 2, before)
    [arrived] = eventually(lambda: sidecar.reports)
    assert (arrived.step, arrived.plan_session) == (2, before.session)
    assert sum(r.dropped_reports for r in sidecar.requests) == 1


def test_without_its_sidecar_the_engine_goes_through_grace_to_the_safe_default_and_back(
    sidecar, start_link
):
    renewing(sidecar, gamma=5, lease_ms=600)
    link = start_link(grace_seconds=3)
    # Its lease may run out before the sidecar has stopped.
    seen = [steered(link)]
    sidecar.stop()

    def safe() -> bool:
        seen.append(link.choose(4))
        return seen[-1].source is Source.SAFE_DEFAULT

    eventually(safe)
    order = list(dict.fromkeys(c.source for c in seen))
    assert order == [Source.PLAN, Source.GRACE, Source.SAFE_DEFAULT]
    assert {c.gamma for c in seen if c.source is Source.GRACE} == {5}
    assert seen[-1].gamma == 1
    assert link.status().sidecar is SidecarState.AWAY
    assert link.status().agent_connected
    sidecar.start()
    assert steered(link).gamma == 5
    assert link.status().sidecar is SidecarState.STEERING
    assert len(sidecar.introductions) == 2
    assert link.status().agent_starts == 1


def test_a_sidecar_that_forgot_the_session_is_introduced_to_again(sidecar, start_link):
    link = start_link()
    before = steered(link)
    sidecar.end_streams = (grpc.StatusCode.FAILED_PRECONDITION, "unknown session")
    eventually(lambda: len(sidecar.introductions) >= 2)
    sidecar.end_streams = None
    eventually(lambda: link.choose(4).session != before.session)
    eventually(lambda: report(link, 1) and sidecar.reports)


def test_a_report_that_nobody_can_read_is_lost_alone(tmp_path, start_link):
    with sidecar_process(tmp_path) as real:
        link = start_link(sidecar=real.address)
        choice = steered(link)
        assert link._socket is not None
        assert report(link, 1, choice)
        link._socket.send(messages.REPORT + b"\xff\xff")
        assert report(link, 2, choice)

        def read_report_counts() -> tuple[int, int]:
            with grpc.insecure_channel(real.address) as channel:
                stub = InspectionServiceStub(channel)
                [engine] = stub.ListEngines(ListEnginesRequest(), timeout=60).engines
            return engine.last_report.step, engine.dropped_reports

        eventually(lambda: read_report_counts() == (2, 1), description="both others have arrived")


def test_a_sidecar_that_falls_silent_is_introduced_to_again(sidecar, start_link, capfd):
    sidecar.first_plan = lambda: plan(1, 5, lease_ms=300)
    link = start_link(grace_seconds=60)
    before = steered(link)
    assert eventually(lambda: link.choose(4).source is Source.GRACE)
    eventually(lambda: len(sidecar.introductions) >= 2)
    eventually(lambda: link.choose(4).session != before.session)
    assert "no plan for" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "[::1]")]
)
def test_a_sidecar_at_a_tcp_address_steers_too(start_link, family: socket.AddressFamily, host: str):
    with socket.create_server((host.strip("[]"), 0), family=family) as probe:
        target = f"{host}:{probe.getsockname()[1]}"
    with ScriptedSidecar(target, plans_once=True):
        assert steered(start_link(sidecar=target)).gamma == 3


def test_a_refused_introduction_is_told_to_the_engine_and_tried_again(sidecar, start_link):
    sidecar.refuse_introduction = (grpc.StatusCode.INVALID_ARGUMENT, "no gamma is listed")
    link = start_link()

    def refused() -> bool:
        link.poll()
        return link.status().sidecar is SidecarState.REFUSED

    eventually(refused)
    assert link.status().sidecar_detail == "no gamma is listed"
    assert link.choose(4).source is Source.SAFE_DEFAULT
    sidecar.refuse_introduction = None
    steered(link)


def test_a_plan_that_the_engine_cannot_run_is_refused_there(sidecar, start_link, caplog):
    link = start_link()
    steered(link)
    sidecar.push(plan(2, 6))
    eventually(lambda: link.choose(4) and link.status().packets_refused == 1)
    sidecar.push(plan(3, 5))
    eventually(lambda: link.choose(4).epoch == 3)
    assert link.status().packets_refused == 1
    assert "did not introduce gamma 6" in caplog.text


def test_rejections_are_logged_seldom(sidecar, start_link, capfd):
    def reject(request: SteerRequest) -> SteerResponse:
        rejections = [ReportRejection(step=r.step, code=3, message="no") for r in request.reports]
        return SteerResponse(rejections=rejections)

    sidecar.answer = reject
    link = start_link()
    steered(link)
    for step in range(1, 51):
        report(link, step)
    eventually(lambda: len(sidecar.reports) == 50)
    sidecar.push(plan(2, 5))
    eventually(lambda: link.choose(4).epoch == 2)
    logged = [line for line in capfd.readouterr().err.splitlines() if "report-rejected" in line]
    assert len(logged) == 1
    assert '"reason": "no"' in logged[0]


def test_while_the_sidecar_is_away_the_newest_reports_are_kept_and_the_rest_counted(
    sidecar, start_link
):
    sidecar.stop()
    link = start_link(report_buffer=16)
    report_count = 0
    for _ in range(400):
        report_count += 1
        report(link, report_count)
    sidecar.start()

    def accounted() -> bool:
        dropped = sum(r.dropped_reports for r in list(sidecar.requests))
        return bool(len(sidecar.reports) + dropped == report_count)

    steered(link)
    report_count += 1
    assert eventually(lambda: report(link, report_count))
    eventually(accounted)
    steps = [r.step for r in sidecar.reports]
    assert steps == sorted(set(steps))
    assert steps[-1] == report_count


def test_a_stopped_agent_never_blocks_the_engine(sidecar, start_link):
    link = start_link()
    choice = steered(link)
    pid = link.status().agent_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    report_count = 0
    while link.status().reports_dropped < 500:
        report_count += 1
        report(link, report_count, choice)
        assert link.choose(4).source is Source.PLAN
        assert report_count < 100_000
    assert link.status().agent_connected
    os.kill(pid, signal.SIGCONT)

    def reported() -> bool:
        nonlocal report_count
        report_count += 1
        return report(link, report_count, choice)

    eventually(reported)
    eventually(
        lambda: (
            len(sidecar.reports) + sum(r.dropped_reports for r in list(sidecar.requests))
            == report_count
        )
    )


def test_a_signal_from_the_terminal_does_not_end_the_agent(sidecar, start_link):
    link = start_link()
    steered(link)
    pid = link.status().agent_pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    sidecar.push(plan(2, 5))
    eventually(lambda: link.choose(4).epoch == 2)
    assert link.status().agent_pid == pid


def test_the_agent_gives_way_to_the_engine(sidecar, start_link):
    link = start_link(agent_nice=7)
    steered(link)
    pid = link.status().agent_pid
    assert pid is not None
    assert os.sched_getscheduler(pid) == os.SCHED_BATCH
    assert psutil.Process(pid).nice() == os.getpriority(os.PRIO_PROCESS, 0) + 7


def test_close_ends_the_agent(sidecar, start_link):
    link = start_link()
    steered(link)
    pid = link.status().agent_pid
    assert pid is not None
    link.close()
    # It is not waited for longer than an engine that stops may wait.
    eventually(lambda: not psutil.pid_exists(pid))


ENGINE = """
import sys, time
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.settings import LinkSettings
from tests.support.link_messages import engine_spec
link = EngineLink.start(engine_spec(), LinkSettings(sidecar=sys.argv[1]), startup_gamma=1)
while not link.choose(4).epoch:
    time.sleep(0.01)
print(link.status().agent_pid, flush=True)
time.sleep(600)
"""


def _ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_no_agent_outlives_a_killed_engine(sidecar, stopped):
    command = [sys.executable, "-c", ENGINE, sidecar.target]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as engine:
        assert engine.stdout is not None
        agent = int(engine.stdout.readline())
        if stopped:
            os.kill(agent, signal.SIGSTOP)
        engine.kill()
    eventually(lambda: _ended(agent))


@pytest.mark.parametrize("first", [b"\x00", b"\x01\x01\xff\xff", b"\x01\x02"])
def test_an_agent_whose_engine_does_not_introduce_itself_ends_with_its_own_code(first):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "engine_shim.link.agent", "--target=unix:/nowhere.sock"]
    command += [f"--fd={theirs.fileno()}", f"--parent={os.getpid()}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with ours, theirs:
        ours.send(first)
        run = subprocess.run(
            command,
            check=False,
            pass_fds=[theirs.fileno()],
            env=environment,
            capture_output=True,
            timeout=120,
        )
    assert run.returncode == EXIT_BAD_INTRODUCTION
    assert b"bad-introduction" in run.stderr


def test_the_agent_loads_nothing_of_the_engine_or_the_sidecar():
    script = "import sys, engine_shim.link.agent; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True, env=environment)
    roots = {name.partition(".")[0] for name in loaded.split()}
    assert roots & {"torch", "sglang", "controller", "numpy", "pydantic"} == set()
    assert messages.__name__ in loaded.split()
