"""A real SGLang server on the CPU for the length of a test.

Most servers are forks of a process that has imported SGLang; `fresh` ones start as a user's do.
"""

import base64
import functools
import http.client
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import engine_shim
from lab.cpu_engine.engine_command import MIMO, MODELS, SHALLOW
from lab.cpu_engine.environment import EMULATION, cpu_engine_env, emulated_cuda_env
from lab.cpu_engine.forking import DESCRIPTOR, PRELOAD
from lab.harness.fork_server import ForkedProcess, ForkServer
from lab.harness.processes import free_port
from tests.support.eventually import eventually

ROOT = Path(engine_shim.__file__).parents[1]
# The steps of this target are much shorter than those of the demo's.
TARGET = SHALLOW / "target"
DRAFT = SHALLOW / "draft-mixed"
DFLASH = SHALLOW / "dflash"
EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(DRAFT))
DFLASH_ONLY = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DFLASH))
# A target with a multi-token predictor of its own; MIMO holds a DFlash drafter for it as well.
MTP = (
    "--model-path", str(MIMO / "target"), "--speculative-algorithm", "NEXTN",
    "--speculative-draft-model-path", str(MIMO / "target"),
)  # fmt: skip
# The models that the demo serves, for a price that depends on how a step's time is made up.
DEEP = ("--model-path", str(MODELS / "target"), "--context-length", "2048")
# A drafter that has seen code and nothing else.
CODE_ONLY = (
    "--speculative-algorithm", "EAGLE3",
    "--speculative-draft-model-path", str(SHALLOW / "draft-code"),
)  # fmt: skip
# How an engine runs its passes.  The last one is how most GPUs do: FlashAttention and TensorRT-LLM
# keep no context lengths on the host.
MODES: Mapping[str, Mapping[str, str]] = {
    "eager": {},
    "graphs": {"CPU_ENGINE_GRAPHS": "1"},
    "overlapped": {
        "CPU_ENGINE_GRAPHS": "1",
        "CPU_ENGINE_OVERLAP": "1",
        "CPU_ENGINE_HOST_LENGTHS": "0",
    },
}
# For files that test the first mode and the last.  CI runs the last one only: most GPUs run it, and
# test_engine_drafters.py compares all three.
EAGER_NIGHTLY = pytest.param("eager", marks=pytest.mark.nightly)
ONLINE = {"SPECULATION_ONLINE_UPDATES": "1", "SPECULATION_GAMMAS": "0,1,3"}
START_SECONDS = 240.0
SERVE = "lab.cpu_engine.serve"
EMULATED_SERVE = "lab.cpu_engine.serve_emulated_cuda"


@dataclass(frozen=True)
class Generated:
    """One request's answer: its tokens, and SGLang's own counters."""

    tokens: list[int]
    meta: dict[str, Any]


