"""Attention over the paged cache against a plain float64 loop over sequences, tokens and heads."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel import _tiles, decode_attention_cpu, extend_attention_cpu
from torch import Tensor

SLOTS, POSITIONS = 6000, 1200
SCALE = 0.3
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Batch:
    """A cache, and sequences whose rows are scattered over it."""

    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    requests: Tensor
    lengths: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.k_cache.shape[1], self.k_cache.shape[2]

    def rows(self, sequence: int) -> Tensor:
        return self.table[self.requests[sequence], : int(self.lengths[sequence])].long()

    def only(self, *sequences: int) -> "Batch":
        chosen = torch.tensor(sequences)
        return Batch(
            self.k_cache, self.v_cache, self.table, self.requests[chosen], self.lengths[chosen]
        )


def batch_of(
    lengths: list[int],
    heads: int = 2,
    size: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    random = torch.Generator().manual_seed(seed)
    caches = [torch.randn(SLOTS, heads, size, generator=random).to(dtype) for _ in range(2)]
    # Slot 0 is where SGLang points unused positions: it must not matter what lies there.
    for cache in caches:
        cache[0] = float("nan")
    table = torch.zeros(len(lengths) + 3, POSITIONS, dtype=torch.int32)
    requests = (torch.randperm(len(lengths) + 2, generator=random)[: len(lengths)] + 1).long()
    slots = (torch.randperm(SLOTS - 1, generator=random) + 1).int()
    for request, length in zip(requests.tolist(), lengths, strict=True):
        table[request, :length], slots = slots[:length], slots[length:]
    return Batch(caches[0], caches[1], table, requests, torch.tensor(lengths))


def attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """``query [heads, size]`` over the visible ones of ``keys [tokens, key heads, size]``."""
    group = query.shape[0] // keys.shape[1]
    rows = []
    for head, vector in enumerate(query.double()):
        own = keys[visible, head // group].double()
        weights = (own @ vector * SCALE).softmax(0)
        rows.append(weights @ values[visible, head // group].double())
    return torch.stack(rows)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = 3e-6 if actual.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def decode(
    batch: Batch,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    other: dict[str, object] | None = None,
) -> Tensor:
    output = torch.full_like(query, float("nan"))
    loc = torch.stack([batch.rows(i)[-1] for i in range(len(batch.lengths))])
    arguments = {
        "logit_cap": 0.0, "is_cross": False, "window": 0, "encoder_lens": None, "sinks": None,
    } | (other or {})  # fmt: skip
    scratch = torch.empty(0)
    decode_attention_cpu(
        query, batch.k_cache, batch.v_cache, 1.0, 1.0, output, key, value, loc, scratch,
        batch.table, batch.requests, batch.lengths, SCALE, *arguments.values(),
    )  # fmt: skip
    return output


def extend(
    batch: Batch,
    widths: list[int],
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    tree: Tensor | None = None,
    starts: list[int] | None = None,
    causal: bool = True,
    other: dict[str, object] | None = None,
) -> Tensor:
    output = torch.full_like(query, float("nan"))
    width = torch.tensor(widths)
    start = width.cumsum(0) - width if starts is None else torch.tensor(starts)
    arguments = {
        "logit_cap": 0.0, "is_cross": False, "window": 0, "encoder_lens": None, "sinks": None,
    } | (other or {})  # fmt: skip
    extend_attention_cpu(
        query, key, value, output, batch.k_cache, batch.v_cache, 1.0, 1.0,
        batch.table, batch.requests, batch.lengths, width.int(), start.int(), max(widths),
        SCALE, *arguments.values(), tree, causal,
    )  # fmt: skip
    return output


def fresh(tokens: int, batch: Batch, group: int, seed: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    heads, size = batch.shape
    return tuple(  # type: ignore[return-value]
        torch.randn(tokens, n, size, generator=random).to(batch.k_cache.dtype)
        for n in (heads * group, heads, heads)
    )


def extended(
    batch: Batch, widths: list[int], query: Tensor, key: Tensor, value: Tensor, sees: Tensor | None
) -> Tensor:
    """The reference: new tokens one by one; ``sees [sequences, width, width]`` for a tree."""
    result, token = [], 0
    for i, width in enumerate(widths):
        rows, length = batch.rows(i), int(batch.lengths[i])
        prefix = length - width
        keys = torch.cat((batch.k_cache[rows[:prefix]], key[token : token + width]))
        values = torch.cat((batch.v_cache[rows[:prefix]], value[token : token + width]))
        for step in range(width):
            visible = torch.arange(length) <= prefix + step
            if sees is not None:
                visible = torch.cat((torch.ones(prefix, dtype=torch.bool), sees[i, step]))
            result.append(attention(query[token + step], keys, values, visible))
        token += width
    return torch.stack(result) if result else query.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [7], [40, 1, 513, 64], [200, 33, 390]])
def test_decode_stores_the_new_token_and_attends(
    lengths: list[int], group: int, dtype: torch.dtype
) -> None:
    batch = batch_of(lengths, dtype=dtype)
    query, key, value = fresh(len(lengths), batch, group)
    caches = batch.k_cache.clone(), batch.v_cache.clone()
    output = decode(batch, query, key, value)
    for i in range(len(lengths)):
        rows = batch.rows(i)
        caches[0][rows[-1]], caches[1][rows[-1]] = key[i], value[i]
        everything = torch.ones(len(rows), dtype=torch.bool)
        assert_near(output[i], attention(query[i], caches[0][rows], caches[1][rows], everything))
    assert torch.equal(batch.k_cache.nan_to_num(), caches[0].nan_to_num())
    assert torch.equal(batch.v_cache.nan_to_num(), caches[1].nan_to_num())


def test_decode_without_new_rows_reads_what_is_stored() -> None:
    batch = batch_of([20, 5])
    query, key, value = fresh(2, batch, 2)
    expected = decode(batch, query, key, value)
    assert torch.equal(decode(batch, query, None, None), expected)


def test_decode_takes_rows_as_flat_as_they_come() -> None:
    one, other = batch_of([20, 5]), batch_of([20, 5])
    query, key, value = fresh(2, one, 2)
    expected = decode(one, query, key, value)
    assert torch.equal(decode(other, query, key.flatten(1), value.flatten(1)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(
    ("lengths", "widths"),
    [
        ([9], [9]),
        ([40, 41, 64], [4, 4, 4]),
        ([40, 9, 70, 5], [3, 0, 40, 5]),
        ([17, 33, 600], [17, 1, 2]),
        ([12, 30], [0, 0]),
        ([100, 80], [1, 1]),
    ],
)
def test_extend_attends_from_ragged_new_tokens(
    lengths: list[int], widths: list[int], group: int, dtype: torch.dtype
) -> None:
    batch = batch_of(lengths, dtype=dtype)
    query, key, value = fresh(sum(widths), batch, group)
    caches = batch.k_cache.clone(), batch.v_cache.clone()
    output = extend(batch, widths, query, key, value)
    assert_near(output, extended(batch, widths, query, key, value, None))
    assert torch.equal(batch.k_cache.nan_to_num(), caches[0].nan_to_num())
    assert torch.equal(batch.v_cache.nan_to_num(), caches[1].nan_to_num())


@pytest.mark.parametrize("widths", [[8, 8], [5, 11]])
def test_extend_without_new_rows_reads_what_is_stored(widths: list[int]) -> None:
    batch = batch_of([40, 17])
    query, key, value = fresh(16, batch, 2)
    expected = extend(batch, widths, query, key, value)
    new = torch.cat([batch.rows(i)[-width:] for i, width in enumerate(widths)])
    batch.k_cache[new], batch.v_cache[new] = key, value
    assert torch.equal(extend(batch, widths, query, None, None), expected)


def test_extend_finds_rows_where_the_starts_say() -> None:
    batch = batch_of([30, 20])
    query, key, value = fresh(8, batch, 2)
    swapped = extend(batch, [4, 4], query, key, value, starts=[4, 0])
    order = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    in_order = extend(batch, [4, 4], query[order], key[order], value[order])
    assert torch.equal(swapped[order], in_order)


def test_extend_that_is_not_causal_sees_the_whole_sequence() -> None:
    batch = batch_of([30, 12])
    query, key, value = fresh(10, batch, 2)
    output = extend(batch, [6, 4], query, key, value, causal=False)
    everything = torch.ones(2, 6, 6, dtype=torch.bool)
    first = extended(batch.only(0), [6], query[:6], key[:6], value[:6], everything)
    assert_near(output[:6], first)
    second = extended(batch.only(1), [4], query[6:], key[6:], value[6:], everything[:, :4, :4])
    assert_near(output[6:], second)


@st.composite
def trees(draw: st.DrawFn) -> Tensor:
    """Bool ``[sequences, width, width]``: node i sees its ancestors and itself."""
    sequences, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    masks = torch.eye(width, dtype=torch.bool).repeat(sequences, 1, 1)
    for mask in masks:
        for node in range(1, width):
            mask[node] |= mask[draw(st.integers(0, node - 1))]
    return masks


@settings(max_examples=40)
@given(trees(), st.integers(1, 2), st.sampled_from([torch.bool, torch.uint8]))
def test_extend_with_a_tree_sees_only_ancestors(
    tree: Tensor, group: int, dtype: torch.dtype
) -> None:
    sequences, width = tree.shape[:2]
    batch = batch_of([20 + 7 * i + width for i in range(sequences)])
    query, key, value = fresh(sequences * width, batch, group)
    output = extend(batch, [width] * sequences, query, key, value, tree.flatten().to(dtype))
    assert_near(output, extended(batch, [width] * sequences, query, key, value, tree))


def test_a_chain_is_the_tree_without_branches() -> None:
    batch = batch_of([30, 45])
    query, key, value = fresh(8, batch, 2)
    chain = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    expected = extend(batch, [4, 4], query, key, value)
    assert torch.equal(extend(batch, [4, 4], query, key, value, chain.flatten()), expected)


def test_a_tree_needs_the_same_width_everywhere() -> None:
    batch = batch_of([30, 45])
    query, key, value = fresh(7, batch, 2)
    with pytest.raises(ValueError, match="same number of draft tokens"):
        extend(batch, [4, 3], query, key, value, torch.ones(25, dtype=torch.bool))


def test_a_large_prefill_is_split_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of([90, 40, 75])
    widths = [90, 0, 60]
    query, key, value = fresh(150, batch, 2)
    whole = extend(batch, widths, query, key, value)
    monkeypatch.setattr(_tiles, "LARGEST_MASK", 100)
    monkeypatch.setattr(_tiles, "QUERY_RUN", 32)
    batch.table.add_(0)  # so that the tiles are made again
    split = extend(batch, widths, query, key, value)
    assert torch.equal(split, whole)
    assert_near(split, extended(batch, widths, query, key, value, None))


# What exactness of speculative decoding rests on.
LONG = [3, 17, 31, 33, 64, 100, 161, 191, 193, 250, 300, 385, 500, 511, 513, 530, 700, 1100]


@pytest.mark.parametrize("group", [1, 2, 4])
def test_decode_has_the_same_bits_in_any_company(group: int) -> None:
    batch = batch_of(LONG, size=32)
    query, key, value = fresh(len(LONG), batch, group)
    together = decode(batch, query, key, value)
    for i in range(len(LONG)):
        alone = decode(batch.only(i), query[i : i + 1], key[i : i + 1], value[i : i + 1])
        assert torch.equal(alone[0], together[i]), LONG[i]


@pytest.mark.parametrize("size", [16, 64, 128])
def test_decode_has_the_same_bits_at_any_head_size(size: int) -> None:
    lengths = [5, 63, 200, 300, 430]
    batch = batch_of(lengths, size=size)
    query, key, value = fresh(5, batch, 2)
    together = decode(batch, query, key, value)
    for i in range(5):
        alone = decode(batch.only(i), query[i : i + 1], key[i : i + 1], value[i : i + 1])
        assert torch.equal(alone[0], together[i]), lengths[i]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 16, 17, 33, 65])
@pytest.mark.parametrize("length", [70, 199, 385, 512, 540])
def test_a_token_has_the_same_bits_drafted_prefilled_and_decoded(length: int, width: int) -> None:
    batch = batch_of([length, 1000])
    query, key, value = fresh(width + 3, batch, 2)
    wide = extend(batch, [width, 3], query, key, value)
    new = batch.rows(0)[-width:]
    batch.k_cache[new], batch.v_cache[new] = key[:width], value[:width]
    for step in (0, width // 2, width - 1):
        one = batch.only(0)
        one.lengths = torch.tensor([length - width + step + 1])
        row = slice(step, step + 1)
        assert torch.equal(decode(one, query[row], key[row], value[row]), wide[row]), step


def test_tiles_follow_lengths_and_table_changed_in_place() -> None:
    batch = batch_of([40, 50])
    query, key, value = fresh(2, batch, 2)
    batches, outputs = [], []
    for change in (
        lambda: None,
        lambda: batch.lengths.sub_(7),
        lambda: batch.table.copy_(batch.table.roll(-1, 1)),
        lambda: batch.requests.copy_(batch.requests.flip(0)),
    ):
        change()
        batches.append(batch_copy(batch))
        outputs.append(decode(batch, query, key, value))
    for copy, output in zip(batches, outputs, strict=True):
        assert torch.equal(decode(copy, query, key, value), output)


def batch_copy(batch: Batch) -> Batch:
    """The same batch in tensors that no memo has seen."""
    parts = (batch.k_cache, batch.v_cache, batch.table, batch.requests, batch.lengths)
    return Batch(*(part.clone() for part in parts))


UNSUPPORTED: dict[str, dict[str, object]] = {
    "logit soft-capping": {"logit_cap": 30.0},
    "cross attention": {"is_cross": True},
    "sliding windows": {"window": 5},
    "attention sinks": {"sinks": torch.zeros(4)},
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_what_is_missing_is_refused_by_name(feature: str) -> None:
    batch = batch_of([10])
    query, key, value = fresh(1, batch, 2)
    with pytest.raises(NotImplementedError, match=feature):
        decode(batch, query, key, value, other=UNSUPPORTED[feature])
    with pytest.raises(NotImplementedError, match=feature):
        extend(batch, [1], query, key, value, other=UNSUPPORTED[feature])


@pytest.mark.parametrize("width", [1, 3])
def test_rows_that_the_metadata_do_not_describe_are_left_out(width: int) -> None:
    """SGLang pads a rank's batch after it has planned the attention of the real rows."""
    batch, spare = batch_of([5, 9]), 4
    padded = torch.cat([batch.requests, torch.zeros(spare, dtype=torch.long)])
    query, key, value = (torch.randn(2 * width + spare, heads, 32) for heads in (4, 2, 2))
    outputs = []
    for rows, requests in ((2 * width, batch.requests), (2 * width + spare, padded)):
        output = torch.zeros(rows, 4, 32)
        extend_attention_cpu(
            query[:rows], key[:rows], value[:rows], output, batch.k_cache, batch.v_cache, 1.0, 1.0,
            batch.table, requests, batch.lengths, torch.tensor([width] * 2),
            torch.tensor([0, width]), width, SCALE, 0.0, False, 0, None, None, None, True,
        )  # fmt: skip
        outputs.append(output)
    assert torch.equal(outputs[1][: 2 * width], outputs[0])
    assert outputs[1][2 * width :].isnan().all()


def test_a_padded_decode_attends_from_the_sequences_that_it_describes() -> None:
    batch = batch_of([5, 9])
    padded, query = torch.cat([batch.requests, torch.zeros(2).long()]), torch.randn(4, 4, 32)
    outputs = []
    for rows, requests in ((2, batch.requests), (4, padded)):
        output = torch.zeros(rows, 4, 32)
        decode_attention_cpu(
            query[:rows], batch.k_cache, batch.v_cache, 1.0, 1.0, output, None, None,
            torch.zeros(rows).long(), torch.empty(0), batch.table, requests, batch.lengths, SCALE,
            0.0, False, 0, None, None,
        )  # fmt: skip
        outputs.append(output)
    assert torch.equal(outputs[1][:2], outputs[0])
    assert outputs[1][2:].isnan().all()
