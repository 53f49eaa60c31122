"""What SGLang's own configuration makes of the plugin, without starting an engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import DFLASH, DRAFT, TARGET, fork_engine

pytestmark = [pytest.mark.slow]

PROBE = "tests.unit.engine_shim.sglang.resolve_probe"
PATIENCE_SECONDS = 240.0

COMMON = {
    "model_path": str(TARGET),
    "device": "cpu",
    "dtype": "float32",
    "disable_cuda_graph": True,
}
EAGLE3 = COMMON | {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": str(DRAFT),
}
LONE = COMMON | {
    "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": str(DFLASH),
}
ATTENTION_DP = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
ACCEPTED: dict[str, dict[str, Any]] = {
    "only the algorithm": EAGLE3,
    "chosen steps": EAGLE3 | {"speculative_num_steps": 5},
    "static flags": EAGLE3
    | {
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3,
    },
    "adaptive by hand": EAGLE3 | {"speculative_adaptive": True},
    "nextn": EAGLE3 | {"speculative_algorithm": "NEXTN"},
    "dflash": LONE,
    "dflash with its block": LONE | {"speculative_num_draft_tokens": 8},
    "breakable prefill graphs": EAGLE3 | {"cuda_graph_backend_prefill": "breakable"},
    "full decode graphs": EAGLE3 | {"cuda_graph_backend_decode": "full"},
    "data-parallel attention": EAGLE3 | ATTENTION_DP,
    "adapters that are switched off": EAGLE3 | {"enable_lora": False, "lora_paths": ["a=b"]},
}
FULL_PREFILL = "--cuda-graph-backend-prefill is full: these graphs belong to one draft length"
LORA = "LoRA is on (--enable-lora, --lora-paths): SGLang prepares adapters for one draft length"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no speculation": (COMMON, "--speculative-algorithm is None"),
    "another algorithm": (
        COMMON | {"speculative_algorithm": "NGRAM"},
        "--speculative-algorithm is NGRAM",
    ),
    "own file": (
        EAGLE3 | {"speculative_adaptive": True, "speculative_adaptive_config": "own.json"},
        "--speculative-adaptive-config and SPECULATION_SIDECAR exclude each other",
    ),
    "trees": (EAGLE3 | {"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
    "other steps": (
        EAGLE3 | {"speculative_num_steps": 4},
        "--speculative-num-steps 4 is not among SPECULATION_GAMMAS 0,1,2,3,5,7",
    ),
    "pipeline parallel": (EAGLE3 | {"pp_size": 2}, "--pipeline-parallel-size 2: only 1"),
    "data-parallel attention with dflash": (
        LONE | ATTENTION_DP,
        "data-parallel attention cannot be steered: a DFlash drafter is untested with it",
    ),
    "data-parallel attention for decode": (
        EAGLE3 | ATTENTION_DP | {"disaggregation_mode": "decode"},
        "--disaggregation-mode is untested with it",
    ),
    "data-parallel attention with local control": (
        EAGLE3 | ATTENTION_DP | {"enable_dp_attention_local_control_broadcast": True},
        "--enable-dp-attention-local-control-broadcast keeps plans from the other ranks",
    ),
    "data parallel": (EAGLE3 | {"dp_size": 2}, "--data-parallel-size 2: only 1 is supported"),
    "dflash with a window": (
        LONE | {"speculative_draft_window_size": 64},
        "--speculative-draft-window-size is untested",
    ),
    "dflash with logit processors": (
        LONE | {"enable_custom_logit_processor": True},
        "--enable-custom-logit-processor: SGLang applies such processors where DFLASH verifies",
    ),
    "dflash without a model": (
        COMMON | {"speculative_algorithm": "DFLASH"},
        "--speculative-algorithm DFLASH needs --speculative-draft-model-path",
    ),
    "dflash for prefill": (
        LONE | {"disaggregation_mode": "decode"},
        "--disaggregation-mode does not hand over its cache",
    ),
    "full prefill graphs": (EAGLE3 | {"cuda_graph_backend_prefill": "full"}, FULL_PREFILL),
    "full prefill graphs as JSON": (
        EAGLE3 | {"cuda_graph_config": {"prefill": {"backend": "full"}}},
        FULL_PREFILL,
    ),
    "full prefill graphs with dflash": (
        LONE | {"cuda_graph_backend_prefill": "full"},
        FULL_PREFILL,
    ),
    "lora": (
        EAGLE3 | {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]},
        LORA,
    ),
    "adapters": (EAGLE3 | {"lora_paths": ["name=path"]}, LORA),
    "two-batch overlap": (
        EAGLE3 | {"enable_two_batch_overlap": True},
        "enable_two_batch_overlap=True is not supported",
    ),
}


def resolve(
    folder: Path, asked: dict[str, dict[str, Any]], **variables: str
) -> dict[str, dict[str, Any]]:
    folder.joinpath("asked.json").write_text(json.dumps(list(asked.values())))
    log = folder / "log"
    probe = fork_engine(PROBE, ["asked.json", "found.json"], folder, variables, log)
    assert probe.wait(PATIENCE_SECONDS) == 0, log.read_text()[-4000:]
    results: list[dict[str, Any]] = json.loads(folder.joinpath("found.json").read_text())
    return dict(zip(asked, results, strict=True))


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("resolution")
    asked = ACCEPTED | {name: arguments for name, (arguments, _) in REFUSED.items()}
    return resolve(folder, asked, SPECULATION_SIDECAR="unix:/nowhere")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("only the algorithm", 3),
        ("chosen steps", 5),
        ("static flags", 2),
        ("adaptive by hand", 3),
        ("nextn", 3),
        ("dflash", 3),
        ("dflash with its block", 3),
        ("breakable prefill graphs", 3),
        ("full decode graphs", 3),
        ("data-parallel attention", 3),
        ("adapters that are switched off", 3),
    ],
)
def test_adaptive_mode_is_switched_on(
    resolved: dict[str, dict[str, Any]], name: str, steps: int
) -> None:
    assert resolved[name] == {
        "speculative_adaptive": True,
        "speculative_algorithm": "EAGLE3"
        if ACCEPTED[name]["speculative_algorithm"] == "EAGLE3"
        else "EAGLE",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_steered_is_refused(resolved: dict[str, dict[str, Any]], name: str) -> None:
    error = resolved[name].get("error", "it was accepted")
    assert error.startswith("UnsupportedEngineError: ")
    assert REFUSED[name][1] in error


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("SPECULATION_DFLASH_MODEL_PATH", str(DFLASH), "a DFlash drafter is untested with it"),
        ("SPECULATION_SIGNALS_FOLDER", "/tmp", "SPECULATION_SIGNALS_FOLDER is untested with it"),
        ("SPECULATION_LOOKUP", "1", "SPECULATION_LOOKUP would have an idle rank draft"),
        ("SPECULATION_ONLINE_UPDATES", "1", "SPECULATION_ONLINE_UPDATES is untested with it"),
    ],
)
def test_with_data_parallel_attention_what_is_untested_is_refused(
    tmp_path: Path, variable: str, value: str, reason: str
) -> None:
    asked = {"it": EAGLE3 | ATTENTION_DP}
    variables = {"SPECULATION_SIDECAR": "unix:/nowhere", variable: value}
    assert reason in resolve(tmp_path, asked, **variables)["it"].get("error", "it was accepted")


CONTEXT = 1 << 18
LONG = EAGLE3 | {"json_model_override_args": json.dumps({"max_position_embeddings": CONTEXT})}
DECODE = LONG | {"disaggregation_mode": "decode"}
# With the rows of SGLang's request pool, of which one is for padding.
LOOKED_UP: dict[str, tuple[dict[str, Any], int]] = {
    "by default": (LONG, 49),
    "many": (LONG | {"max_running_requests": 200}, 201),
    # Two for each that another server is still sending.
    "few that decode": (DECODE | {"max_running_requests": 16}, 49),
    "few that decode, and three": (
        DECODE | {"max_running_requests": 16, "disaggregation_decode_extra_slots": 3},
        20,
    ),
    "many that decode": (DECODE | {"max_running_requests": 64}, 65),
}


def test_memory_is_left_for_the_tokens_of_a_lookup(tmp_path: Path) -> None:
    device_mib = 8000
    steered = {
        "DEVICE_MIB": str(device_mib),
        "SPECULATION_SIDECAR": "unix:/x",
    }
    asked = {name: arguments for name, (arguments, _) in LOOKED_UP.items()}
    plain_results = resolve(tmp_path, asked, **steered)
    lookup_results = resolve(tmp_path, asked, **steered, SPECULATION_LOOKUP="1")
    for name, (_, rows) in LOOKED_UP.items():
        less = (
            plain_results[name]["mem_fraction_static"] - lookup_results[name]["mem_fraction_static"]
        )
        # All contexts with some tokens behind them, and 64 MiB for a search.
        least = 64 + rows * CONTEXT * 4 / 2**20
        rounding = 0.0011 * device_mib
        assert least - rounding <= less * device_mib <= 1.01 * least + rounding, name


DEVICE_MIB = 24 * 1024
GRAPHS = EAGLE3 | {"disable_cuda_graph": False}
MEMORY = {
    "chosen by SGLang": GRAPHS,
    "chosen by the user": GRAPHS | {"mem_fraction_static": 0.5},
    "without graphs": EAGLE3,
}


@pytest.mark.parametrize(
    ("limits", "further", "signals"),
    # The sum of the largest batches of the draft lengths beside the first, in full batches; and
    # MiB of the device for training signals.
    [("", [1, 1, 1, 1, 1], 0), ("5:8,7:4", [1, 1, 1, 8, 4], 1000)],
)
def test_memory_is_left_for_the_graphs_of_every_draft_length(
    tmp_path: Path, limits: str, further: list[int], signals: int
) -> None:
    card = {"DEVICE_MIB": str(DEVICE_MIB)}
    steered = card | {"SPECULATION_SIDECAR": "unix:/x", "SPECULATION_GRAPH_LIMITS": limits}
    collecting = 0.0
    if signals:
        steered["SPECULATION_SIGNALS_FOLDER"] = str(tmp_path)
        steered["SPECULATION_SIGNALS_DEVICE_MEGABYTES"] = str(signals)
        # Their intermediate results take 64 MiB.
        collecting = (signals + 64) / DEVICE_MIB
    alone, ours = resolve(tmp_path, MEMORY, **card), resolve(tmp_path, MEMORY, **steered)
    batch = alone["chosen by SGLang"]["largest_graph_batch"]
    assert batch > 8
    own = alone["without graphs"]["mem_fraction_static"]
    own -= alone["chosen by SGLang"]["mem_fraction_static"]
    # SGLang's rule for one set of graphs, which is ours for every other.
    assert own == pytest.approx(2 * batch / DEVICE_MIB, abs=0.0011)
    sequences = sum(batch if size == 1 else size for size in further)
    less = {
        name: alone[name]["mem_fraction_static"] - ours[name]["mem_fraction_static"]
        for name in MEMORY
    }
    # Beside the graphs are the tables of the attention backends, which are small here.
    graphs = 2 * sequences / DEVICE_MIB + collecting
    assert graphs - 0.0011 <= less["chosen by SGLang"] <= graphs + 0.005
    assert less["chosen by SGLang"] > 0.004
    assert less["chosen by the user"] == 0
    assert less["without graphs"] == pytest.approx(collecting, abs=0.0011)