@dataclass(frozen=True)
class EngineProcess:
    """A server and what it prints."""

    process: subprocess.Popen[bytes] | ForkedProcess
    port: int
    log: Path

    def generate(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], rid: str = ""
    ) -> list[Generated]:
        """Greedy decoding of all prompts at once; `lengths` in new tokens, rid: of a lone one."""
        parameters = [
            {"temperature": 0, "max_new_tokens": length, "ignore_eos": True} for length in lengths
        ]
        body: dict[str, Any] = {"input_ids": list(prompts), "sampling_params": parameters}
        if rid:
            body["rid"] = [rid]
        answers = self._call("/generate", body)
        return [Generated(answer["output_ids"], answer["meta_info"]) for answer in answers]

    def complete(self, custom_params: Mapping[str, Any]) -> dict[str, Any]:
        """An answer of the OpenAI-compatible API."""
        body = {"model": "any", "prompt": "a b c", "max_tokens": 8, "ignore_eos": True}
        answer: dict[str, Any] = self._call(
            "/v1/completions", {**body, "custom_params": custom_params}
        )
        return answer

    def chat(self, system: str, user: str, **options: Any) -> dict[str, Any]:
        """An answer of the OpenAI-compatible API to two messages."""
        roles = {"system": system, "user": user}
        messages = [{"role": role, "content": content} for role, content in roles.items()]
        body = {
            "model": "any",
            "messages": messages,
            "max_tokens": 8,
            "ignore_eos": True,
            **options,
        }
        answer: dict[str, Any] = self._call("/v1/chat/completions", body)
        return answer

    def ask(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """SGLang's answers to a request, or requests, in its own words."""
        answers = self._call("/generate", body)
        return answers if isinstance(answers, list) else [answers]

    @contextmanager
    def stream(self, body: Mapping[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of one answer, each with all of it so far; leaving early hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/generate", json.dumps({**body, "stream": True}), headers)
            answer = connection.getresponse()
            assert answer.status == http.client.OK, answer.read()
            parts = (line.removeprefix(b"data: ").strip() for line in answer)
            yield (json.loads(part) for part in parts if part and part != b"[DONE]")
        finally:
            connection.close()

    def replace_target(self, weights: Mapping[str, Any], ranks: int) -> None:
        """A weight update of the target; weights: tensors by name, of the whole."""
        selected = {"selector": "target"}
        payload = base64.b64encode(pickle.dumps(list(weights.items()))).decode()
        update = {"serialized_named_tensors": [payload] * ranks}
        self._call("/begin_weight_update", selected)
        self._call("/update_weights_from_tensor", selected | update)
        self._call("/end_weight_update", {})

    def abort(self, rid: str) -> None:
        """Ends a request early."""
        self._call("/abort_request", {"rid": rid})

    def internal_state(self) -> dict[str, Any]:
        """What `/server_info` says of the scheduler."""
        return self.internal_states()[0]

    def internal_states(self) -> list[dict[str, Any]]:
        """The same of each scheduler with requests of its own, in the order of their answers."""
        states: list[dict[str, Any]] = self._call("/server_info")["internal_states"]
        return states

    def count_running(self) -> int:
        """How many requests are being answered, or wait for it."""
        loads = self._call("/v1/loads")["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def counters(self) -> dict[str, int]:
        """SGLang's own counters, with `--enable-metrics`, over all of their labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=120) as answer:
            text = answer.read().decode()
        totals: Counter[str] = Counter()
        for name, value in re.findall(
            r"^sglang:(\w+)_total\{[^}]*\} ([\d.e+]+)$", text, re.MULTILINE
        ):
            totals[name] += int(float(value))
        return totals

    def is_ready(self) -> bool:
        """False while it starts; fails with its last words when it has ended."""
        assert self.process.poll() is None, self.tail()
        try:
            self._call("/health")
        except OSError:
            return False
        return True

    def tail(self, lines: int = 30) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _call(self, path: str, body: object = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            content = answer.read()
        return json.loads(content) if content else None


def environment(folder: Path, variables: Mapping[str, str], module: str = SERVE) -> dict[str, str]:
    """This process's, without SPECULATION_* but for `variables`, with the plugin installed.

    module: that serves, on the processor or on an emulated GPU.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPECULATION_")}
    paths = [str(ROOT), str(ROOT / "proto")]
    if not any(
        e.name == "speculation_controller" for e in entry_points(group="sglang.srt.plugins")
    ):
        paths.append(str(install_plugin(folder, "engine_shim.sglang.plugin:register")))
    added = [variables.get("PYTHONPATH", ""), inherited.get("PYTHONPATH", "")]
    path = os.pathsep.join([*paths, *filter(None, added)])
    make = emulated_cuda_env if module == EMULATED_SERVE else cpu_engine_env
    return make(inherited | dict(variables) | {"PYTHONPATH": path})


def install_plugin(folder: Path, target: str, name: str = "speculation_controller") -> Path:
    """A folder that announces an SGLang plugin to every process that has it on its path."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {target}\n")
    return folder


def fork_engine(
    module: str, arguments: Sequence[str], folder: Path, variables: Mapping[str, str], log: Path
) -> ForkedProcess:
    """A program that finds SGLang imported; its output goes to `log`."""
    assert not any(name.startswith("SGLANG_") for name in variables), "read while it is imported"
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sglang_paths = tuple(path for path in paths if path and Path(path, "sglang").exists())
    with log.open("wb") as output:
        variable = f"{EMULATION}=1" if module == EMULATED_SERVE else ""
        return _fork_server(sglang_paths, variable).start(
            module, arguments, environment(folder, variables, module), folder, output.fileno()
        )


def start_lab(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    imported_with: Sequence[str] = ("",),
) -> subprocess.Popen[str]:
    """Starts a command of the lab as `start_with_engines` does."""
    command = [sys.executable, "-m", module, *arguments]
    return start_with_engines(command, environment=environment, imported_with=imported_with)


def start_with_engines(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    imported_with: Sequence[str] = ("",),
) -> subprocess.Popen[str]:
    """Starts a command that uses the lab, with the shallow models; what it says is in one pipe.

    Its CPU engines find SGLang imported.  environment: further variables.  imported_with: what
    SGLang reads while it is imported, as NAME=VALUE; "" for no variable, and each for some engines.
    """
    servers = {variable: _fork_server(variable=variable) for variable in imported_with}
    variables = {
        DESCRIPTOR: " ".join(f"{server.fileno()}:{name}" for name, server in servers.items()),
        "LAB_MODELS": str(SHALLOW),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]),
    }
    return subprocess.Popen(
        list(command),
        env=os.environ | variables | dict(environment or {}),
        pass_fds=[server.fileno() for server in servers.values()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_lab(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    imported_with: Sequence[str] = ("",),
) -> subprocess.CompletedProcess[str]:
    """Runs a command as `start_lab` starts it, to its end."""
    with start_lab(
        module, *arguments, environment=environment, imported_with=imported_with
    ) as process:
        try:
            output, _ = process.communicate()
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@contextmanager
def started_engine(
    folder: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    module: str = SERVE,
    *,
    fresh: bool = False,
) -> Iterator[EngineProcess]:
    """A server that was started, ready or not; ended with everything it started.

    fresh: in an interpreter of its own, as for variables that SGLang reads while it is imported.
    """
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "engine.log"
    options = ["--port", str(port)]
    if "--model-path" not in arguments:
        options += ["--model-path", str(TARGET), "--context-length", "2048"]
    options += arguments
    process: subprocess.Popen[bytes] | ForkedProcess
    if not fresh:
        process = fork_engine(module, options, folder, variables, log)
    else:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *options],
                env=environment(folder, variables, module),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    try:
        yield EngineProcess(process, port, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@contextmanager
def running_engine(
    folder: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    module: str = SERVE,
    *,
    fresh: bool = False,
) -> Iterator[EngineProcess]:
    """A server that answers."""
    with started_engine(folder, arguments, variables or {}, module, fresh=fresh) as engine:
        eventually(
            engine.is_ready, timeout_seconds=START_SECONDS, description="the engine is ready"
        )
        yield engine


@functools.cache
def _fork_server(sglang_paths: tuple[str, ...] = (), variable: str = "") -> ForkServer:
    """One for this process, from the first server to the end.

    sglang_paths: paths of another SGLang.  variable: NAME=VALUE that SGLang reads while it is
    imported.
    """
    variables = {"PYTHONPATH": os.pathsep.join([*sglang_paths, str(ROOT), str(ROOT / "proto")])}
    if variable:
        name, _, own_value = variable.partition("=")
        variables[name] = own_value
    make = emulated_cuda_env if EMULATION in variables else cpu_engine_env
    return ForkServer(PRELOAD, make({**os.environ, **variables}))
