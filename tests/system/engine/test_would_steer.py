"""`speculation-would-steer` beside the real SGLang: what it says is what a start comes to."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.cpu_engine.engine_command import MODELS
from lab.harness.scripted_sidecar import scripted_sidecar
from tests.support.answering import serve_answers
from tests.support.engine import (
    DEEP,
    DFLASH,
    DFLASH_ONLY,
    DRAFT,
    EAGLE3,
    ROOT,
    TARGET,
    environment,
    fork_engine,
    running_engine,
)
from tests.support.eventually import eventually
from tests.system.engine.test_engine_refusals import last_words

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

COMMAND = "engine_shim.preflight"
PATIENCE_SECONDS = 240.0
MODEL = ("--model-path", str(TARGET), "--context-length", "2048")
GAMMAS = (0, 1, 3, 7)


def ran(folder: Path, *words: str, module: str = COMMAND, **settings: str) -> tuple[int, str]:
    """Exit code and all output.  settings: SPECULATION_*."""
    variables = {f"SPECULATION_{name.upper()}": value for name, value in settings.items()}
    process = fork_engine(module, words, folder, {"COLUMNS": "80"} | variables, folder / "output")
    return process.wait(PATIENCE_SECONDS), (folder / "output").read_text()


def document(output: str) -> dict[str, Any]:
    """The answer, without what a forked interpreter says behind it on standard error."""
    parsed, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    assert isinstance(parsed, dict)
    return parsed


def answer(folder: Path, flags: Sequence[str], **settings: str) -> dict[str, Any]:
    code, output = ran(folder, "sglang", "-o", "json", "--", *MODEL, *flags, **settings)
    answer_document = document(output)
    assert code == (0 if answer_document["would_be_steered"] else 1)
    return answer_document


def obstacles(answer_document: dict[str, Any]) -> dict[str, str]:
    return {one["topic"]: one["obstacle"] for one in answer_document["checks"] if one["obstacle"]}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        # Refused before SGLang resolves anything, by what it has resolved, and by its checkpoint.
        ((*EAGLE3, "--speculative-eagle-topk", "4"), {}),
        ((*EAGLE3, "--lora-paths", "name=path"), {}),
        (EAGLE3, {"dflash_model_path": str(DRAFT)}),
        ((*DFLASH_ONLY, "--speculative-num-draft-tokens", "4"), {}),
        (DFLASH_ONLY, {"gammas": "0,1,3"}),
    ],
)
def test_what_it_says_is_what_a_start_is_refused_with(
    tmp_path: Path, flags: tuple[str, ...], settings: dict[str, str]
) -> None:
    obstacle_names = obstacles(answer(tmp_path, flags, **settings))
    (obstacle,) = obstacle_names.values()
    assert obstacle in last_words(tmp_path, flags, **settings)


def edited(folder: Path, drafter: Path, **changes: Any) -> Path:
    """A copy of a drafter, whose config.json says something else."""
    shutil.copytree(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["PEagleDraftModel"]},
        # What a drafter of another target has, found before the target's weights are read.
        {"target_hidden_size": 256},
    ],
)
def test_a_drafter_that_does_not_fit_ends_the_start_with_the_same_words(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    draft = edited(tmp_path / "draft", DRAFT, **changes)
    flags = (*EAGLE3[:2], "--speculative-draft-model-path", str(draft))
    (obstacle,) = obstacles(answer(tmp_path, flags)).values()
    words = last_words(tmp_path, flags)
    assert obstacle in words
    assert "Load weight begin" not in words


@pytest.mark.nightly
def test_a_drafter_that_names_no_layers_reads_the_default_ones(tmp_path: Path) -> None:
    """SGLang's drafter takes an empty list for three layers, its targets for none."""
    named = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True}
    draft = edited(tmp_path / "draft", MODELS / "draft-mixed", eagle_config=named)
    flags = (*DEEP, *EAGLE3[:2], "--speculative-draft-model-path", str(draft))
    nobody = {"SPECULATION_SIDECAR": f"unix:{tmp_path / 'absent.sock'}"}
    with running_engine(tmp_path, flags, nobody) as engine:
        (answer,) = engine.generate([list(range(5, 40))], [16])
    assert len(answer.tokens) == 16


@pytest.mark.nightly
def test_a_drafter_under_the_wrong_algorithm_serves_and_the_log_says_so(tmp_path: Path) -> None:
    flags = ("--speculative-algorithm", "EAGLE", *EAGLE3[2:])
    (obstacle,) = obstacles(answer(tmp_path, flags)).values()
    nobody = {"SPECULATION_SIDECAR": f"unix:{tmp_path / 'absent.sock'}"}
    with running_engine(tmp_path, flags, nobody) as engine:
        assert obstacle in engine.log.read_text()


def test_it_names_every_obstacle_at_once(tmp_path: Path) -> None:
    many = ("--pp-size", "2", "--dp-size", "2", "--speculative-eagle-topk", "4")
    answer_document = answer(tmp_path, (*EAGLE3, *many, "--speculative-num-steps", "4"))
    assert obstacles(answer_document).keys() == {
        "topk", "draft lengths", "pipeline parallelism", "data parallelism",
    }  # fmt: skip
    assert answer_document["memory"] is None
    settled = obstacles(answer(tmp_path, (*DFLASH_ONLY, "--pp-size", "2"), gammas="0,1,3"))
    assert settled.keys() == {"pipeline parallelism", "block of DFlash"}


