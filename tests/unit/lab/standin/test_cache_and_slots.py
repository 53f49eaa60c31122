"""Rows of the key/value cache, and the map from positions to them, against Python loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_kernel import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    store_cache_cpu,
)
from torch import Tensor

REQUESTS, POSITIONS = 6, 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [True, False])
def test_store_writes_the_named_rows_only(flat: bool, dtype: torch.dtype) -> None:
    caches = [torch.randn(20, 2, 8).to(dtype) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    rows = [torch.randn(3, 2, 8) for _ in range(2)]
    given_rows = [row.flatten(1) if flat else row for row in rows]
    indices = torch.tensor([17, 0, 4])
    store_cache_cpu(*given_rows, *caches, indices, 16)
    for cache, old, row in zip(caches, before, rows, strict=True):
        old[indices] = row.to(dtype)
        assert torch.equal(cache, old)


@given(st.data())
def test_copying_rows_reads_all_before_it_writes_any(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 8))
    targets = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count, unique=True))
    sources = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    buffers = [torch.randn(10, 2, 4), torch.randn(10, 2, 4).bfloat16()]
    expected = [buffer.clone() for buffer in buffers]
    for buffer, old in zip(expected, buffers, strict=True):
        buffer[targets] = old[sources].clone()
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].nbytes for buffer in buffers])
    copy_all_layer_kv_cache_cpu(addresses, strides, torch.tensor(targets), torch.tensor(sources))
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


@st.composite
def spans(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct requests, and a span of positions of each, maybe empty."""
    requests = draw(st.lists(st.integers(0, REQUESTS - 1), max_size=4, unique=True))
    bounds = [sorted(draw(st.tuples(*[st.integers(0, POSITIONS)] * 2))) for _ in requests]
    start, end = ([bound[i] for bound in bounds] for i in (0, 1))
    as_tensor = [torch.tensor(numbers, dtype=torch.int64) for numbers in (requests, start, end)]
    return as_tensor[0], as_tensor[1], as_tensor[2]


def table() -> Tensor:
    return torch.randperm(REQUESTS * POSITIONS).int().view(REQUESTS, POSITIONS)


@given(spans(), st.sampled_from([torch.int32, torch.int64]))
def test_slots_are_written_span_by_span(
    where: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> None:
    requests, start, end = where
    slots, expected = table(), table()
    expected.copy_(slots)
    new = torch.arange(1000, 1000 + int((end - start).sum()) + 2, dtype=dtype)
    queue = new.tolist()
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        for position in range(first, last):
            expected[request, position] = queue.pop(0)
    assign_req_to_token_pool_cpu(requests, slots, start, end, new, POSITIONS)
    assert torch.equal(slots, expected)


@given(spans(), st.sampled_from([torch.int32, torch.int64]))
def test_slots_are_read_span_by_span(
    where: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype
) -> None:
    requests, start, end = where
    slots = table()
    bounds = zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)
    expected = [slot for r, first, last in bounds for slot in slots[r, first:last].tolist()]
    result = torch.full((len(expected) + 2,), -7)
    assign_extend_cache_locs_cpu(requests, slots, start.to(dtype), end.to(dtype), result, POSITIONS)
    assert result.tolist() == [*expected, -7, -7]


@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (2, 3), (4, 1)])
def test_draft_slots_follow_the_verified_tokens(topk: int, steps: int) -> None:
    slots, requests, lengths = table(), torch.tensor([4, 1]), torch.tensor([9, 30])
    result = torch.zeros(2 * topk * steps, dtype=torch.int64)
    assign_draft_cache_locs_contiguous_cpu(requests, slots, lengths, result, POSITIONS, topk, steps)
    assert result.tolist() == [
        *slots[4, 9 : 9 + topk * steps].tolist(),
        *slots[1, 30 : 30 + topk * steps].tolist(),
    ]


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_each_branch_sees_the_prefix_and_then_its_own_slots(topk: int) -> None:
    slots, requests, lengths, steps = table(), torch.tensor([4, 1]), torch.tensor([9, 20]), 3
    before = slots.clone()
    rows = build_draft_decode_metadata_cpu(slots, requests, lengths, topk, steps, POSITIONS)
    assert rows.shape == (2 * topk, POSITIONS)
    for i, (request, length) in enumerate(zip([4, 1], [9, 20], strict=True)):
        for branch in range(topk):
            own = length + branch * steps
            expected = [
                *slots[request, :length].tolist(),
                *slots[request, own : own + steps].tolist(),
            ]
            assert rows[i * topk + branch, : length + steps].tolist() == expected
    rows.zero_()
    assert torch.equal(slots, before)
