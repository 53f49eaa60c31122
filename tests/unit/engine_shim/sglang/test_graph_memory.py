"""What a draft length takes, against numbers calculated by hand, and the facts behind them."""

from dataclasses import replace

import pytest

from engine_shim.sglang.api.versions import TESTED
from engine_shim.sglang.graph_memory import AttentionShape, reserve
from tests.support.installed_wheel import unpacked

SHAPE = AttentionShape("flashinfer", "flashinfer", 4096, 384 * 2**20, 32, 128, 8)


def test_flashinfer_has_a_workspace_for_each_draft_length() -> None:
    found = reserve(3, 8, SHAPE)
    # 8 * 4 tokens * 4096 * 5 bytes twice, and 3 rows of 8 * 4096 * 4 bytes.
    assert (found.graphs, found.workspace) == (16.0, 384.0)
    assert found.tables == pytest.approx(0.625 + 0.625 + 0.375)
    assert found.total == pytest.approx(401.625)


def test_triton_has_masks_and_partial_results_instead() -> None:
    found = reserve(3, 8, replace(SHAPE, target="triton", draft="triton"))
    assert (found.graphs, found.workspace) == (16.0, 0.0)
    # Indices: 1 and 0.75 + 1 MiB; the mask: 32 * 4100 bytes; a token's results: 132096 bytes.
    results = (32 + 2 * 8 + 32) * 132096
    assert found.tables == pytest.approx(2.75 + (32 * 4100 + results) / 2**20)


def test_other_backends_have_page_tables_only() -> None:
    found = reserve(3, 8, replace(SHAPE, target="fa3", draft="fa3"))
    assert found.workspace == 0
    assert found.tables == pytest.approx(4 * 8 * 4096 * 4 / 2**20)


def test_a_draft_length_without_graphs_still_has_its_workspace() -> None:
    found = reserve(7, 0, SHAPE)
    assert (found.graphs, found.workspace, found.tables) == (0, 384, 0)


@pytest.mark.parametrize("version", TESTED)
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("environ.py", "SGLANG_FLASHINFER_WORKSPACE_SIZE = EnvInt(384 * 1024 * 1024)"),
        ("layers/attention/flashinfer_backend.py", "_SIZE.set(512 * 1024 * 1024)"),
        ("layers/attention/flashinfer_backend.py", "_SIZE.set(2048 * 1024 * 1024)"),
        ("layers/attention/flashinfer_backend.py", "(max_num_tokens * self.max_context_len)"),
        ("layers/attention/triton_backend.py", "(max_num_tokens * self.max_context_len)"),
        ("speculative/eagle_worker_v2.py", "init_new_workspace=True"),
        ("arg_groups/memory_hook.py", "decode_cuda_graph_config.max_bs * 2"),
    ],
)
def test_sglang_allocates_what_the_sizes_follow_from(version: str, path: str, says: str) -> None:
    assert says in (unpacked(version) / "sglang" / "srt" / path).read_text()
