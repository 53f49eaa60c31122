import itertools
import signal
import time
from pathlib import Path

import pytest

from tests.support.sidecar_process import PATIENCE_SECONDS, sidecar_process

# Seconds between two signals: shorter than any part of a process's end.
PAUSE_SECONDS = 0.001


@pytest.mark.parametrize("attempt", range(3))
def test_a_request_to_stop_that_is_repeated_to_the_end_does_not_change_it(
    tmp_path: Path, attempt: int
):
    log = tmp_path / "log"
    with sidecar_process(tmp_path, log=log) as sidecar:
        sidecar.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        repeated = itertools.cycle((signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
        while sidecar.process.poll() is None:
            assert time.monotonic() < deadline
            sidecar.process.send_signal(next(repeated))
            time.sleep(PAUSE_SECONDS)
        assert sidecar.process.returncode == 0
    lines = log.read_text(encoding="utf-8")
    assert '"stopped"' in lines
    assert "Traceback" not in lines
    assert not (tmp_path / "controller.sock").exists()
