from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from controller.service.net.errors import TooManyEnginesError
from controller.service.sessions.engine_identity import EngineIdentity
from controller.service.sessions.registry import LONG_MESSAGE_REPORTS, LoadMonitor
from tests.support.service_harness import (
    SteerClient,
    failure,
    report_message,
    running_sidecar,
    wait_until,
)
from tests.unit.controller.service.sessions.small_registry import ANYBODY, registry, spec


def looked(*looks: Sequence[tuple[int, int]]) -> bool:
    """Whether engines are too many after these looks.

    A look: for each engine the reports of its only message since the last one (0: it sent none),
    and how many it had to drop.
    """
    sessions, load = registry(), LoadMonitor()
    engines = [sessions.introduce(spec(f"engine-{n}")) for n in range(len(looks[0]))]
    for look in looks:
        for engine, (reports, dropped) in zip(engines, look, strict=True):
            engine.counters.messages += reports > 0
            engine.counters.reports += reports
            engine.counters.dropped_reports += dropped
        load.check(sessions)
    return load.is_overloaded


LATE, IN_TIME, SILENT = (LONG_MESSAGE_REPORTS, 1), (LONG_MESSAGE_REPORTS - 1, 1), (0, 1)


@pytest.mark.parametrize(
    "looks",
    [
        3 * [[(LONG_MESSAGE_REPORTS, 0)]],  # it is behind, but nothing is lost
        3 * [[IN_TIME]],  # reports are lost, but not because it is behind
        3 * [[SILENT]],
        [[LATE]],  # an engine that comes back with what it has kept
        [[LATE], [IN_TIME], [LATE]],
        3 * [[LATE, IN_TIME]],  # one engine cannot keep others out
    ],
)
def test_a_sidecar_that_keeps_up_takes_more_engines(looks: list[list[tuple[int, int]]]):
    assert not looked(*looks)


def test_engines_that_lose_reports_to_a_sidecar_behind_are_too_many_until_it_catches_up():
    late = [LATE, LATE, IN_TIME]
    # It is still behind, although nothing is lost at the moment: one more would be too many.
    backlog = [(LONG_MESSAGE_REPORTS, 0), (LONG_MESSAGE_REPORTS, 0), (1, 0)]
    with capture_logs() as lines:
        assert looked(late, late, late, backlog)
    overload_events = [line for line in lines if line["event"].startswith("overload")]
    assert [(line["event"], line["engines"], line["late"]) for line in overload_events] == [
        ("overloaded", 3, 2)
    ]
    assert not looked(late, late, backlog, [LATE, IN_TIME, IN_TIME])


def test_an_overloaded_registry_refuses_others_and_keeps_its_own():
    sessions, own = registry(), EngineIdentity.from_caller(ANYBODY, "its secret")
    sessions.introduce(spec("a"), own)
    sessions.load_monitor.is_overloaded = True
    with pytest.raises(TooManyEnginesError, match=r"its 1 engines fast enough: give it a faster"):
        sessions.introduce(spec("b"))
    sessions.introduce(spec("a"), own)


async def test_one_engine_more_than_a_sidecar_can_serve_is_refused(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        load = running.sidecar.registry.load_monitor
        session_id = await running.introduce()
        session = running.sidecar.registry.find_by_token(session_id)
        stream = SteerClient(running, session_id)
        for look in range(2):
            first = 1 + look * LONG_MESSAGE_REPORTS
            steps = range(first, first + LONG_MESSAGE_REPORTS)
            await stream.send(*(report_message(step) for step in steps), dropped=1)
            # A message is counted when all of its reports are.
            await wait_until(lambda sent=look + 1: session.counters.messages == sent)
            assert session.counters.reports == steps[-1]
            load.check(running.sidecar.registry)
        code, detail = await failure(running.introduce("engine-1"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "run another sidecar" in detail
        await running.introduce()  # an engine that it has already
        load.check(running.sidecar.registry)
        await running.introduce("engine-1")
