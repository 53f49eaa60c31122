"""Engines that name a sidecar and have no agent are found, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.doctor.finding import Level
from controller.doctor.processes import check_processes
from tests.support.eventually import eventually

AGENT = ("python", "-m", "engine_shim.link.agent")
SGLANG = ("python", "-m", "sglang.launch_server", "--port", "30000")


def process(
    proc: Path, pid: int, parent: int, command: tuple[str, ...], sidecar: str | None = "unix:/s"
) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    variables = ["HOME=/root"] + ([] if sidecar is None else [f"SPECULATION_SIDECAR={sidecar}"])
    (folder / "environ").write_bytes(b"\0".join(v.encode() for v in variables))
    (folder / "cmdline").write_bytes(b"\0".join(c.encode() for c in command) + b"\0")
    (folder / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1\n")


def process_findings(proc: Path) -> list[str]:
    findings = list(check_processes("unix:/s", proc))
    assert all(it.level is Level.WARN and it.fix for it in findings)
    return [it.check for it in findings]


def test_an_engine_with_an_agent_below_it_is_steered(tmp_path: Path):
    process(tmp_path, 10, 1, SGLANG)
    process(tmp_path, 11, 10, ("sglang::scheduler",))
    process(tmp_path, 12, 11, AGENT)
    assert process_findings(tmp_path) == []


@pytest.mark.parametrize("title", ["sglang::scheduler", "VLLM::EngineCore"])
def test_a_title_hides_the_environment_of_the_process_between_both(tmp_path: Path, title: str):
    """As `setproctitle` does with the scheduler's process of either engine."""
    process(tmp_path, 10, 1, SGLANG)
    process(tmp_path, 11, 10, (title,), sidecar=None)
    assert process_findings(tmp_path) == ["process 10"]
    process(tmp_path, 12, 11, AGENT)
    assert process_findings(tmp_path) == []


def test_who_may_not_be_looked_into_still_links_an_agent_to_its_engine(tmp_path: Path):
    process(tmp_path, 10, 1, SGLANG)
    process(tmp_path, 11, 10, ("sglang::scheduler",), sidecar=None)
    (tmp_path / "11" / "environ").unlink()
    process(tmp_path, 12, 11, AGENT)
    assert process_findings(tmp_path) == []


def test_an_engine_is_known_by_its_title_alone(tmp_path: Path):
    process(tmp_path, 10, 1, ("python", "my_server.py"))
    process(tmp_path, 11, 10, ("VLLM::EngineCore",), sidecar=None)
    process(tmp_path, 20, 21, SGLANG)
    process(tmp_path, 21, 20, ("bash",))
    assert process_findings(tmp_path) == ["process 10", "process 21"]


def test_an_engine_without_an_agent_is_told_once(tmp_path: Path):
    process(tmp_path, 10, 1, SGLANG)
    process(tmp_path, 11, 10, ("sglang::scheduler",))
    process(tmp_path, 20, 1, ("python", "my_server.py"))
    process(tmp_path, 21, 20, ("VLLM::EngineCore", "vllm"))
    process(tmp_path, 22, 21, AGENT)
    assert process_findings(tmp_path) == ["process 10"]


def test_an_engine_that_is_embedded_is_known_by_what_it_has_started(tmp_path: Path):
    process(tmp_path, 20, 1, ("python", "my_server.py"), sidecar=None)
    process(tmp_path, 21, 20, ("sglang::scheduler",))
    process(tmp_path, 30, 1, ("bash",))
    assert process_findings(tmp_path) == ["process 21"]


@pytest.mark.parametrize("sidecar", [None, "", "unix:/another"])
def test_who_names_another_sidecar_or_none_is_not_looked_at(tmp_path: Path, sidecar: str | None):
    process(tmp_path, 10, 1, SGLANG, sidecar)
    assert process_findings(tmp_path) == []


def test_what_cannot_be_read_says_nothing(tmp_path: Path):
    (tmp_path / "10").mkdir()
    (tmp_path / "version").write_text("Linux")
    process(tmp_path, 11, 1, SGLANG)
    (tmp_path / "11" / "stat").write_text("garbage")
    assert process_findings(tmp_path) == []


def test_it_reads_what_the_kernel_says():
    address = f"unix:/nowhere/{os.getpid()}"
    variables = {**os.environ, "SPECULATION_SIDECAR": address}
    command = [sys.executable, "-c", "import time; time.sleep(600)", "sglang"]
    with subprocess.Popen(command, env=variables) as started:
        try:
            wanted = f"process {started.pid}"
            eventually(
                lambda: wanted in [finding.check for finding in check_processes(address)],
                description="the process is seen",
            )
        finally:
            started.kill()
