"""A graph on a CPU replays what was captured, and nothing that has changed since."""

from collections.abc import Callable

import pytest
import torch
from cpu_graphs import graph
from cpu_graphs.graph import Graph, GraphMemoryError
from cpu_graphs.patches import copy_rows
from cpu_graphs.recorder import CaptureError, waiting_reason
from sgl_kernel import silu_and_mul_cpu
from torch import Tensor


def captured(work: Callable[[], object]) -> tuple[Graph, object]:
    made = Graph()
    with graph.capture(made), torch.no_grad():
        output = work()
    return made, output


def test_a_replay_reads_its_inputs_again() -> None:
    given = torch.tensor([1.0, 2.0])
    made, output = captured(lambda: torch.relu(given * 2 + 1))
    assert isinstance(output, Tensor)
    given.copy_(torch.tensor([5.0, -7.0]))
    made.replay()
    assert output.tolist() == [11.0, 0.0]


def test_a_replay_writes_in_place_where_the_capture_did() -> None:
    cache, at, row = torch.zeros(4, 2), torch.tensor([1]), torch.ones(1, 2)
    made, _ = captured(lambda: cache.index_put_((at,), row))
    cache.zero_()
    at.fill_(3)
    made.replay()
    assert cache.sum(1).tolist() == [0.0, 0.0, 0.0, 2.0]


def test_a_replay_sees_no_scalar_and_no_buffer_that_changed() -> None:
    class Owner:
        scale = 2.0
        buffer = torch.ones(2)

    captured_buffer = Owner.buffer
    made, output = captured(lambda: Owner.buffer * Owner.scale)
    assert isinstance(output, Tensor)
    Owner.scale, Owner.buffer = 100.0, torch.full((2,), 9.0)
    made.replay()
    assert output.tolist() == [2.0, 2.0]
    assert captured_buffer.tolist() == [1.0, 1.0]


def masked_assignment(given: Tensor, at: Tensor) -> Tensor:
    written = given.clone()
    written[at == 0] = 5
    return written


