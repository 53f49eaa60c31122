"""The kit for GPU machines without a network: what is in it, its installation, its jobs."""

import ast
import hashlib
import importlib.util
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.eventually import eventually
from tests.unit.packaging.environments import ROOT, closure, pinned

KIT = ROOT / "scripts" / "gpu_kit"
PIECES = 3
# A process that ignores the request to end; it tells its id in the file $1.
STUBBORN = 'trap "" TERM; echo $$ >"$1.new"; mv "$1.new" "$1"; while :; do sleep 1; done'


def named(file: str) -> dict[str, str]:
    """Package and version ("" for any) of every line."""
    lines = (KIT / file).read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, _, version in pairs}


def test_kit_and_machine_have_what_sglang_and_the_project_need() -> None:
    projects = [tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
                for folder in (".", "engine_shim", "simulator", "trainer")]  # fmt: skip
    asked = [text for project in projects for text in project["dependencies"]]
    names = ["sglang", "aiohttp", *pinned(), *(Requirement(text).name for text in asked)]
    needed = {canonicalize_name(requirement.name) for requirement in closure(names)}
    # IPython needs these two for completion only.
    needed -= {"jedi", "parso"}
    # The project itself is in the clone.
    needed -= {project["name"] for project in projects}
    assert len(needed) > 80
    assert needed <= set(named("wheels.txt")) | set(named("machine.txt"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"PIECE_MIB": "many"}, "PIECE_MIB=many: give whole MiB"),
        ({"PIECE_MIB": "0"}, "PIECE_MIB=0: give whole MiB"),
        ({"PYTHON": "no-python"}, "no-python needs pip"),
    ],
)
def test_what_the_kit_cannot_be_made_with_is_said_before_anything_is_downloaded(
    setting: dict[str, str], message: str
) -> None:
    done = subprocess.run(
        ["bash", str(KIT / "build.sh")],
        env={**os.environ, **setting}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""


def test_a_version_is_named_once() -> None:
    constraints = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    tested = {canonicalize_name(line.partition("==")[0]) for line in constraints if "==" in line}
    wheels = named("wheels.txt")
    assert {name for name, version in wheels.items() if version} == {"sglang-kernel"}
    assert set(wheels) - {"sglang-kernel"} <= tested
    assert not set(wheels) & set(named("machine.txt"))


def test_what_replaces_a_module_of_sglang_has_the_names_that_sglang_imports() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (package,) = map(Path, spec.submodule_search_locations)
    for overlay in (KIT / "overlay" / "sglang").rglob("*.py"):
        module = overlay.relative_to(KIT / "overlay").with_suffix("").as_posix().replace("/", ".")
        ours = {
            name.id if isinstance(name, ast.Name) else name.name
            for node in ast.parse(overlay.read_text()).body
            for name in (node.targets if isinstance(node, ast.Assign) else [node])
            if isinstance(name, (ast.Name, ast.FunctionDef, ast.ClassDef))
        }
        wanted = set(names_imported_from(module, package))
        # The launchers of the kernels, which `can_use_dual_gemm` keeps from being called.
        assert {name for name in wanted if not name.startswith("dual_gemm_swiglu")} <= ours
        assert wanted


def names_imported_from(module: str, package: Path) -> Iterator[str]:
    last = module.rpartition(".")[2]
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if last not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(last):
                yield from (alias.name for alias in node.names)


class FakeKit:
    """The real scripts around an archive of one small module, in pieces."""

    def __init__(self, folder: Path, target: Path, machine: str = "", module: str = "kit_module"):
        self.target = target
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:xz") as kit:
            for name, content in {
                f"site/{module}.py": f"NOISE = {os.urandom(900).hex()!r}\n".encode(),
                "machine.txt": machine.encode(),
                "job.sh": (KIT / "job.sh").read_bytes(),
            }.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(content), 0o755
                kit.addfile(entry, io.BytesIO(content))
        whole = archive.getvalue()
        size = len(whole) // PIECES + 1
        self.pieces = {}
        for index, name in enumerate("abc"):
            piece = folder / name
            piece.mkdir(parents=True)
            shutil.copy(KIT / "install.sh", piece)
            (piece / "piece").write_bytes(whole[index * size : (index + 1) * size])
            (piece / "whole").write_text(f"{hashlib.sha256(whole).hexdigest()} {PIECES}\n")
            self.pieces[name] = piece

    def variables(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return dict(os.environ) | {"PATH": path, "KIT": str(self.target)}

    def install(self, name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", self.pieces[name] / "install.sh"],
            capture_output=True, text=True, check=False, env=self.variables(),
        )  # fmt: skip

    def imports(self, module: str = "kit_module") -> bool:
        command = f'. "$KIT/env.sh" && python3 -c "import {module}"'
        done = subprocess.run(["bash", "-c", command], check=False, env=self.variables())
        return done.returncode == 0

    def job(self, tmp_path: Path, *arguments: str, **popen) -> "subprocess.Popen[str]":
        results = {"OUT": str(tmp_path / "out"), "KIT_RESULTS": str(tmp_path / "check")}
        return subprocess.Popen(
            ["bash", self.target / "job.sh", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=self.variables() | results | {"KIT_GRACE": "1"}, **popen,
        )  # fmt: skip


@pytest.fixture
def kit(tmp_path: Path) -> FakeKit:
    return FakeKit(tmp_path / "pieces", tmp_path / "kit")


@pytest.fixture
def installed(kit: FakeKit) -> FakeKit:
    for name in kit.pieces:
        assert kit.install(name).returncode == 0
    return kit


@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_pieces_come_in_any_order(kit: FakeKit, order: tuple[str, ...]) -> None:
    for count, name in enumerate(order[:-1], start=1):
        assert kit.install(name).stdout == f"kit: {count} of 3 pieces are there\n"
        assert not kit.imports()
    last = kit.install(order[-1])
    assert last.returncode == 0, last.stderr
    assert kit.imports()


def test_installing_again_changes_nothing(installed: FakeKit) -> None:
    kept = installed.target / "site" / "compiled-meanwhile"
    kept.touch()
    for name in installed.pieces:
        again = installed.install(name)
        assert again.returncode == 0
        assert "unpacked" not in again.stdout
    assert kept.exists()
    assert installed.imports()


def test_a_damaged_piece_is_refused_until_it_comes_again(kit: FakeKit) -> None:
    good = (kit.pieces["b"] / "piece").read_bytes()
    (kit.pieces["b"] / "piece").write_bytes(b"x" + good[1:])
    kit.install("a")
    kit.install("b")
    refused = kit.install("c")
    assert refused.returncode == 1
    assert "do not have the checksum" in refused.stderr
    assert not (kit.target / "site").exists()
    (kit.pieces["b"] / "piece").write_bytes(good)
    assert kit.install("b").returncode == 0
    assert kit.imports()


def test_a_newer_kit_replaces_the_older_one_and_their_pieces_never_mix(
    installed: FakeKit, tmp_path: Path
) -> None:
    newer = FakeKit(tmp_path / "newer", installed.target, module="newer_module")
    assert newer.install("a").stdout == "kit: 1 of 3 pieces are there\n"
    assert installed.imports()
    newer.install("b")
    assert newer.install("c").returncode == 0
    assert newer.imports("newer_module")
    assert not newer.imports("kit_module")


@pytest.mark.parametrize(
    ("machine", "code", "message"),
    [
        ("torch==1.13", 1, "and the kit is for 1.13"),
        ("python==3.6", 1, "and the kit is for 3.6"),
        ("no-such-package", 1, "no-such-package is not installed"),
        ("# a comment\nnumpy==0.1", 0, "and the kit is for 0.1"),
        ("numpy\nnumpy==2", 0, "kit: ready"),
    ],
)
def test_a_machine_that_the_kit_is_not_for_is_refused(
    tmp_path: Path, machine: str, code: int, message: str
) -> None:
    kit = FakeKit(tmp_path / "pieces", tmp_path / "kit", machine)
    done = [kit.install(name) for name in kit.pieces][-1]
    assert done.returncode == code, done.stderr
    assert message in done.stdout + done.stderr
    assert ("ready" in done.stdout) == (code == 0)


def test_a_job_at_its_limit_is_killed_with_all_it_started_and_leaves_its_results(
    installed: FakeKit, tmp_path: Path
) -> None:
    script = tmp_path / "stubborn.sh"
    # Called with `--output FOLDER`.  The child has a session of its own, and keeps the output open.
    script.write_text(
        f"trap '' TERM\nmkdir -p $2/logs\necho '{{}}' >$2/result.json\necho page >$2/page.md\n"
        "echo picture >$2/day.png\necho 'RuntimeError: too late' >$2/logs/engine.log\n"
        f"setsid bash -c '{STUBBORN}' child {tmp_path}/child &\n"
        f"bash -c '{STUBBORN}' grandchild {tmp_path}/self\n"
    )
    job = installed.job(tmp_path, "3", "run", "bash", str(script))
    output, _ = job.communicate()
    assert job.returncode == 128 + signal.SIGKILL, output
    for name in ("child", "self"):
        wait_for_the_end(int((tmp_path / name).read_text()))
    out = tmp_path / "out"
    assert (out / "run.json").read_text() == "{}\n"
    assert (out / "run.page.md").read_text() == "page\n"
    assert (out / "run.day.png").read_text() == "picture\n"
    with tarfile.open(out / "run.tgz") as everything:
        assert "run/logs/engine.log" in everything.getnames()
    assert "RuntimeError: too late" in output


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that was not waited for yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(") ")[2][0] != "Z"


def wait_for_the_end(pid: int) -> None:
    """Of a process that was killed: it ends when it next has a processor."""
    eventually(lambda: not is_alive(pid), description=f"process {pid} is over")


def test_a_process_left_behind_is_killed_even_if_it_has_set_its_title(
    installed: FakeKit, tmp_path: Path
) -> None:
    titled = (
        "import os, setproctitle, time; from pathlib import Path\n"
        "setproctitle.setproctitle('sglang::scheduler ' * 40)\n"
        f"Path('{tmp_path}/new').write_text(str(os.getpid()))\n"
        f"os.rename('{tmp_path}/new', '{tmp_path}/engine')\n"
        "time.sleep(600)\n"
    )
    leaving = (
        "import subprocess, sys, time; from pathlib import Path\n"
        f"subprocess.Popen([sys.executable, '-c', {titled!r}], start_new_session=True)\n"
        f"while not Path('{tmp_path}/engine').exists(): time.sleep(0.05)\n"
    )
    job = installed.job(tmp_path, "200", "run", sys.executable, "-c", leaving)
    output, _ = job.communicate()
    assert job.returncode == 0, output
    wait_for_the_end(int((tmp_path / "engine").read_text()))


def test_a_job_that_is_asked_to_end_passes_it_on_and_keeps_the_results(
    installed: FakeKit, tmp_path: Path
) -> None:
    script = tmp_path / "clean.sh"
    script.write_text(
        'trap "echo ended >$2/result.json; exit 3" TERM\n'
        f"touch {tmp_path}/ready\nwhile :; do sleep 0.1; done\n"
    )
    job = installed.job(tmp_path, "200", "run", "bash", str(script))
    eventually((tmp_path / "ready").exists)
    job.terminate()
    output, _ = job.communicate()
    assert job.returncode == 3, output
    assert (tmp_path / "out" / "run.json").read_text() == "ended\n"


def test_what_was_found_is_copied_while_the_job_runs(installed: FakeKit, tmp_path: Path) -> None:
    script = tmp_path / "running.sh"
    script.write_text("echo half >$2/result.json\nwhile :; do sleep 0.1; done\n")
    job = installed.job(tmp_path, "200", "run", "bash", str(script))
    copied_file = tmp_path / "out" / "run.json"
    eventually(lambda: copied_file.exists() and copied_file.read_text() == "half\n")
    assert job.poll() is None
    job.terminate()
    job.communicate()


def test_results_go_to_a_folder_of_their_own_and_the_engines_options_stay_last(
    installed: FakeKit, tmp_path: Path
) -> None:
    job = installed.job(tmp_path, "200", "run", "echo", "--parts", "a", "--", "--x", "--", "y")
    output, _ = job.communicate()
    folder = tmp_path / "check" / "run"
    assert f"\n--parts a --output {folder} -- --x -- y\n" in output
    job = installed.job(tmp_path, "200", "run", "echo", "plain")
    assert f"\nplain --output {folder}\n" in job.communicate()[0]
    assert job.returncode == 0
    assert re.search(r"exit 0 after \d+ s", output)
