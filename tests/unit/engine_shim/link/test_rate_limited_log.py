from structlog.testing import capture_logs

from engine_shim.link.rate_limited_log import RateLimitedLog


def test_an_event_is_logged_once_in_ten_seconds_and_says_how_many_were_left_out():
    now = 100.0
    log = RateLimitedLog(clock=lambda: now)
    with capture_logs() as lines:
        for step in range(5):
            log.warning("report-rejected", step=step)
        log.warning("plan-unusable")
        now = 110.0
        log.warning("report-rejected", step=9)
        log.info("sidecar-steering")
    assert lines == [
        {"event": "report-rejected", "log_level": "warning", "step": 0},
        {"event": "plan-unusable", "log_level": "warning"},
        {"event": "report-rejected", "log_level": "warning", "step": 9, "left_out": 4},
        {"event": "sidecar-steering", "log_level": "info"},
    ]


def test_a_broken_stderr_is_survived(monkeypatch):
    log = RateLimitedLog()

    def broken(event: str, **_: object) -> None:
        raise BrokenPipeError(event)

    monkeypatch.setattr(log._log, "warning", broken, raising=False)
    log.warning("sidecar-away")
