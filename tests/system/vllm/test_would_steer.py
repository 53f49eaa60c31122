"""`speculation-would-steer` beside the real vLLM: what it says is what a start comes to."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import TARGET
from tests.support.vllm_engine import eagle3
from tests.system.vllm.test_refusals import GAMMAS, HYBRID, SIZES, run

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ("serve", str(TARGET), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512")


@pytest.fixture(scope="module")
def cli_results(
    draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """Exit code and output of each command line."""
    speculation = eagle3(draft)

    def asked(*flags: str, **changes: Any) -> list[str]:
        config = json.dumps(speculation | changes)
        return ["vllm", "-o", "json", "--", *FLAGS, "--speculative-config", config, *flags]

    folder = tmp_path_factory.mktemp("cases")
    folder.joinpath("config.json").write_text(json.dumps(SIZES | HYBRID))
    lookup = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 7}
    recurrent = [
        "vllm", "-o", "json", "--", "serve", str(folder), "--skip-tokenizer-init", *FLAGS[2:],
        "--max-num-seqs", "16", "--speculative-config", json.dumps(lookup),
    ]  # fmt: skip
    cases = {
        "recurrent, as installed": recurrent,
        "recurrent, with 0.31.0": recurrent,
        "steered": asked("--max-num-seqs", "16"),
        "plain": ["vllm", "-o", "json", "--", "vllm", *FLAGS],
        "data parallel": asked("--data-parallel-size", "2", "--max-num-seqs", "2"),
        "shorter": asked(num_speculative_tokens=5),
        "own schedule": asked(num_speculative_tokens_per_batch_size=[[1, 8, 3]]),
        "misspelt": asked("--max-num-seq", "16", "--no-such"),
        "no model": ["vllm", "--", "serve", "/no/such", *FLAGS[2:]],
    }
    folder.joinpath("asked.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("would_steer_cases.py")
    files = str(folder / "asked.json"), str(folder / "found.json")
    done = run(str(script), *files, SPECULATION_GAMMAS=GAMMAS, SPECULATION_SIDECAR="")
    assert done.returncode == 0, done.stderr[-3000:]
    result_by_case: dict[str, tuple[int, str]] = json.loads(
        folder.joinpath("found.json").read_text()
    )
    return result_by_case


def obstacles(cli_results: dict[str, tuple[int, str]], case: str) -> dict[str, str]:
    code, output = cli_results[case]
    report = json.loads(output)
    assert code == (0 if report["would_be_steered"] else 1)
    return {one["topic"]: one["obstacle"] for one in report["checks"] if one["obstacle"]}


def test_an_engine_that_would_be_steered(cli_results: dict[str, tuple[int, str]]) -> None:
    assert obstacles(cli_results, "steered") == {}
    report = json.loads(cli_results["steered"][1])
    assert [(one["name"], one["gammas"]) for one in report["drafters"]] == [
        ("eagle3", [0, 1, 3, 7])
    ]
    assert report["facts"]["largest batch"] == "16"
    assert report["facts"]["model runner"] == "1"
    drafts = report["facts"]["drafts in a step"]
    assert drafts == "as many as asked for; at a draft length of 0, the first pass"
    assert report["variables"]["SPECULATION_GAMMAS"] == GAMMAS


# test_refusals.py has the same of vLLM's own start.
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("plain", {"method": "there is no --speculative-config"}),
        (
            "data parallel",
            {
                "data parallelism": "data_parallel_size is 2: vLLM allows one draft length only",
                "draft lengths": "max_num_seqs is 2: vLLM can prepare one draft length",
            },
        ),
        ("shorter", {"draft lengths": "SPECULATION_GAMMAS is 0,1,3,7, but num_speculative_tok"}),
        ("recurrent, as installed", {}),
        ("recurrent, with 0.31.0", {"layers of the target": "the target has recurrent layers"}),
        ("own schedule", {"schedule of draft lengths": "num_speculative_tokens_per_batch_size"}),
    ],
)
def test_every_obstacle_is_named(
    cli_results: dict[str, tuple[int, str]], case: str, expected: dict[str, str]
) -> None:
    obstacles_by_topic = obstacles(cli_results, case)
    assert obstacles_by_topic.keys() == expected.keys()
    for topic, start in expected.items():
        assert obstacles_by_topic[topic].startswith(start)


@pytest.mark.parametrize("case", ["misspelt", "no model"])
def test_flags_that_vllm_refuses_are_bad_input(
    cli_results: dict[str, tuple[int, str]], case: str
) -> None:
    code, output = cli_results[case]
    assert (code, output) == (2, "")
