"""Copies between host and device that happen late."""

import pytest
import torch
from cpu_graphs import late

from engine_shim.sglang.api import transfer

CPU = torch.device("cpu")


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> transfer.SideStream:
    late.install(3, monkeypatch.setattr)
    side_stream = transfer.make_side_stream(CPU)
    assert side_stream is not None
    return side_stream


def test_a_copy_happens_when_it_was_asked_for_often_enough(side: transfer.SideStream) -> None:
    to, source = torch.zeros(2), torch.ones(2)
    there = side.copy([(to, source)])
    assert to.isnan().all()
    assert [there.query() for _ in range(2)] == [False, False]
    # Whoever writes to the source meanwhile finds that in the copy.
    source.fill_(7)
    assert there.query()
    assert to.tolist() == [7, 7]


def test_a_type_is_changed_late_as_well(side: transfer.SideStream) -> None:
    to, source = torch.zeros(2, dtype=torch.bfloat16), torch.ones(2)
    there = side.copy([(to, source)])
    source.fill_(2)
    there.synchronize()
    assert to.tolist() == [2, 2]


def test_what_was_given_first_has_run_by_then(side: transfer.SideStream) -> None:
    both = torch.zeros(2), torch.zeros(2)
    side.copy([(both[0], torch.ones(2))])
    second = side.copy([(both[1], torch.ones(2))])
    second.synchronize()
    assert [one.tolist() for one in both] == [[1, 1], [1, 1]]


def test_work_that_waits_for_no_other_stream_is_an_error(side: transfer.SideStream) -> None:
    to, stream = torch.zeros(2), side._stream
    with pytest.raises(RuntimeError, match="without waiting"), torch.cpu.stream(stream):
        to.copy_(torch.ones(2))


def test_streams_of_others_are_as_they_were(side: transfer.SideStream) -> None:
    to = torch.zeros(2)
    with torch.cpu.stream(torch.cpu.Stream()):
        to.copy_(torch.ones(2))
    assert to.tolist() == [1, 1]
