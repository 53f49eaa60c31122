"""Acceptance is drawn by position, although results are read a step late, and steps are logged."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.cpu_engine.pace.acceptance import DrawnAcceptance, RequestId
from lab.cpu_engine.pace.step_log import StepLog, read_log
from lab.demo.gpu.engine_watch import EngineWatch

GAMMA = 3
CURVES = {"code": {"eagle3": (0.8, 0.7, 0.6)}}


class Request:
    """What the watch reads of SGLang's."""

    def __init__(self, rid: str, tokens: int) -> None:
        self.rid, self.tokens = rid, tokens
        self.origin_input_ids = [1, 2, 3]
        self.output_ids: list[int] = []
        self.finished_len: int | None = None

    def finished(self) -> bool:
        return self.finished_len is not None

    def gain(self, count: int) -> None:
        if self.finished():
            return
        self.output_ids += [100] * count
        if len(self.output_ids) >= self.tokens:
            self.finished_len = self.tokens


class Scheduler:
    """A scheduler that reads results a step late; it has the device's counts only then."""

    draft_worker = object()

    def __init__(self, watch: EngineWatch) -> None:
        self._watch = watch
        self._waiting: list[tuple[Any, Any]] = []

    def step(self, requests: list[Request], *, prefill: bool = False, gamma: int = GAMMA) -> None:
        mode = SimpleNamespace(is_extend=lambda: prefill, is_decode=lambda: not prefill)
        tokens = sum(len(r.origin_input_ids) for r in requests)
        batch = SimpleNamespace(reqs=requests, forward_mode=mode, extend_num_tokens=tokens)
        result = self._watch.around_run_batch(self._run, self, batch, prefill, gamma)
        self._waiting.append((batch, result))
        if len(self._waiting) > 1:
            self._read()

    def drain(self) -> None:
        while self._waiting:
            self._read()
        self._watch.around_on_idle(lambda _: None, self)

    def _run(self, _: object, batch, prefill: bool, gamma: int):
        size = len(batch.reqs)
        if prefill or gamma == 0:
            return SimpleNamespace(gains=[1] * size, speculative_num_draft_tokens=gamma + 1)
        rows = torch.arange(size * (gamma + 1)).view(size, gamma + 1)
        correct = torch.zeros(size, dtype=torch.int32)
        self._watch.accept(rows, torch.zeros(rows.numel()), correct, gamma)
        gains = (correct + 1).tolist()
        return SimpleNamespace(gains=gains, speculative_num_draft_tokens=gamma + 1)

    def _read(self) -> None:
        batch, result = self._waiting.pop(0)

        def read(*_: object) -> None:
            for request, gain in zip(batch.reqs, result.gains, strict=True):
                request.gain(gain)

        self._watch.around_process_batch_result(read, self, batch, result)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def scheduler(path):
    return Scheduler(EngineWatch(StepLog(path), DrawnAcceptance(CURVES)))


def verifications(request: RequestId, gamma: int) -> int:
    """How many steps a request takes by its draws: its first token comes from the prefill."""
    drawn = DrawnAcceptance(CURVES).accepted(request, "eagle3")
    position = steps = 0
    while position < request.output_tokens - 1:
        position += min(int(drawn[position]), gamma) + 1
        steps += 1
    return steps


def test_a_request_takes_the_steps_that_its_draws_say_though_results_come_late(scheduler, path):
    id_ = RequestId("code", 5, 40)
    request = Request(str(id_), 40)
    scheduler.step([request], prefill=True)
    while not request.finished():
        scheduler.step([request])
    scheduler.drain()
    log = read_log(path)
    decoded = [step for step in log.steps if step.is_decode]
    # One more was launched before the last one's tokens were read.
    assert len(decoded) == verifications(id_, GAMMA) + 1
    assert sum(step.tokens for step in decoded) == 39
    assert [(r.rid, r.tokens) for r in log.requests] == [(str(id_), 40)]


def test_a_step_without_drafts_moves_a_request_by_one_position(scheduler, path):
    id_ = RequestId("code", 5, 40)
    request = Request(str(id_), 40)
    scheduler.step([request], prefill=True)
    for _ in range(7):
        scheduler.step([request], gamma=0)
    scheduler.step([request])
    scheduler.drain()
    drawn = DrawnAcceptance(CURVES).accepted(id_, "eagle3")
    last = read_log(path).steps[-1]
    assert (last.gamma, last.accepted) == (GAMMA, min(int(drawn[7]), GAMMA))


def test_requests_keep_their_own_positions_in_a_batch_that_changes(scheduler, path):
    ids = [RequestId("code", number, 30) for number in (1, 2)]
    first, second = (Request(str(id_), 30) for id_ in ids)
    scheduler.step([first], prefill=True)
    for _ in range(3):
        scheduler.step([first])
    scheduler.step([second], prefill=True)
    while not (first.finished() and second.finished()):
        scheduler.step([r for r in (second, first) if not r.finished()])
    scheduler.drain()
    rows = sum(step.batch_size for step in read_log(path).steps if step.is_decode)
    expected = sum(verifications(id_, GAMMA) for id_ in ids)
    # One row of each, launched before its end was read.
    assert rows == expected + 2


def test_a_request_of_no_class_has_no_draft_accepted(scheduler, path):
    request = Request("HEALTH_CHECK_1", 3)
    scheduler.step([request], prefill=True)
    scheduler.step([request])
    scheduler.step([request])
    scheduler.drain()
    steps = read_log(path).steps
    assert [step.accepted for step in steps] == [0, 0, 0]
    assert steps[-1].kinds == {"": 1}


def test_a_step_begins_when_the_one_before_has_ended(scheduler, path):
    request = Request("code.5.40", 40)
    scheduler.step([request], prefill=True)
    for _ in range(4):
        scheduler.step([request])
    scheduler.drain()
    steps = read_log(path).steps
    for one, following in itertools.pairwise(steps):
        assert following.began == max(following.launched, one.ended)
        assert following.seconds == following.ended - following.began > 0
    (prefill,) = (step for step in steps if not step.is_decode)
    assert prefill.tokens == 3


def test_nothing_is_written_while_the_engine_is_busy(scheduler, path):
    request = Request("code.5.400", 400)
    scheduler.step([request], prefill=True)
    for _ in range(300):
        scheduler.step([request], gamma=0)
    assert read_log(path).steps == ()
    scheduler.drain()
    assert len(read_log(path).steps) == 301
