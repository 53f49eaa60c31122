"""What a draft length takes, against numbers calculated by hand, and the facts behind them."""

import re
from dataclasses import replace
from importlib.metadata import requires

import pytest

from engine_shim.sglang.api.sglang_api import DEFAULT_MAX_REQUESTS
from engine_shim.sglang.api.versions import TESTED
from engine_shim.sglang.memory import (
    Attention,
    AttentionShape,
    DrafterAttention,
    Prediction,
    predict_reserve,
)
from tests.support.installed_wheel import unpack_sglang

MODEL = Attention(
    is_latent=False, context_tokens=4096, page_tokens=1, rank_heads=32, total_heads=32,
    value_size=128, kv_splits=8,
    latent_values=0, bytes_per_value=2, max_requests=48, workspace_bytes=384 * 2**20,
    has_sliding_window=False,
)  # fmt: skip
SIZES = (1, 2, 8)


def shape(name: str, model: Attention = MODEL) -> AttentionShape:
    return AttentionShape(model, (name,), (name,), DrafterAttention(model, name, name))


def test_flashinfer_has_workspaces_with_and_without_graphs() -> None:
    reservation = predict_reserve(3, SIZES, shape("flashinfer"))
    assert (reservation.batch, reservation.graphs) == (8, 16.0)
    # A workspace; eight wrappers to verify and to read, two for each of two further passes, and the
    # lengths of four.
    backends = 384 + 8 * 8 + 2 * 2 * 8 + 4 * 0.125
    assert reservation.backends == pytest.approx(backends)
    # Indices and a mask twice, 8 * 4 tokens * 4096 * 5 bytes; 3 rows of 8 * 4096 * 4 bytes; for
    # each of three sizes four wrappers, two of which have lengths.
    tables = 2 * 0.625 + 0.375 + 3 * (4 * 8 + 2 * 0.125)
    assert reservation.tables == pytest.approx(tables)
    assert reservation.total_mib == pytest.approx(16 + backends + tables)
    eager = predict_reserve(3, (), shape("flashinfer"))
    assert (eager.batch, eager.graphs, eager.tables) == (0, 0, 0)
    assert eager.backends == pytest.approx(backends)


def test_triton_has_masks_and_partial_results_and_nothing_without_graphs() -> None:
    reservation = predict_reserve(3, SIZES, shape("triton"))
    # Indices: 1 MiB to verify, 1 to read, 0.75 to draft; the mask: 32 * 4100 bytes; a token's
    # results: 132096 bytes; the persistent kernel's: 160 * (16 * 130 + 1) * 4 bytes, four times.
    lean = 160 * 2081 * 4
    results = (32 + 32 + 2 * 8) * 132096 + 4 * lean
    assert reservation.tables == pytest.approx(2.75 + (32 * 4100 + results) / 2**20)
    assert reservation.backends == 0
    assert predict_reserve(3, (), shape("triton")).total_mib == 0


def test_flash_attention_has_page_tables() -> None:
    reservation = predict_reserve(3, SIZES, shape("fa3"))
    # Four instances with four tables of 8 * 4096 * 4 bytes and three rows of 4096 * 8 bytes.
    assert (reservation.backends, reservation.tables) == (0, 4 * (4 * 0.125 + 3 * 0.03125))
    in_pages = predict_reserve(3, SIZES, shape("fa3", replace(MODEL, page_tokens=64)))
    assert in_pages.tables == reservation.tables / 64


@pytest.mark.parametrize("name", ["flashinfer", "triton", "fa3", "trtllm_mha", "intel_amx"])
def test_a_limit_takes_off_what_is_not_captured(name: str) -> None:
    whole, limited = predict_reserve(5, SIZES, shape(name)), predict_reserve(5, (1, 2), shape(name))
    assert whole.graphs - limited.graphs == 2 * (8 - 2)
    assert whole.tables > limited.tables
    assert whole.backends == limited.backends


