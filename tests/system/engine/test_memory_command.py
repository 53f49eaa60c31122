"""`python -m engine_shim.preflight.memory`, run as an operator does, against numbers of paper."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine import DFLASH, DRAFT, TARGET, environment, fork_engine
from tests.support.model_configurations import latent_model, plain_model

pytestmark = [pytest.mark.slow]

COMMAND = "engine_shim.preflight.memory"
PATIENCE_SECONDS = 240.0
EAGLE3 = (
    "--model-path", str(TARGET), "--context-length", "2048", "--device", "cuda",
    "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(DRAFT),
)  # fmt: skip
GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "8", "--max-running-requests", "8")
GAMMAS = {"SPECULATION_GAMMAS": "0,1,3,7"}
MIB = 2**20

Row = tuple[str, ...]


def ran(folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Exit code and all output."""
    log = folder / "output"
    process = fork_engine(COMMAND, options, folder, GAMMAS | variables, log)
    return process.wait(PATIENCE_SECONDS), log.read_text()


def rows(output: str) -> dict[str, tuple[float, ...]]:
    """The table: batch, graphs, backends, tables, total by draft length, and the sums."""
    lines = re.findall(r"^ +(\d+|sum)((?: +[\d.]+)+)$", output, re.MULTILINE)
    return {name: tuple(map(float, numbers.split())) for name, numbers in lines}


def expected(*lengths: tuple[int, int, float, float, float]) -> dict[str, tuple[float, ...]]:
    """What `rows` is to be of (length, batch, graphs, backends, tables)."""
    expected_rows = {
        str(gamma): (batch, graphs, backends, tables, graphs + backends + tables)
        for gamma, batch, graphs, backends, tables in lengths
    }
    sums = tuple(sum(row[column] for row in expected_rows.values()) for column in range(1, 5))
    return expected_rows | {"sum": sums}


def assert_rows(output: str, *lengths: tuple[int, int, float, float, float]) -> None:
    measured_rows, wanted = rows(output), expected(*lengths)
    assert measured_rows.keys() == wanted.keys(), output
    for name, row in wanted.items():
        assert measured_rows[name] == pytest.approx(row, abs=0.11), output


# FlashInfer with this target: a workspace of 512 MiB, and wrappers of 8 MiB, eight to verify and to
# read and two for each further pass; four of those have lengths of 128 KiB.
BUILT = {0: 576.5, 1: 576.5, 7: 576.5 + 6 * 16}


def flashinfer_tables(gamma: int, *sizes: int) -> float:
    """Indices and masks, rows of indices to draft, and wrappers for each graph."""
    batch, further = max(sizes), max(0, gamma - 1)
    indices = 2 * batch * (gamma + 1) * 2048 * 5 + (gamma if further else 0) * batch * 2048 * 4
    return indices / MIB + len(sizes) * (2 * 8.125 + further * 8)


def test_with_flashinfer(tmp_path: Path) -> None:
    code, output = ran(tmp_path, *EAGLE3, *GRAPHS, "--attention-backend", "flashinfer")
    assert code == 0, output
    assert_rows(output, *((g, 8, 16, BUILT[g], flashinfer_tables(g, 1, 2, 8)) for g in (0, 1, 7)))
    assert "for each draft length beside 3, with which the engine starts." in output
    assert "Attention backends: flashinfer (target), flashinfer (drafter)." in output
    assert re.search(r"^--mem-fraction-static [\d.]+: chosen", output, re.MULTILINE)
    # The engine's log says the same in one sentence.
    total = rows(output)["sum"][-1]
    assert re.search(
        rf"{total:.0f} MiB are kept free for the draft lengths other than 3 \(MiB by", output
    )


def test_a_lookup_keeps_the_tokens_of_all_requests(tmp_path: Path) -> None:
    options = ("--attention-backend", "triton", "--max-running-requests", "1000")
    code, output = ran(tmp_path, *EAGLE3, *options, SPECULATION_LOOKUP="1")
    assert code == 0, output
    (lookup_mib,) = re.findall(r"^MiB for prompt lookup: ([\d.]+)$", output, re.MULTILINE)
    # Of a row for each request and one for padding: the context and some tokens behind it.
    context = 1001 * 2048 * 4 / MIB
    assert 64 + context < float(lookup_mib) < 64 + 1.1 * context


def test_without_graphs_flashinfer_keeps_its_workspaces(tmp_path: Path) -> None:
    options = ("--attention-backend", "flashinfer", "--disable-cuda-graph")
    code, output = ran(tmp_path, *EAGLE3, *options)
    assert code == 0, output
    assert_rows(output, *((g, 0, 0, BUILT[g], 0) for g in (0, 1, 7)))


