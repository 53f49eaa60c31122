"""docs/metrics.md is what the code says."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.vllm_engine.environment import VENV, has_environment
from tests.support.service_harness import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "docs" / "metrics.md", ROOT / "docs" / "autoscaling.md"]


def check(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/metrics_reference.py", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def test_the_reference_is_up_to_date():
    result = check("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_reference_that_says_something_else_is_noticed(tmp_path: Path):
    page = tmp_path / "metrics.md"
    page.write_text((ROOT / "docs" / "metrics.md").read_text().replace("gauge", "counter", 1))
    result = check("--check", "--file", page)
    assert result.returncode == 1
    assert "metrics.md is not what the code says" in result.stdout
    assert check("--file", page).returncode == 0
    assert page.read_text() == (ROOT / "docs" / "metrics.md").read_text()


def named(engine: str) -> set[str]:
    """Metrics of an engine that our pages name."""
    text = " ".join(page.read_text(encoding="utf-8") for page in PAGES)
    return set(re.findall(rf"\b{engine}:\w+", text))


def test_what_is_said_to_be_a_metric_of_sglang_is_one():
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent
    source = (folder / "srt" / "observability" / "metrics_collector.py").read_text()
    names = named("sglang")
    assert len(names) > 4
    assert {name for name in names if f'"{name}"' not in source} == set()


@pytest.mark.skipif(
    not has_environment(), reason="VLLM IS NOT INSTALLED HERE: make setup-vllm installs it"
)
def test_what_is_said_to_be_a_metric_of_vllm_is_one():
    (folder,) = (VENV / "lib").glob("python3*/site-packages/vllm/v1")
    source = "".join(
        (folder / name).read_text() for name in ("metrics/loggers.py", "spec_decode/metrics.py")
    )
    names = {name.removesuffix("_total") for name in named("vllm")}
    assert len(names) > 4
    assert {name for name in names if f'"{name}"' not in source} == set()