def test_one_drafted_token_needs_no_further_passes() -> None:
    one, none = (predict_reserve(gamma, (), shape("flashinfer")) for gamma in (1, 0))
    assert one.backends == none.backends == 384 + 8 * 8 + 4 * 0.125


def test_a_block_drafter_has_no_backends_of_a_draft_length() -> None:
    alone = replace(shape("flashinfer"), drafter=None)
    assert predict_reserve(7, (), alone).backends == 384 + 4 * 8 + 2 * 0.125
    assert predict_reserve(7, (), alone).total_mib == predict_reserve(0, (), alone).total_mib


def test_of_two_backends_of_the_target_both_are_built() -> None:
    both = replace(shape("fa3"), backend_names=("flashinfer", "fa3"), graph_backend_names=("fa3",))
    reservation = predict_reserve(1, SIZES, both)
    assert reservation.backends == 384 + 4 * 8 + 2 * 0.125
    assert reservation.tables == predict_reserve(1, SIZES, shape("fa3")).tables
    captured = predict_reserve(1, SIZES, replace(both, graph_backend_names=("flashinfer", "fa3")))
    # Indices and a mask of 8 * 2 tokens, and three wrappers.
    assert captured.tables - reservation.tables == pytest.approx(16 * 4096 * 5 / 2**20 + 3 * 8.125)


def test_models_with_a_sliding_window_count_their_tables_twice() -> None:
    windowed = replace(MODEL, has_sliding_window=True)
    for name in ("triton", "trtllm_mha", "intel_amx"):
        plain = predict_reserve(0, SIZES, shape(name)).tables
        assert predict_reserve(0, SIZES, shape(name, windowed)).tables == 2 * plain
    assert not shape("triton", windowed).is_exact


def test_the_log_has_one_sentence_with_backends_lengths_and_sum() -> None:
    draft = DrafterAttention(MODEL, "fa3", "fa3")
    attention_shape = AttentionShape(MODEL, ("flashinfer",), ("flashinfer",), draft)
    prediction = Prediction(
        attention_shape, 3, tuple(predict_reserve(gamma, (), attention_shape) for gamma in (0, 7))
    )
    assert str(prediction) == (
        "832 MiB are kept free for the draft lengths other than 3 (MiB by length: 0: 416, 7: 416), "
        "for the attention backends flashinfer (target), fa3 (drafter)"
    )
    parts = {"collecting training signals": 320.0, "prompt lookup": 64.25}
    assert replace(prediction, parts_mib=parts).total_mib == prediction.total_mib + 384.25
    assert "7: 416, and 320.0 for collecting training signals, and 64.2 for prompt lookup)" in str(
        replace(prediction, parts_mib=parts)
    )
    approximated = replace(prediction, shape=shape("intel_amx"))
    assert str(approximated).endswith("intel_amx (drafter), whose sizes are approximated")


@pytest.mark.parametrize("version", TESTED)
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("environ.py", "SGLANG_FLASHINFER_WORKSPACE_SIZE = EnvInt(384 * 1024 * 1024)"),
        ("layers/attention/flashinfer_backend.py", "_SIZE.set(512 * 1024 * 1024)"),
        ("layers/attention/flashinfer_backend.py", "_SIZE.set(2048 * 1024 * 1024)"),
        ("speculative/eagle_worker_v2.py", "init_new_workspace=True"),
        ("arg_groups/memory_hook.py", "decode_cuda_graph_config.max_bs * 2"),
        ("arg_groups/speculative_hook.py", f"max_running_requests={DEFAULT_MAX_REQUESTS}"),
    ],
)
def test_sglang_allocates_what_the_sizes_follow_from(version: str, path: str, says: str) -> None:
    assert says in (unpack_sglang(version) / "sglang" / "srt" / path).read_text()


def test_the_wrappers_were_read_off_the_flashinfer_that_sglang_requires() -> None:
    required = [line for line in requires("sglang") or () if "flashinfer" in line.lower()]
    assert any(re.search(r"flashinfer.python.*==0\.7\.2", line) for line in required), required