def test_a_limit_takes_off_what_is_not_captured(tmp_path: Path) -> None:
    options = (*EAGLE3, *GRAPHS, "--attention-backend", "flashinfer")
    code, output = ran(tmp_path, *options, SPECULATION_GRAPH_LIMITS="1:7,7:0")
    assert code == 0, output
    assert_rows(
        output,
        (0, 8, 16, BUILT[0], flashinfer_tables(0, 1, 2, 8)),
        (1, 2, 4, BUILT[1], flashinfer_tables(1, 1, 2)),
        (7, 0, 0, BUILT[7], 0),
    )


# Heads, partial results of a token, and numbers of a value.
PLAIN, HALF, LATENT = (4, 8, 32), (2, 8, 32), (16, 256, 512)


def triton_tables(
    gamma: int,
    target: tuple[int, int, int],
    drafter: tuple[int, int, int],
    context: int = 2048,
) -> float:
    """For a batch of 8, in MiB."""
    tokens, further = 8 * (gamma + 1), max(0, gamma - 1)
    table_bytes = 2 * tokens * context * 8 + (gamma if further else 0) * 8 * context * 8
    table_bytes += tokens * (context + gamma + 1)
    for passes, rows, (heads, splits, value) in (
        (1, tokens, target),
        (1, tokens, drafter),
        (further, 8, drafter),
    ):
        results = rows * heads * splits * (value + 1) * 4
        table_bytes += passes * (results + 160 * (16 * (value + 2) + 1) * 4)
    return table_bytes / MIB


@pytest.mark.parametrize(("ranks", "shape"), [("1", PLAIN), ("2", HALF)])
def test_with_triton(tmp_path: Path, ranks: str, shape: tuple[int, int, int]) -> None:
    options = ("--attention-backend", "triton", "--tp-size", ranks)
    code, output = ran(tmp_path, *EAGLE3, *GRAPHS, *options)
    assert code == 0, output
    assert_rows(output, *((g, 8, 16, 0, triton_tables(g, shape, shape)) for g in (0, 1, 7)))


def test_a_drafter_of_another_kind_has_sizes_of_its_own(tmp_path: Path) -> None:
    models = str(latent_model(tmp_path / "latent")), str(plain_model(tmp_path / "plain"))
    code, output = ran(
        tmp_path, "--model-path", models[0], "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", models[1], "--device", "cuda", *GRAPHS,
        "--attention-backend", "triton",
    )  # fmt: skip
    assert code == 0, output
    assert_rows(output, *((g, 8, 16, 0, triton_tables(g, LATENT, PLAIN, 32768)) for g in (0, 1, 7)))


# With FlashInfer for prefill and fa3 for decoding; pages of one token.
FA3 = (4 * 8 * 2048 * 4 + 3 * 2048 * 8) / MIB


@pytest.mark.parametrize(
    ("mode", "named", "backends", "tables"),
    [
        # Both are captured in the target; FlashInfer reads for the drafter.
        (
            "prefill",
            "flashinfer+fa3 (drafter)",
            512 + 64.5,
            [flashinfer_tables(g, 1, 2, 8) + FA3 for g in (0, 1)]
            + [2 * 64 * 2048 * 5 / MIB + 3 * 2 * 8.125 + 7 * FA3],
        ),
        # What decodes verifies and reads; FlashInfer is built for prefill only.
        ("decode", "fa3 (drafter)", 512 + 32.25, [2 * FA3, 2 * FA3, 8 * FA3]),
    ],
)
def test_with_two_backends_in_the_target(
    tmp_path: Path, mode: str, named: str, backends: float, tables: list[float]
) -> None:
    code, output = ran(
        tmp_path, *EAGLE3, *GRAPHS, "--prefill-attention-backend", "flashinfer",
        "--decode-attention-backend", "fa3", "--speculative-attention-mode", mode,
    )  # fmt: skip
    assert code == 0, output
    assert f"flashinfer+fa3 (target), {named}." in output
    lengths = zip((0, 1, 7), tables, strict=True)
    assert_rows(output, *((g, 8, 16, backends, size) for g, size in lengths))


def test_a_deterministic_engine_has_larger_workspaces(tmp_path: Path) -> None:
    options = ("--attention-backend", "flashinfer", "--disable-cuda-graph")
    code, output = ran(tmp_path, *EAGLE3, *options, "--enable-deterministic-inference")
    assert code == 0, output
    assert_rows(output, *((g, 0, 0, BUILT[g] - 512 + 2048, 0) for g in (0, 1, 7)))