def test_a_running_engine_introduces_what_it_has_said(tmp_path: Path) -> None:
    settings = {"dflash_model_path": str(DFLASH), "lookup": "1", "gammas": "0,1,3,7"}
    variables = {f"SPECULATION_{name.upper()}": value for name, value in settings.items()}
    with (
        scripted_sidecar(tmp_path) as sidecar,
        running_engine(tmp_path, EAGLE3, {**sidecar.variables, **variables}) as engine,
    ):
        eventually(lambda: sidecar.introductions, description="the engine introduces itself")
        spec = sidecar.introductions[0]
        url = f"http://127.0.0.1:{engine.port}"
        words = ("sglang", "--url", url, "-o", "json", "--", "--model-path", str(TARGET))
        code, output = ran(tmp_path, *words, *EAGLE3[2:4], **settings)
        log = engine.log.read_text()
    assert code == 0, output
    answer_document = document(output)
    # The caller has given the model and the drafter.
    assert answer_document["left_out"]
    assert not {"--model-path", EAGLE3[2]} & set(answer_document["left_out"])
    assert [(one["name"], tuple(one["gammas"])) for one in answer_document["drafters"]] == [
        (drafter.name, tuple(drafter.gammas)) for drafter in spec.drafters
    ]
    assert (
        f"{answer_document['memory']['total_mib']:.0f} MiB are kept free for the draft lengths"
        in log
    )
    # Two layers of two heads of 32 numbers, keys and values, in float32; all its files.
    second = answer_document["memory"]["second_drafter"]
    assert second["cache_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    size = (DFLASH / "model.safetensors").stat().st_size / 2**20
    assert second["weights_mib"] == pytest.approx(size)
    assert answer_document["variables"] == {
        "SPECULATION_SIDECAR": "unix:/run/speculation/controller.sock",
        "SPECULATION_GAMMAS": "0,1,3,7",
        "SPECULATION_DFLASH_MODEL_PATH": str(DFLASH),
        "SPECULATION_LOOKUP": "1",
    }


def test_an_answer_that_names_code_runs_none(tmp_path: Path) -> None:
    """A repository whose configuration is code, as SGLang runs it with --trust-remote-code."""
    repository, ran_here = tmp_path / "repository", tmp_path / "ran"
    repository.mkdir()
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (repository / "config.json").write_text(json.dumps(config))
    (repository / "evil.py").write_text(f"open({str(ran_here)!r}, 'w').close()\n")
    command_flags = (
        f"--model-path {repository} --trust-remote-code --speculative-draft-model-path "
        f"{repository} --speculative-algorithm EAGLE3 --context-length 2048 --device cpu"
    )
    with serve_answers({"/server_info": {"launch_command": command_flags}}) as url:
        code, output = ran(tmp_path, "sglang", "--url", url)
        assert (code, "paths that SGLang loads are not taken from" in output) == (2, True), output
        words = ("sglang", "--url", url, "-o", "json", "--", *MODEL[:2], *EAGLE3[2:])
        code, output = ran(tmp_path, *words)
    assert code == 0, output
    assert document(output)["left_out"] == ["--trust-remote-code"]
    assert not ran_here.exists()


def test_people_read_it_in_eighty_columns(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "worth-it.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^speculation-would-steer (.+)$", page, re.MULTILINE)
    models = {"MODEL": str(TARGET), "DRAFT": str(DRAFT)}
    words = [models.get(word, word) for word in shlex.split(line)]
    words += ["--device", "cuda"]
    code, output = ran(tmp_path, *words, module="lab.cpu_engine.would_steer")
    assert code == 0, output
    lines = output.partition("\nnanobind")[0].splitlines()
    assert lines[0] == "SGLang 0.5.23: this engine would be steered."
    assert "  eagle3  draft lengths 0,1,2,3,5,7" in lines
    assert "  SPECULATION_GAMMAS=0,1,2,3,5,7" in lines
    assert any(line.startswith("  --mem-fraction-static") for line in lines)
    # Paths are never broken.
    assert all(len(line) <= 80 for line in lines if str(TARGET.parent) not in line), output


def test_a_machine_without_a_device_stands_for_one_with_a_gpu(tmp_path: Path) -> None:
    # In an interpreter of its own, because SGLang decides about the processor as it is imported.
    completed = subprocess.run(
        [sys.executable, "-m", COMMAND, "sglang", "-o", "json", "--", *MODEL, *EAGLE3],
        env=environment(tmp_path, {}) | {"SGLANG_USE_CPU_ENGINE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    # Nothing that SGLang says stands between the braces, or beside them.
    facts = json.loads(completed.stdout)["facts"]
    assert facts["device"] == "cuda, assumed because none was found here"
    assert facts["overlap schedule"] == "on"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("sglang", "--", *MODEL, "--no-such"), "SGLang: sglang serve: error: unrecognized arg"),
        (("sglang", "--", "--model-path", "/no/such"), "SGLang refuses these flags itself: "),
        (("sglang", "--url", "http://127.0.0.1:1"), "/server_info does not answer as SGLang does"),
        (("sglang", "--url", "file:///etc/passwd"), "is not an http:// or https:// address"),
        (("sglang",), "the engine's flags are needed after --"),
        (("vllm", "--url", "http://127.0.0.1:1"), "the engine's flags are needed after --"),
        (("vllm", "--", "serve", "MODEL"), "vLLM is not installed in this environment"),
    ],
)
def test_bad_input_ends_with_its_reason(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    code, output = ran(tmp_path, *words)
    assert code == 2
    assert says in output
    assert "Traceback" not in output


def test_a_setting_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    code, output = ran(tmp_path, "sglang", "--", *MODEL, *EAGLE3, gammas="x")
    assert code == 2
    assert "would-steer: SPECULATION_GAMMAS='x'" in output
