"""What each rank holds of a parameter is what SGLang's loaders would give it."""

from typing import Any

import pytest
import torch

from engine_shim.sglang.learning.rank_shares import Piece, Shard, find_shard
from engine_shim.sglang.training.students import UnsupportedDrafterError

WIDTH = 6


class Layer(torch.nn.Module):
    """What SGLang's layers say of themselves, on a rank; they are built in its processes only."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        vars(self).update(facts)


class ColumnParallelLinear(Layer): ...


class MergedColumnParallelLinear(ColumnParallelLinear): ...


class QKVParallelLinear(ColumnParallelLinear): ...


class RowParallelLinear(Layer): ...


class VocabParallelEmbedding(Layer): ...


def qkv(ranks: int, heads: int = 4, kv_heads: int = 2, head_size: int = 3) -> torch.nn.Module:
    return QKVParallelLinear(
        head_size=head_size,
        v_head_size=head_size,
        total_num_heads=heads,
        total_num_kv_heads=kv_heads,
        num_heads=heads // ranks,
        num_kv_heads=max(1, kv_heads // ranks),
        num_kv_head_replicas=max(1, ranks // kv_heads),
    )


def embedding(ranks: int, rows: int, added: int = 0) -> torch.nn.Module:
    return VocabParallelEmbedding(
        num_added_embeddings=added,
        num_embeddings_padded=rows,
        num_embeddings_per_partition=rows // ranks,
    )


# The whole's rows that each rank holds, or its columns.
CASES = {
    "qkv": (qkv(2), 2, 24, [[*range(6), *range(12, 15), *range(18, 21)],
                            [*range(6, 12), *range(15, 18), *range(21, 24)]]),
    "kv heads on several ranks": (
        qkv(4, heads=4, kv_heads=2), 4, 24,
        [[0, 1, 2, 12, 13, 14, 18, 19, 20], [3, 4, 5, 12, 13, 14, 18, 19, 20],
         [6, 7, 8, 15, 16, 17, 21, 22, 23], [9, 10, 11, 15, 16, 17, 21, 22, 23]],
    ),
    "gate and up": (
        MergedColumnParallelLinear(output_sizes=[4, 4], output_partition_sizes=[2, 2]),
        2, 8, [[0, 1, 4, 5], [2, 3, 6, 7]],
    ),
    "column": (
        ColumnParallelLinear(output_size=4, output_size_per_partition=2),
        2, 4, [[0, 1], [2, 3]],
    ),
    "embedding": (embedding(2, 8), 2, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
}  # fmt: skip


@pytest.mark.parametrize(("module", "ranks", "rows", "held"), CASES.values(), ids=CASES)
def test_rows_are_divided(module: Any, ranks: int, rows: int, held: list[list[int]]) -> None:
    whole = torch.arange(rows * WIDTH).view(rows, WIDTH)
    shard = find_shard(module, "weight", ranks)
    parts = [shard.cut(whole, rank) for rank in range(ranks)]
    assert [part[:, 0].div(WIDTH).int().tolist() for part in parts] == held
    assert torch.equal(shard.join(parts), whole)
    assert shard.whole_shape(parts[-1]) == list(whole.shape)


def test_columns_are_divided_and_a_bias_is_not() -> None:
    module = RowParallelLinear(input_size=WIDTH, input_size_per_partition=WIDTH // 2)
    shard = find_shard(module, "weight", 2)
    whole = torch.arange(4 * WIDTH).view(4, WIDTH)
    parts = [shard.cut(whole, rank) for rank in range(2)]
    assert parts[1].tolist() == whole[:, 3:].tolist()
    assert torch.equal(shard.join(parts), whole)
    assert find_shard(module, "bias", 2) == Shard()


def test_padding_belongs_to_no_share() -> None:
    """A head of 5 tokens in 8 rows: the second rank has one of them, and three of padding."""
    shard = find_shard(embedding(2, 8), "weight", 2).trim_length(5)
    held = [torch.arange(4), torch.tensor([4, -1, -1, -1])]
    assert shard.join(held).tolist() == [0, 1, 2, 3, 4]
    assert shard.trim_padding(held[1], 1).tolist() == [4]
    assert shard.cut(torch.arange(5), 1).tolist() == [4]
    # And a third and fourth rank would have nothing of 2 tokens.
    shard = Shard(0, (Piece(2, 2),))
    assert shard.cut(torch.arange(2), 3).tolist() == []


def test_what_every_rank_holds_is_not_divided() -> None:
    module = torch.nn.Linear(4, 4)
    assert find_shard(module, "weight", 2) == find_shard(embedding(1, 8), "weight", 2) == Shard()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (embedding(4, 8), "its VocabParallelEmbedding is not divided by the number of ranks, 2"),
        (embedding(2, 8, added=1), "rows for added tokens"),
    ],
)
def test_other_divisions_are_refused(module: Any, reason: str) -> None:
    with pytest.raises(UnsupportedDrafterError, match=reason):
        find_shard(module, "weight", 2)