@pytest.mark.parametrize(
    "work",
    [
        masked_assignment,
        lambda given, at: torch.where(at == 0, 5.0, given),
        lambda given, at: given.masked_fill(at == 0, 5.0),
    ],
)
def test_a_number_is_part_of_the_graph(work: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A kernel takes it by value, so it does not matter that its tensor is gone."""
    given, at = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2])
    made, output = captured(lambda: work(given, at))
    assert isinstance(output, Tensor)
    for first in (4.0, 6.0):
        given[2] = first
        at.copy_(torch.tensor([1, 0, 1]))
        made.replay()
        assert output.tolist() == [1.0, 5.0, first]


@pytest.mark.parametrize("offset_in_source", [False, True])
def test_rows_are_copied_to_or_from_where_the_device_says(offset_in_source: bool) -> None:
    of, to = torch.arange(12.0).view(6, 2), torch.zeros(5, 2)
    offset, count = torch.tensor(0), torch.tensor(5)
    made, _ = captured(lambda: copy_rows(to, of, 0, offset, count, offset_in_source))
    to.fill_(-1)
    offset.fill_(2)
    count.fill_(3)
    made.replay()
    kept = torch.full((2, 2), -1.0)
    expected = [of[2:5], kept] if offset_in_source else [kept, of[:3]]
    assert torch.equal(to, torch.cat(expected))


def test_an_operator_of_the_stand_in_is_one_node() -> None:
    given = torch.randn(2, 8)
    made, output = captured(lambda: silu_and_mul_cpu(given))
    assert isinstance(output, Tensor)
    assert made._recording is not None
    assert [node.name for node in made._recording.nodes] == ["silu_and_mul_cpu"]
    given.copy_(torch.randn(2, 8))
    made.replay()
    assert torch.equal(output, silu_and_mul_cpu(given))


def test_views_of_a_result_are_written_with_it() -> None:
    given = torch.ones(4)

    def work() -> tuple[Tensor, Tensor]:
        doubled = given * 2
        return doubled.view(2, 2)[1], doubled

    made, output = captured(work)
    assert isinstance(output, tuple)
    given.fill_(3.0)
    made.replay()
    assert output[0].tolist() == [6.0, 6.0]


def test_what_nobody_holds_is_overwritten_after_a_replay() -> None:
    given, seen = torch.ones(2), []

    def work() -> Tensor:
        between = given + 1
        # The address alone: as of memory that a graph's pool has given away.
        seen.append((between.untyped_storage(), between.storage_offset()))
        return between * 2

    made, output = captured(work)
    address = seen.pop()[0].data_ptr()
    assert isinstance(output, Tensor)
    made.replay()
    assert output.tolist() == [4.0, 4.0]
    assert made._intermediates is not None
    [between] = made._intermediates
    assert between.data_ptr() == address
    assert between.isnan().all()
    made.replay()
    assert output.tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(lambda x: x.sum().item(), id="item"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.cpu(), id="cpu"),
        pytest.param(lambda x: x.to("cpu"), id="to cpu"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: x[x > 0], id="mask"),
        pytest.param(lambda x: torch.ops.aten.index(x, [x > 0]), id="mask in an operator"),
        pytest.param(lambda x: x[[0, 1]], id="list"),
        pytest.param(lambda x: 1 if x.sum() > 0 else 0, id="bool"),
        pytest.param(lambda x: int(x.sum()), id="int"),
        pytest.param(lambda x: torch.equal(x, x), id="equal"),
        pytest.param(lambda x: x.repeat_interleave((x > 0).long()), id="repeat_interleave"),
        pytest.param(lambda x: x.masked_select(x > 0), id="masked_select"),
        pytest.param(lambda x: x.unique(), id="unique"),
        pytest.param(lambda _: torch.tensor([1, 2], device="cpu"), id="tensor"),
        pytest.param(lambda x: x.numpy(), id="numpy"),
    ],
)
def test_what_would_wait_for_the_device_is_refused(waits: Callable[[Tensor], object]) -> None:
    given = torch.ones(3)
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        captured(lambda: waits(given))
    # A failed capture leaves nothing behind.
    assert not graph.is_capturing()
    captured(lambda: given * 2)


def test_a_mask_may_select_where_one_value_is_written() -> None:
    given = torch.tensor([1.0, -1.0])

    def work() -> None:
        given[given < 0] = 0.0

    captured(work)
    assert waiting_reason(Tensor.__setitem__, (given, given < 0, 0.0), {}) is None
    assert waiting_reason(Tensor.__setitem__, (given, given < 0, given), {}) is not None


def test_an_input_that_was_freed_is_found() -> None:
    owner = [torch.ones(2)]
    made, _ = captured(lambda: owner[0] * 2)
    made.replay()
    owner.clear()
    with pytest.raises(GraphMemoryError, match=r"shape \[2\].*was freed"):
        made.replay()


def test_another_graph_does_not_keep_an_input() -> None:
    owner = [torch.ones(2)]
    first, _ = captured(lambda: owner[0] * 2)
    second, _ = captured(lambda: owner[0] * 3)
    owner.clear()
    for made in (first, second):
        with pytest.raises(GraphMemoryError, match="was freed"):
            made.replay()


def test_an_input_that_was_moved_is_found() -> None:
    given = torch.ones(2)
    made, _ = captured(lambda: given * 2)
    given.resize_(1_000_000)
    with pytest.raises(GraphMemoryError, match="was moved"):
        made.replay()


def test_a_graph_that_was_reset_keeps_nothing() -> None:
    owner = [torch.ones(2)]
    made, _ = captured(lambda: owner[0] * 2)
    other, _ = captured(lambda: owner[0] * 3)
    made.replay()
    made.reset()
    with pytest.raises(CaptureError, match="never captured"):
        made.replay()
    other.replay()
    owner.clear()
    with pytest.raises(GraphMemoryError):
        other.replay()


def test_captures_do_not_nest_and_a_capture_holds_no_replay() -> None:
    given = torch.ones(2)
    made, _ = captured(lambda: given * 2)
    with pytest.raises(CaptureError, match="inside another"):
        captured(lambda: captured(lambda: given))
    with pytest.raises(CaptureError, match="inside a capture"):
        captured(made.replay)
