"""What docs/deploy.md tells people to type, typed."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path

from lab.harness.processes import free_port
from tests.support.clockwork_engine import ClockworkEngine
from tests.support.eventually import eventually
from tests.support.service_harness import ENVIRONMENT
from tests.support.sidecar_process import PATIENCE_SECONDS
from tests.unit.deploy.commands import commands_on_path
from tests.unit.deploy.manifests import OVERLAYS, ROOT, containers
from tests.unit.deploy.page import PAGE, by_hand, sglang_by_hand
from tests.unit.deploy.units import ENGINE, read_unit


def test_the_walk_through_by_hand_works(tmp_path: Path):
    """The sidecar and all commands are real; in SGLang's place there is an engine that is quick."""
    path = commands_on_path(tmp_path / "bin")
    stands_in = tmp_path / "bin" / "sglang"
    # It does not outlive the test: `kill "$engine"` ends it.
    stands_in.write_text('#!/bin/sh\nenv | grep ^SPECULATION_ >"$SEEN"\nexec sleep 600\n')
    stands_in.chmod(0o755)
    script = by_hand()
    assert "--budget 45" in script
    script = script.replace("--budget 45", "--budget 2 --batch-sizes 1,2")
    script = script.replace("--metrics-port 9464", f"--metrics-port {free_port()}")
    engine = ClockworkEngine(f"unix:{tmp_path}/controller.sock")
    script = script.replace("http://127.0.0.1:30000", engine.url)
    environment = ENVIRONMENT | {"PATH": path, "SEEN": str(tmp_path / "seen"), "PWD": str(tmp_path)}
    with subprocess.Popen(
        ["bash", "-x", "-c", script], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as shell:  # fmt: skip
        try:
            eventually((tmp_path / "controller.sock").exists, timeout_seconds=PATIENCE_SECONDS)
            with engine:
                output, _ = shell.communicate(timeout=2 * PATIENCE_SECONDS)
        finally:
            shell.kill()
    assert shell.returncode == 0, output  # of `wait`: the sidecar's own
    assert "in use by clockwork" in output
    assert "ok   socket" in output
    assert list((tmp_path / "profiles.kept").glob("*.json"))
    log = (tmp_path / "sidecar.log").read_text().splitlines()
    assert "stopped" in {json.loads(line)["event"] for line in log}
    seen = (tmp_path / "seen").read_text()
    assert f"SPECULATION_SIDECAR=unix:{tmp_path}/controller.sock\n" in seen


def sglang_options() -> set[str]:
    """Read from its source: to import it takes half a minute where both cores are busy."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]) / "srt" / "arg_groups" / "fields"
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    return {
        "--" + node.target.id.replace("_", "-")
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_sglang_has_every_option_of_the_overlays_the_unit_and_the_page():
    (unit,) = read_unit(ENGINE)["Service", "ExecStart"]
    assert unit.startswith("/opt/sglang/bin/sglang serve ")
    lines = [containers(overlay)["sglang"]["args"] for overlay in OVERLAYS]
    lines += [shlex.split(unit)[2:], shlex.split(sglang_by_hand())]
    known = sglang_options()
    for line in lines:
        named = {word.partition("=")[0] for word in line if word.startswith("--")}
        assert {"--model-path", "--speculative-algorithm"} <= named <= known


def test_every_file_that_the_page_names_is_there():
    named = set(re.findall(r"(?<![/\w])deploy/[\w./-]+\w", PAGE.read_text()))
    assert {"deploy/docker/sidecar.Dockerfile", "deploy/systemd/sglang.service"} <= named
    for path in named:
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link
