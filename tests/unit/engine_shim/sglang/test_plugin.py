"""The entry point: silent when off, and never half on."""

import subprocess
import sys

import pytest

from engine_shim.sglang import plugin
from engine_shim.sglang.api import versions


def test_nothing_is_imported_or_hooked_without_a_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECULATION_SIDECAR", raising=False)
    program = (
        "import sys; from engine_shim.sglang import plugin; plugin.register();"
        "print([m for m in ('sglang', 'torch', 'grpc', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_unknown_version_ends_the_process_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setattr(versions, "sglang_version", lambda: "0.6.0")
    with pytest.raises(SystemExit, match=r"0\.6\.0.*SPECULATION_ALLOW_UNKNOWN_VERSION=1"):
        plugin.register()


def test_a_bad_setting_ends_the_process_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATION_SIDECAR", "no address")
    with pytest.raises(SystemExit, match="SPECULATION_SIDECAR"):
        plugin.register()


def test_an_error_that_sglang_would_swallow_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> str:
        raise ValueError("an unforeseen error")

    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setattr(versions, "sglang_version", fail)
    with pytest.raises(SystemExit, match="an unforeseen error"):
        plugin.register()
