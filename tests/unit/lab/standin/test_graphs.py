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
    new_graph = Graph()
    with graph.capture(new_graph), torch.no_grad():
        output = work()
    return new_graph, output


def test_a_replay_reads_its_inputs_again() -> None:
    inputs = torch.tensor([1.0, 2.0])
    recorded_graph, output = captured(lambda: torch.relu(inputs * 2 + 1))
    assert isinstance(output, Tensor)
    inputs.copy_(torch.tensor([5.0, -7.0]))
    recorded_graph.replay()
    assert output.tolist() == [11.0, 0.0]


def test_a_replay_writes_in_place_where_the_capture_did() -> None:
    cache, positions, row = torch.zeros(4, 2), torch.tensor([1]), torch.ones(1, 2)
    recorded_graph, _ = captured(lambda: cache.index_put_((positions,), row))
    cache.zero_()
    positions.fill_(3)
    recorded_graph.replay()
    assert cache.sum(1).tolist() == [0.0, 0.0, 0.0, 2.0]


def test_a_replay_sees_no_scalar_and_no_buffer_that_changed() -> None:
    class Owner:
        scale = 2.0
        buffer = torch.ones(2)

    captured_buffer = Owner.buffer
    recorded_graph, output = captured(lambda: Owner.buffer * Owner.scale)
    assert isinstance(output, Tensor)
    Owner.scale, Owner.buffer = 100.0, torch.full((2,), 9.0)
    recorded_graph.replay()
    assert output.tolist() == [2.0, 2.0]
    assert captured_buffer.tolist() == [1.0, 1.0]


def masked_assignment(inputs: Tensor, positions: Tensor) -> Tensor:
    written = inputs.clone()
    written[positions == 0] = 5
    return written


@pytest.mark.parametrize(
    "work",
    [
        masked_assignment,
        lambda values, positions: torch.where(positions == 0, 5.0, values),
        lambda values, positions: values.masked_fill(positions == 0, 5.0),
    ],
)
def test_a_number_is_part_of_the_graph(work: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A kernel takes it by value, so it does not matter that its tensor is gone."""
    inputs, positions = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2])
    recorded_graph, output = captured(lambda: work(inputs, positions))
    assert isinstance(output, Tensor)
    for first in (4.0, 6.0):
        inputs[2] = first
        positions.copy_(torch.tensor([1, 0, 1]))
        recorded_graph.replay()
        assert output.tolist() == [1.0, 5.0, first]


@pytest.mark.parametrize("offset_in_source", [False, True])
def test_rows_are_copied_to_or_from_where_the_device_says(offset_in_source: bool) -> None:
    source, to = torch.arange(12.0).view(6, 2), torch.zeros(5, 2)
    offset, count = torch.tensor(0), torch.tensor(5)
    recorded_graph, _ = captured(lambda: copy_rows(to, source, 0, offset, count, offset_in_source))
    to.fill_(-1)
    offset.fill_(2)
    count.fill_(3)
    recorded_graph.replay()
    kept = torch.full((2, 2), -1.0)
    expected = [source[2:5], kept] if offset_in_source else [kept, source[:3]]
    assert torch.equal(to, torch.cat(expected))


def test_an_operator_of_the_stand_in_is_one_node() -> None:
    inputs = torch.randn(2, 8)
    recorded_graph, output = captured(lambda: silu_and_mul_cpu(inputs))
    assert isinstance(output, Tensor)
    assert recorded_graph._recording is not None
    assert [node.name for node in recorded_graph._recording.nodes] == ["silu_and_mul_cpu"]
    inputs.copy_(torch.randn(2, 8))
    recorded_graph.replay()
    assert torch.equal(output, silu_and_mul_cpu(inputs))


def test_views_of_a_result_are_written_with_it() -> None:
    inputs = torch.ones(4)

    def work() -> tuple[Tensor, Tensor]:
        doubled = inputs * 2
        return doubled.view(2, 2)[1], doubled

    recorded_graph, output = captured(work)
    assert isinstance(output, tuple)
    inputs.fill_(3.0)
    recorded_graph.replay()
    assert output[0].tolist() == [6.0, 6.0]


def test_what_nobody_holds_is_overwritten_after_a_replay() -> None:
    inputs, seen = torch.ones(2), []

    def work() -> Tensor:
        between = inputs + 1
        # The address alone: as of memory that a graph's pool has given away.
        seen.append((between.untyped_storage(), between.storage_offset()))
        return between * 2

    recorded_graph, output = captured(work)
    address = seen.pop()[0].data_ptr()
    assert isinstance(output, Tensor)
    recorded_graph.replay()
    assert output.tolist() == [4.0, 4.0]
    assert recorded_graph._intermediates is not None
    [between] = recorded_graph._intermediates
    assert between.data_ptr() == address
    assert between.isnan().all()
    recorded_graph.replay()
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
    inputs = torch.ones(3)
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        captured(lambda: waits(inputs))
    # A failed capture leaves nothing behind.
    assert not graph.is_capturing()
    captured(lambda: inputs * 2)


def test_a_mask_may_select_where_one_value_is_written() -> None:
    values = torch.tensor([1.0, -1.0])

    def work() -> None:
        values[values < 0] = 0.0

    captured(work)
    assert waiting_reason(Tensor.__setitem__, (values, values < 0, 0.0), {}) is None
    assert waiting_reason(Tensor.__setitem__, (values, values < 0, values), {}) is not None


def test_an_input_that_was_freed_is_found() -> None:
    owner = [torch.ones(2)]
    recorded_graph, _ = captured(lambda: owner[0] * 2)
    recorded_graph.replay()
    owner.clear()
    with pytest.raises(GraphMemoryError, match=r"shape \[2\].*was freed"):
        recorded_graph.replay()


def test_another_graph_does_not_keep_an_input() -> None:
    owner = [torch.ones(2)]
    first, _ = captured(lambda: owner[0] * 2)
    second, _ = captured(lambda: owner[0] * 3)
    owner.clear()
    for captured_graph in (first, second):
        with pytest.raises(GraphMemoryError, match="was freed"):
            captured_graph.replay()


def test_an_input_that_was_moved_is_found() -> None:
    inputs = torch.ones(2)
    recorded_graph, _ = captured(lambda: inputs * 2)
    inputs.resize_(1_000_000)
    with pytest.raises(GraphMemoryError, match="was moved"):
        recorded_graph.replay()


def test_a_graph_that_was_reset_keeps_nothing() -> None:
    owner = [torch.ones(2)]
    recorded_graph, _ = captured(lambda: owner[0] * 2)
    other, _ = captured(lambda: owner[0] * 3)
    recorded_graph.replay()
    recorded_graph.reset()
    with pytest.raises(CaptureError, match="never captured"):
        recorded_graph.replay()
    other.replay()
    owner.clear()
    with pytest.raises(GraphMemoryError):
        other.replay()


def test_captures_do_not_nest_and_a_capture_holds_no_replay() -> None:
    inputs = torch.ones(2)
    recorded_graph, _ = captured(lambda: inputs * 2)
    with pytest.raises(CaptureError, match="inside another"):
        captured(lambda: captured(lambda: inputs))
    with pytest.raises(CaptureError, match="inside a capture"):
        captured(recorded_graph.replay)
