"""Shapes that cannot be are refused; those that can know what they read."""

import math

import pytest

from controller.core.model_shapes import (
    DrafterKind,
    DrafterShape,
    Experts,
    GroupedQueryAttention,
    InvalidShapeError,
    LatentAttention,
    LinearAttention,
    ModelShape,
)
from tests.support.drafting import state_bytes

GQA = GroupedQueryAttention(query_heads=32, kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("build", "fault"),
    [
        (lambda: GroupedQueryAttention(32, 5, 128), "evenly"),
        (lambda: GroupedQueryAttention(32, 0, 128), "kv_heads 0"),
        (lambda: LatentAttention(128, 0, 64), "latent_dim 0"),
        (lambda: LinearAttention(math.nan, 1.0), "state_bytes nan"),
        (lambda: LinearAttention(1.0, -1.0), "token_flops -1.0"),
        (lambda: Experts(1, 8, 9, 0, 100), "9 of 8 experts"),
        (lambda: Experts(1, 8, 2, -1, 100), "shared -1"),
        (lambda: ModelShape(64, 100, (), 1000), "at least one layer"),
        (lambda: ModelShape(64, 100, ((GQA, 0),), 1000), "at least one layer"),
        (lambda: ModelShape(64, 100, ((GQA, 1),), 0), "dense_params 0"),
        (lambda: ModelShape(64, 100, ((GQA, 1),), 10, bytes_per_weight=math.inf), "inf"),
        (lambda: DrafterShape(DrafterKind.MTP), "dense_params above 0"),
        (lambda: DrafterShape(DrafterKind.DFLASH, 100), "block_size 0"),
        (lambda: DrafterShape(DrafterKind.MTP, 100, block_size=4), "block_size 4"),
        (lambda: DrafterShape(DrafterKind.NGRAM, 100), "no parameters"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_its_fault(build, fault):
    with pytest.raises(InvalidShapeError, match=fault):
        build()


def test_layers_of_each_kind_add_up():
    shape = ModelShape(64, 100, ((GQA, 4), (LinearAttention(1000.0, 10.0), 12)), 5000)
    assert shape.kv_bytes_per_token == 4 * (2 * 8 * 128) * 2
    assert state_bytes(shape) == 12_000
    assert shape.active_params == 5000 + 64 * 100


def test_a_latent_cache_is_far_smaller_than_a_grouped_one():
    # 128 heads that share a latent of 512 and 64 rotary dimensions: 576 elements a token.
    latent = LatentAttention(query_heads=128, latent_dim=512, rope_dim=64)
    assert latent.context_elements == 576
    assert latent.context_elements < GQA.context_elements


@pytest.mark.parametrize(
    ("drafter", "passes"),
    [
        (DrafterShape(DrafterKind.MTP, 100), [0, 1, 2, 3]),
        (DrafterShape(DrafterKind.STANDALONE, 100), [0, 1, 2, 3]),
        (DrafterShape(DrafterKind.DFLASH, 100, block_size=4), [0, 1, 1, 1]),
        (DrafterShape(DrafterKind.NGRAM), [0, 0, 0, 0]),
    ],
    ids=lambda value: value.kind.value if isinstance(value, DrafterShape) else "",
)
def test_a_draft_takes_as_many_passes_as_its_kind_says(drafter, passes):
    assert [drafter.passes(gamma) for gamma in range(4)] == passes


def test_a_block_cannot_draft_past_its_end():
    with pytest.raises(InvalidShapeError, match="block of 4 cannot draft 5"):
        DrafterShape(DrafterKind.DFLASH, 100, block_size=4).passes(5)
