"""A real vLLM on the CPU for the length of a test, in its own virtual environment."""

import http.client
import json
import os
import re
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.cpu_engine.engine_command import MIMO
from lab.harness.processes import free_port
from lab.vllm_engine.environment import PYTHON, serve_command, vllm_env
from tests.support.engine import DFLASH, TARGET
from tests.support.eventually import eventually

# An engine on a busy machine that imports everything for the first time.
START_SECONDS = 240.0
JOB_SECONDS = 420.0
LONGEST = 7
# A MiMo with a multi-token predictor.
MTP_TARGET = MIMO / "target"


def eagle3(draft: Path) -> dict[str, Any]:
    """vLLM's --speculative-config.  draft: converted (lab/vllm_engine/convert.py)."""
    return {"method": "eagle3", "model": str(draft), "num_speculative_tokens": LONGEST}


def dflash() -> dict[str, Any]:
    return {"method": "dflash", "model": str(DFLASH), "num_speculative_tokens": LONGEST}


def draft_model() -> dict[str, Any]:
    """The target drafts for itself: there is no smaller model with its vocabulary."""
    return {"method": "draft_model", "model": str(TARGET), "num_speculative_tokens": LONGEST}


def mtp() -> dict[str, Any]:
    """For a target with a multi-token predictor of its own."""
    return {"method": "mtp", "num_speculative_tokens": LONGEST}


def ngram() -> dict[str, Any]:
    return {
        "method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2,
        "num_speculative_tokens": LONGEST,
    }  # fmt: skip


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's, without SPECULATION_* but for `variables`.

    Two engines fill the cores of a small machine: a nice agent would lose reports there.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPECULATION_")}
    # What is importable here is not importable there.
    inherited.pop("PYTHONPATH", None)
    return vllm_env(inherited) | {"SPECULATION_AGENT_NICE": "0"} | dict(variables)


@contextmanager
def job(
    folder: Path,
    engines: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str] | None = None,
    second_requests: Sequence[Mapping[str, Any]] = (),
    answered_file: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """`lab.vllm_engine.offline` with these engines; killed at the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / "job.json"
    job_file.write_text(
        json.dumps({
            "engines": engines,
            "phases": [requests, second_requests] if second_requests else [requests],
            "output": str(folder / "out.json"),
            "answered": "" if answered_file is None else str(answered_file),
        })
    )  # fmt: skip
    with (folder / "engine.log").open("wb") as output:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "lab.vllm_engine.offline", str(job_file)],
            env=environment(variables or {}),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def run_job(
    folder: Path,
    engines: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str] | None = None,
    second_requests: Sequence[Mapping[str, Any]] = (),
    before_end: Callable[[Mapping[str, Any]], bool] | None = None,
) -> dict[str, Any]:
    """What the engines have answered, by name; second_requests: sent after the first answers.

    before_end: an engine that has answered, which it is given, ends once this is true.
    """
    answered_file = None if before_end is None else folder / "answered.json"
    with job(folder, engines, requests, variables, second_requests, answered_file) as process:
        if before_end is not None and answered_file is not None:
            _wait_until_read(process, answered_file, before_end)
        code = process.wait(JOB_SECONDS)
    tail = (folder / "engine.log").read_text(errors="replace")[-3000:]
    assert code == 0, tail
    results: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert not [e for e in results.values() if "error" in e], (results, tail)
    return results


def _wait_until_read(
    process: subprocess.Popen[bytes],
    answered_file: Path,
    before_end: Callable[[Mapping[str, Any]], bool],
) -> None:
    """Until the job is over; it may take `JOB_SECONDS`."""

    def has_ended() -> bool:
        if answered_file.exists():
            results = json.loads(answered_file.read_text())
            eventually(lambda: before_end(results), description="what an engine reported is read")
            answered_file.unlink()
        return process.poll() is not None

    eventually(has_ended, timeout_seconds=JOB_SECONDS, description="the job is over")


@dataclass(frozen=True)
class VllmServer:
    """A server and what it prints."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        xargs: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """Greedy decoding of all prompts at once, through the OpenAI-compatible API."""
        body: dict[str, Any] = {
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self._call(
            "/v1/completions", body if xargs is None else body | {"vllm_xargs": xargs}
        )
        choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
        return [choice["token_ids"] for choice in choices]

    def counters(self) -> dict[str, int]:
        """vLLM's own counters of speculation: drafts, draft_tokens, accepted_tokens."""
        samples = re.findall(
            r"^vllm:spec_decode_num_(\w+)_total\{[^}]*\} ([\d.e+]+)$",
            self._call("/metrics"),
            re.MULTILINE,
        )
        return {name: int(float(value)) for name, value in samples if "per_pos" not in name}

    def complete(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """Answers that may end before their length."""
        body = {"prompt": [list(prompt) for prompt in prompts], "return_token_ids": True}
        answer = json.loads(self._call("/v1/completions", body | {"temperature": 0} | options))
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [choice["token_ids"] for choice in choices]

    def hang_up(self, prompt: Sequence[int], new_tokens: int) -> None:
        """Asks for a stream, and leaves after its first token."""
        body = {"prompt": list(prompt), "max_tokens": new_tokens, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps({**body, "stream": True}), headers
            )
            assert connection.getresponse().readline().startswith(b"data: ")
        finally:
            connection.close()

    def metrics(self) -> dict[str, int]:
        """vLLM's own counters and gauges, over all of their labels but the position."""
        totals: Counter[str] = Counter()
        for name, labels, value in re.findall(
            r"^vllm:(\w+)\{([^}]*)\} ([\d.e+]+)$", self._call("/metrics"), re.MULTILINE
        ):
            position = re.search(r'position="(\d+)"', labels)
            totals[name + (f" {position[1]}" if position else "")] += int(float(value))
        return totals

    def is_ready(self) -> bool:
        """False while it starts; fails with its last words when it has ended."""
        assert self.process.poll() is None, self.tail()
        try:
            self._call("/health")
        except OSError:
            return False
        return True

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def _call(self, path: str, body: object = None) -> str:
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = answer.read().decode()
        return text


@contextmanager
def vllm_serving(
    folder: Path,
    speculation: Mapping[str, Any] | None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """A server of the small target that answers; ended with everything it started."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            serve_command(port, TARGET, speculation),
            env=environment(variables or {}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = VllmServer(process, port, log)
        eventually(server.is_ready, timeout_seconds=START_SECONDS, description="vLLM is ready")
        yield server
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
