"""A warning is logged when it begins and ends, and no more than once an hour."""

import dataclasses
from pathlib import Path

from structlog.testing import capture_logs

from controller.core.checks.engine_checks import EngineWarning, WarningKind
from controller.service.sessions.session_logs import WarningLog
from tests.support.service_harness import (
    SteerClient,
    report_message,
    running_sidecar,
    session_metrics,
    wait_until,
)

WARNING = EngineWarning(WarningKind.NO_ACCEPTANCE, "mtp", "found", "advice")


def test_it_begins_ends_and_does_not_come_back_within_an_hour():
    log = WarningLog()
    with capture_logs() as lines:
        for now in (0.0, 1.0, 2.0):
            log.log_changes("e", [WARNING], now)
        log.log_changes("e", [], 3.0)
        for now in (4.0, 5.0):
            log.log_changes("e", [WARNING], now)
            log.log_changes("e", [], now)
        log.log_changes("e", [WARNING], 3700.0)
    assert [line["event"] for line in lines] == [
        "engine_warning", "engine_warning_ended", "engine_warning",
    ]  # fmt: skip
    assert {line["engine"] for line in lines} == {"e"}
    assert lines[0]["kind"] == "no-acceptance"


def test_an_engine_that_comes_back_with_other_drafters_fills_no_memory():
    log = WarningLog()
    with capture_logs():
        for number in range(10_000):
            named = dataclasses.replace(WARNING, drafter=f"drafter-{number}")
            log.log_changes("e", [named], float(number))
    assert len(log._logged_at) + len(log._active_keys) < 100


async def test_an_engine_that_introduces_itself_again_is_not_unknown(tmp_path: Path):
    async with running_sidecar(tmp_path) as running:
        stream = SteerClient(running, await running.introduce())
        await stream.send(*(report_message(n, accepted_counts=[4, 0, 0]) for n in range(1, 300)))
        session = running.sidecar.registry.find_by_engine("engine-0")
        await wait_until(lambda: session.counters.reports == 299)
        (warning,) = session.core.checks.warnings()
        assert warning.kind is WarningKind.NO_ACCEPTANCE
        assert session_metrics(session)["speculation_engine_warning", "no-acceptance"] == 1
        assert session_metrics(session)["speculation_engine_warning", "other-width"] == 0
        await running.introduce()
        again = running.sidecar.registry.find_by_engine("engine-0")
        assert again is not session
        assert again.core.checks.warnings() == (warning,)
        assert again.warning_log is session.warning_log
