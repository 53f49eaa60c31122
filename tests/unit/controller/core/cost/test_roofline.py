"""The unmeasured cost: what can never fall, its limits, and the kinds of drafters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost.roofline import (
    Device,
    Overlap,
    device_from_data_sheet,
    experts_touched,
    kv_token_seconds,
    prior_grid,
    step_seconds,
)
from controller.core.engine_spec import Arm
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
from tests.support.drafting import draft_seconds

H100 = device_from_data_sheet("H100")
MTP = DrafterShape(DrafterKind.MTP, dense_params=300_000_000)
DFLASH = DrafterShape(DrafterKind.DFLASH, dense_params=900_000_000, block_size=16)
NGRAM = DrafterShape(DrafterKind.NGRAM)
# Llama-3.1-8B: 32 layers, hidden 4,096, 32 query and 8 key/value heads, SwiGLU 14,336.
LLAMA = ModelShape(
    hidden_size=4096,
    vocabulary_size=128_256,
    attention=((GroupedQueryAttention(query_heads=32, kv_heads=8, head_dim=128), 32),),
    dense_params=32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14_336),
)


@st.composite
def experts(draw):
    count = draw(st.integers(1, 512))
    return Experts(
        layers=draw(st.integers(1, 64)),
        experts=count,
        experts_per_token=draw(st.integers(1, count)),
        shared=draw(st.integers(0, 2)),
        params_per_expert=draw(st.integers(1, 10**8)),
    )


@st.composite
def models(draw):
    kv_heads = draw(st.integers(1, 8))
    kinds = [
        GroupedQueryAttention(kv_heads * draw(st.integers(1, 16)), kv_heads, 128),
        LatentAttention(draw(st.integers(1, 128)), 512, 64),
        LinearAttention(draw(st.floats(1.0, 1e8)), draw(st.floats(0.0, 1e8))),
    ]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3, unique=True))
    return ModelShape(
        hidden_size=draw(st.integers(64, 16_384)),
        vocabulary_size=draw(st.integers(100, 250_000)),
        attention=tuple((kind, draw(st.integers(1, 80))) for kind in chosen),
        dense_params=draw(st.integers(1, 10**12)),
        experts=draw(st.none() | experts()),
        bytes_per_weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
        bytes_per_kv=draw(st.sampled_from([1.0, 2.0])),
    )


drafters = st.sampled_from([MTP, DFLASH, NGRAM, DrafterShape(DrafterKind.STANDALONE, 10**9)])
devices = st.builds(
    Device,
    st.just("any"),
    st.floats(1e12, 1e16),
    st.floats(1e11, 1e13),
    st.floats(0.0, 1e-2),
    st.floats(0.0, 1e-2),
)
overlaps = st.sampled_from(Overlap)


@given(models(), drafters, devices, overlaps, st.floats(0.0, 1e7))
@settings(max_examples=120, deadline=None)
def test_a_step_never_gets_cheaper_with_batch_gamma_or_context(shape, drafter, gpu, overlap, kv):
    batch, gammas = [1, 2, 3, 17, 256, 4096], list(range(17))
    seconds = step_seconds(shape, drafter, gpu, batch, gammas, kv, overlap)
    assert seconds.shape == (17, 6)
    assert np.isfinite(seconds).all()
    assert (seconds > 0).all()
    slack = 1e-12 * seconds.max()
    assert (np.diff(seconds, axis=0) >= -slack).all()
    assert (np.diff(seconds, axis=1) >= -slack).all()
    longer = step_seconds(shape, drafter, gpu, batch, gammas, 2 * kv + 1, overlap)
    assert (longer >= seconds - slack).all()


@given(models(), drafters, devices, st.floats(0.0, 1e7))
@settings(max_examples=60, deadline=None)
def test_overlap_saves_something_between_nothing_and_half(shape, drafter, gpu, kv):
    apart = step_seconds(shape, drafter, gpu, [1, 64, 4096], [0, 3, 16], kv, Overlap.KERNELS)
    whole = step_seconds(shape, drafter, gpu, [1, 64, 4096], [0, 3, 16], kv, Overlap.STEP)
    # sum(max(c, m)) lies between max(sum c, sum m) and sum c + sum m, twice that at most.
    assert (whole <= apart * (1 + 1e-12)).all()
    assert (apart <= 2 * whole * (1 + 1e-12)).all()


@given(experts(), st.integers(1, 10**6))
def test_experts_touched_rise_from_at_most_k_to_all_of_them(moe, tokens):
    one, some, more = experts_touched(moe, [1, tokens, tokens + 1])
    assert 0 < one <= moe.experts_per_token * (1 + 1e-9)
    assert one <= some * (1 + 1e-12)
    assert some <= more * (1 + 1e-12)
    assert some <= min(moe.experts, tokens * moe.experts_per_token) * (1 + 1e-9)


def test_experts_touched_reach_their_limits():
    moe = Experts(40, 256, 8, 1, 3_145_728)
    assert experts_touched(moe, 1) == pytest.approx(256 * (1 - (255 / 256) ** 8))
    # At the knee, E / k tokens, about 1 - 1/e of the experts are in use.
    assert experts_touched(moe, 32) == pytest.approx(256 * (1 - np.exp(-1)), rel=0.01)
    assert experts_touched(moe, 10_000) == pytest.approx(256)
    assert experts_touched(Experts(1, 1, 1, 0, 10), [1, 5]).tolist() == [1, 1]


@pytest.mark.parametrize("batch", [1, 64, 2048])
def test_a_serial_draft_costs_gamma_times_one_pass(batch):
    seconds = draft_seconds(MTP, H100, [batch], range(9))[:, 0]
    np.testing.assert_allclose(seconds, np.arange(9) * seconds[1], rtol=1e-12)
    assert seconds[1] > 0


@pytest.mark.parametrize("batch", [1, 64, 2048])
def test_a_block_draft_costs_the_same_at_every_gamma_above_zero(batch):
    seconds = draft_seconds(DFLASH, H100, [batch], range(17))[:, 0]
    assert seconds[0] == 0
    assert set(seconds[1:]) == {seconds[1]}


def test_looking_tokens_up_costs_nothing():
    assert not draft_seconds(NGRAM, H100, [1, 512], range(9)).any()


def test_a_small_model_of_its_own_pays_for_its_own_context():
    small = DrafterShape(DrafterKind.STANDALONE, 10**9, kv_bytes_per_token=1e5)
    short, long = (draft_seconds(small, H100, [1], [4], kv)[0, 0] for kv in (0, 10**6))
    assert long - short == pytest.approx(4 * 1e5 * 1e6 / H100.bandwidth)


def test_overheads_come_once_a_step_and_once_a_pass():
    gpu = Device("one", 1e15, 1e12, step_overhead_seconds=1.0, pass_overhead_seconds=0.1)
    plain = Device("one", 1e15, 1e12)
    added = step_seconds(LLAMA, MTP, gpu, [8], [0, 1, 4]) - step_seconds(
        LLAMA, MTP, plain, [8], [0, 1, 4]
    )
    np.testing.assert_allclose(added[:, 0], [1.0, 1.1, 1.4])
    added = step_seconds(LLAMA, DFLASH, gpu, [8], [0, 4]) - step_seconds(
        LLAMA, DFLASH, plain, [8], [0, 4]
    )
    np.testing.assert_allclose(added[:, 0], [1.0, 1.1])


def intensity(kind, width, context):
    """FLOPs a byte of one layer in bf16."""
    read = 2 * (kind.context_elements * context + kind.query_elements * width)
    return kind.pair_flops * width * context / read


def test_grouped_attention_stays_memory_bound_far_beyond_any_draft():
    # "Adaptive speculative decoding": 16 query heads on 2, so 8 T, and a ridge at T of about 35.
    gqa = GroupedQueryAttention(query_heads=16, kv_heads=2, head_dim=256)
    ridge = device_from_data_sheet("B200").ridge
    assert intensity(gqa, 1, 10**7) == pytest.approx(8, rel=1e-3)
    assert intensity(gqa, 17, 10**7) == pytest.approx(8 * 17, rel=1e-3)
    crossing = next(t for t in range(1, 100) if intensity(gqa, t, 10**7) > ridge)
    assert crossing == pytest.approx(35, abs=1)


def test_latent_attention_is_compute_bound_from_the_second_token_on():
    # Same source: MLA crossed the ridge at T = 2.
    mla = LatentAttention(query_heads=128, latent_dim=512, rope_dim=64)
    ridge = device_from_data_sheet("B200").ridge
    assert intensity(mla, 1, 10**7) < ridge < intensity(mla, 2, 10**7)


def test_context_grows_dearer_with_gamma_under_mla_only():
    def rates(kind):
        shape = ModelShape(2048, 1000, ((kind, 10),), 10**9)
        return [
            kv_token_seconds(shape, NGRAM, device_from_data_sheet("B200"), gamma)
            for gamma in (0, 8)
        ]

    gqa = rates(GroupedQueryAttention(16, 2, 256))
    mla = rates(LatentAttention(128, 512, 64))
    assert gqa[0] == gqa[1]
    assert mla[1] > 5 * mla[0]


def test_the_context_rate_is_what_a_long_context_adds_to_a_step():
    kv = np.array([10**7, 2 * 10**7])
    for gamma in (0, 5):
        seconds = [step_seconds(LLAMA, MTP, H100, [4], [gamma], float(x))[0, 0] for x in kv]
        slope = (seconds[1] - seconds[0]) / (kv[1] - kv[0])
        assert kv_token_seconds(LLAMA, MTP, H100, gamma) == pytest.approx(slope, rel=1e-6)


def test_the_context_rate_is_within_a_percent_of_the_measured_one():
    # Fitted on an H100 with Llama-3.1-8B (SpecDecode-Bench): 3.926e-8 s a token.
    assert kv_token_seconds(LLAMA, NGRAM, H100, 0) == pytest.approx(3.92645679e-8, rel=0.01)


def test_a_step_is_a_lower_bound_of_the_measured_one():
    # The same fit: verification at batch 1, without the engine's overhead.
    measured = 5.88590713e-3 + 2.10103129e-5
    bound = step_seconds(LLAMA, NGRAM, H100, [1], [0])[0, 0]
    assert 0.7 * measured < bound < measured


def test_the_prior_is_the_step_at_no_context_for_every_arm_and_bucket():
    arms = [Arm("mtp", 0), Arm("mtp", 3), Arm("dflash", 8)]
    shapes = {"mtp": MTP, "dflash": DFLASH}
    grid, rate = prior_grid(arms, shapes, (1, 8, 256), LLAMA, H100)
    assert grid.shape == (3, 3)
    for i, arm in enumerate(arms):
        alone = step_seconds(LLAMA, shapes[arm.drafter], H100, (1, 8, 256), [arm.gamma])
        np.testing.assert_array_equal(grid[i], alone[0])
    assert rate == kv_token_seconds(LLAMA, MTP, H100, 0)


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda: step_seconds(LLAMA, MTP, H100, [0], [1]), "batch sizes"),
        (lambda: step_seconds(LLAMA, MTP, H100, [], [1]), "batch sizes"),
        (lambda: step_seconds(LLAMA, MTP, H100, [1], [-1]), "a draft of -1"),
        (lambda: step_seconds(LLAMA, DFLASH, H100, [1], [17]), "cannot draft 17"),
        (lambda: step_seconds(LLAMA, MTP, H100, [1, 2], [1], [5.0]), "kv_tokens of shape"),
        (lambda: step_seconds(LLAMA, MTP, H100, [1], [1], -5.0), "not negative"),
        (lambda: step_seconds(LLAMA, MTP, H100, [1], [1], float("nan")), "finite"),
        (lambda: prior_grid([Arm("x", 1)], {"mtp": MTP}, (1,), LLAMA, H100), "drafter 'x'"),
        (lambda: prior_grid([], {}, (1,), LLAMA, H100), "at least one arm"),
    ],
)
def test_what_cannot_be_priced_is_refused_with_its_fault(call, fault):
    with pytest.raises(InvalidShapeError, match=fault):
        call()