def test_larger_pages_make_smaller_tables(tmp_path: Path) -> None:
    options = ("--attention-backend", "fa3", "--page-size", "16")
    code, output = ran(tmp_path, *EAGLE3, *options)
    assert code == 0, output
    each = (4 * 48 * 128 * 4 + 3 * 128 * 8) / MIB
    assert_rows(output, *((g, 48, 96, 0, max(2, g + 1) * each) for g in (0, 1, 7)))


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        # SGLang's default of requests at once; a limit between two of the sizes.
        ((), 48),
        (("--cuda-graph-bs-decode", "1", "2", "8", "--max-running-requests", "5"), 5),
    ],
)
def test_with_flash_attention_and_the_requests_that_sglang_allows(
    tmp_path: Path, options: tuple[str, ...], batch: int
) -> None:
    code, output = ran(tmp_path, *EAGLE3, *options, "--attention-backend", "fa3")
    assert code == 0, output
    # Four tables of a page for each token and three rows, for each of gamma + 1.
    each = (4 * batch * 2048 * 4 + 3 * 2048 * 8) / MIB
    assert_rows(output, *((g, batch, 2 * batch, 0, max(2, g + 1) * each) for g in (0, 1, 7)))
    # The engine reserves it before SGLang limits the requests, and says the same.
    assert f"{rows(output)['sum'][-1]:.0f} MiB are kept free for the draft lengths" in output


def test_with_latent_attention(tmp_path: Path) -> None:
    model = latent_model(tmp_path / "latent")
    options = ("--speculative-algorithm", "NEXTN", "--device", "cuda", "--model-path", str(model))
    code, output = ran(tmp_path, *options, *GRAPHS, "--attention-backend", "flashinfer")
    assert code == 0, output
    # The workspace is shared.  Wrappers of 8 MiB: four to verify, four to read, two for each
    # further pass; and for each of three graphs one, but none to read, of which there is none.
    indices = 8 * 32768 * 4 / MIB
    assert_rows(
        output,
        (0, 8, 16, 64, indices + 3 * 8),
        (1, 8, 16, 64, indices + 3 * 8),
        (7, 8, 16, 64 + 6 * 16, 8 * indices + 7 * 3 * 8),
    )


def test_with_a_block_drafter_draft_lengths_have_no_backends_of_it(tmp_path: Path) -> None:
    options = (
        "--model-path", str(TARGET), "--context-length", "2048", "--device", "cuda",
        "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DFLASH),
        "--attention-backend", "flashinfer", "--disable-cuda-graph",
    )  # fmt: skip
    code, output = ran(tmp_path, *options)
    assert code == 0, output
    assert "Attention backends: flashinfer (target)." in output
    assert_rows(output, *((g, 0, 0, 512 + 4 * 8.0 + 0.25, 0) for g in (0, 1, 7)))


def test_a_share_that_was_given_leaves_no_room(tmp_path: Path) -> None:
    options = ("--attention-backend", "triton", "--mem-fraction-static", "0.8")
    code, output = ran(tmp_path, *EAGLE3, *options)
    assert code == 0, output
    assert "--mem-fraction-static 0.8: set by the user, so SGLang reserves no memory" in output


@pytest.mark.parametrize(
    ("options", "variables", "says"),
    [
        (
            (*EAGLE3, "--speculative-num-steps", "4"),
            {},
            "memory: UnsupportedEngineError: --speculative-num-steps 4 is not among",
        ),
        (
            ("--model-path", "/no/such/model", *EAGLE3[2:]),
            {},
            "memory: OSError: ",
        ),
        (EAGLE3, {"SPECULATION_GAMMAS": "x"}, "memory: PluginError: SPECULATION_GAMMAS='x'"),
        ((*EAGLE3, "--no-such-option"), {}, "error: unrecognized arguments: --no-such-option"),
    ],
)
def test_what_is_refused_ends_with_its_reason(
    tmp_path: Path, options: tuple[str, ...], variables: dict[str, str], says: str
) -> None:
    code, output = ran(tmp_path, *options, **variables)
    assert code == 2
    assert says in output
    assert "Traceback" not in output


def test_the_table_goes_to_standard_output_and_the_reason_to_standard_error(
    tmp_path: Path,
) -> None:
    # In an interpreter of its own, as in a shell.
    process = subprocess.run(
        [sys.executable, "-m", COMMAND, *EAGLE3, "--attention-backend", "nonsense"],
        env=environment(tmp_path, GAMMAS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stdout == ""
    assert "argument --attention-backend: invalid choice: 'nonsense'" in process.stderr
