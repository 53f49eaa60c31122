"""What a draft length takes, against numbers calculated by hand, and the facts behind them."""

import re
from dataclasses import replace
from importlib.metadata import requires

import pytest

from engine_shim.sglang.api.sglang_api import DEFAULT_REQUESTS
from engine_shim.sglang.api.versions import TESTED
from engine_shim.sglang.memory import (
    Attention,
    AttentionShape,
    DrafterAttention,
    Prediction,
    reserve,
)
from tests.support.installed_wheel import unpacked

MODEL = Attention(
    latent=False, context=4096, page=1, heads=32, all_heads=32, value_size=128, kv_splits=8,
    cache_numbers=0, cache_bytes=2, requests=48, workspace=384 * 2**20, windowed=False,
)  # fmt: skip
SIZES = (1, 2, 8)


def shape(name: str, model: Attention = MODEL) -> AttentionShape:
    return AttentionShape(model, (name,), (name,), DrafterAttention(model, name, name))


def test_flashinfer_has_workspaces_with_and_without_graphs() -> None:
    found = reserve(3, SIZES, shape("flashinfer"))
    assert (found.batch, found.graphs) == (8, 16.0)
    # A workspace; eight wrappers to verify and to read, two for each of two further passes, and the
    # lengths of four.
    backends = 384 + 8 * 8 + 2 * 2 * 8 + 4 * 0.125
    assert found.backends == pytest.approx(backends)
    # Indices and a mask twice, 8 * 4 tokens * 4096 * 5 bytes; 3 rows of 8 * 4096 * 4 bytes; for
    # each of three sizes four wrappers, two of which have lengths.
    tables = 2 * 0.625 + 0.375 + 3 * (4 * 8 + 2 * 0.125)
    assert found.tables == pytest.approx(tables)
    assert found.total == pytest.approx(16 + backends + tables)
    eager = reserve(3, (), shape("flashinfer"))
    assert (eager.batch, eager.graphs, eager.tables) == (0, 0, 0)
    assert eager.backends == pytest.approx(backends)


def test_triton_has_masks_and_partial_results_and_nothing_without_graphs() -> None:
    found = reserve(3, SIZES, shape("triton"))
    # Indices: 1 MiB to verify, 1 to read, 0.75 to draft; the mask: 32 * 4100 bytes; a token's
    # results: 132096 bytes; the persistent kernel's: 160 * (16 * 130 + 1) * 4 bytes, four times.
    lean = 160 * 2081 * 4
    results = (32 + 32 + 2 * 8) * 132096 + 4 * lean
    assert found.tables == pytest.approx(2.75 + (32 * 4100 + results) / 2**20)
    assert found.backends == 0
    assert reserve(3, (), shape("triton")).total == 0


def test_flash_attention_has_page_tables() -> None:
    found = reserve(3, SIZES, shape("fa3"))
    # Four instances with four tables of 8 * 4096 * 4 bytes and three rows of 4096 * 8 bytes.
    assert (found.backends, found.tables) == (0, 4 * (4 * 0.125 + 3 * 0.03125))
    in_pages = reserve(3, SIZES, shape("fa3", replace(MODEL, page=64)))
    assert in_pages.tables == found.tables / 64


@pytest.mark.parametrize("name", ["flashinfer", "triton", "fa3", "trtllm_mha", "intel_amx"])
def test_a_limit_takes_off_what_is_not_captured(name: str) -> None:
    whole, limited = reserve(5, SIZES, shape(name)), reserve(5, (1, 2), shape(name))
    assert whole.graphs - limited.graphs == 2 * (8 - 2)
    assert whole.tables > limited.tables
    assert whole.backends == limited.backends


def test_one_drafted_token_needs_no_further_passes() -> None:
    one, none = (reserve(gamma, (), shape("flashinfer")) for gamma in (1, 0))
    assert one.backends == none.backends == 384 + 8 * 8 + 4 * 0.125


def test_a_block_drafter_has_no_backends_of_a_draft_length() -> None:
    alone = replace(shape("flashinfer"), drafter=None)
    assert reserve(7, (), alone).backends == 384 + 4 * 8 + 2 * 0.125
    assert reserve(7, (), alone).total == reserve(0, (), alone).total


def test_of_two_backends_of_the_target_both_are_built() -> None:
    both = replace(shape("fa3"), built=("flashinfer", "fa3"), captured=("fa3",))
    found = reserve(1, SIZES, both)
    assert found.backends == 384 + 4 * 8 + 2 * 0.125
    assert found.tables == reserve(1, SIZES, shape("fa3")).tables
    captured = reserve(1, SIZES, replace(both, captured=("flashinfer", "fa3")))
    # Indices and a mask of 8 * 2 tokens, and three wrappers.
    assert captured.tables - found.tables == pytest.approx(16 * 4096 * 5 / 2**20 + 3 * 8.125)


def test_models_with_a_sliding_window_count_their_tables_twice() -> None:
    windowed = replace(MODEL, windowed=True)
    for name in ("triton", "trtllm_mha", "intel_amx"):
        plain = reserve(0, SIZES, shape(name)).tables
        assert reserve(0, SIZES, shape(name, windowed)).tables == 2 * plain
    assert not shape("triton", windowed).exact


def test_the_log_has_one_sentence_with_backends_lengths_and_sum() -> None:
    draft = DrafterAttention(MODEL, "fa3", "fa3")
    found = AttentionShape(MODEL, ("flashinfer",), ("flashinfer",), draft)
    prediction = Prediction(found, 3, tuple(reserve(gamma, (), found) for gamma in (0, 7)))
    assert str(prediction) == (
        "832 MiB are left for the draft lengths beside 3 (MiB by length: 0: 416, 7: 416), for the "
        "attention backends flashinfer (target), fa3 (drafter)"
    )
    parts = {"collecting training signals": 320.0, "prompt lookup": 64.25}
    assert replace(prediction, parts=parts).total == prediction.total + 384.25
    assert "7: 416, and 320.0 for collecting training signals, and 64.2 for prompt lookup)" in str(
        replace(prediction, parts=parts)
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
        ("arg_groups/speculative_hook.py", f"max_running_requests={DEFAULT_REQUESTS}"),
    ],
)
def test_sglang_allocates_what_the_sizes_follow_from(version: str, path: str, says: str) -> None:
    assert says in (unpacked(version) / "sglang" / "srt" / path).read_text()


def test_the_wrappers_were_read_off_the_flashinfer_that_sglang_requires() -> None:
    required = [line for line in requires("sglang") or () if "flashinfer" in line.lower()]
    assert any(re.search(r"flashinfer.python.*==0\.7\.2", line) for line in required), required
