"""The log of passes: what was written is read, and an error ends the log and nothing else."""

from dataclasses import replace
from pathlib import Path

from lab.cpu_engine.pace.step_log import LoggedRequest, LoggedStep, StepLog, read_log

STEP = LoggedStep(
    began=1.5, launched=1.6, ended=2.5, due=2.5, seconds=0.5, batch_size=3, kv_tokens=70,
    kinds={"code": 2, "": 1}, drafter="eagle3", gamma=3, accepted=4, tokens=7, probe=2, epoch=9,
    steered=True, switch_seconds=1e-4, used_seconds=0.2, shim_seconds=1e-5,
)  # fmt: skip
PREFILL = replace(STEP, drafter="", gamma=-1, accepted=0)
REQUEST = LoggedRequest("code.1.40", 2.5, 9.5, 40)


def test_a_log_is_read_back_and_continued_from_an_offset(tmp_path):
    path = tmp_path / "log"
    log = StepLog(path)
    log.add(STEP)
    assert read_log(path).steps == ()
    log.flush()
    first = read_log(path)
    assert (first.steps, first.requests) == ((STEP,), ())
    log.add(REQUEST)
    log.add(PREFILL)
    log.flush()
    rest = read_log(path, first.end)
    assert (rest.steps, rest.requests) == ((PREFILL,), (REQUEST,))
    assert read_log(path).steps == (STEP, PREFILL)
    assert STEP.is_decode
    assert not PREFILL.is_decode


def test_a_block_is_written_without_being_asked_for(tmp_path):
    log = StepLog(tmp_path / "log")
    for _ in range(300):
        log.add(STEP)
    assert len(read_log(tmp_path / "log").steps) == 256


def test_half_a_line_is_left_for_the_next_reader(tmp_path):
    path = tmp_path / "log"
    log = StepLog(path)
    log.add(STEP)
    log.flush()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    log_part = read_log(path)
    assert (len(log_part.steps), log_part.end) == (1, len(whole))


def test_a_full_disk_ends_the_log_with_one_line_and_nothing_else(caplog):
    log = StepLog(Path("/dev/full"))
    for _ in range(3):
        log.add(STEP)
        log.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "passes are no longer written to /dev/full: [Errno 28] No space left on device"
    ]
