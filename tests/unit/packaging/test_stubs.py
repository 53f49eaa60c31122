"""The checked-in stubs are what the .proto files generate."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.packaging


def check(source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/proto.py", "--check", "--source", str(source)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_stubs_are_up_to_date():
    result = check(ROOT / "proto")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_changed_contract_is_noticed(tmp_path: Path):
    source = tmp_path / "proto"
    shutil.copytree(ROOT / "proto", source)
    plan = source / "speculation" / "v1" / "plan.proto"
    plan.write_text(plan.read_text().replace("uint32 lease_ms = 4;", "uint64 lease_ms = 4;"))
    result = check(source)
    assert result.returncode == 1
    assert "plan_pb2.py " in result.stdout
    assert "engine_pb2.py " not in result.stdout


def test_a_stub_without_a_contract_is_noticed(tmp_path: Path):
    source = tmp_path / "proto"
    shutil.copytree(ROOT / "proto", source)
    (source / "speculation" / "v1" / "gone_pb2.py").touch()
    result = check(source)
    assert result.returncode == 1
    assert "gone_pb2.py " in result.stdout
