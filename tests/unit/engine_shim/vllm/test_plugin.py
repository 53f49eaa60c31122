"""The entry point: silent when off, and never half on."""

import inspect
import logging
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine_shim
from engine_shim.vllm import plugin, vllm_api
from engine_shim.vllm.configuration import SteeredConfiguration
from engine_shim.vllm.draft_lengths import draft_whole_block, skip_lookup_at_zero
from engine_shim.vllm.settings import VllmSettings


def test_nothing_is_imported_or_hooked_without_a_sidecar(monkeypatch):
    monkeypatch.delenv("SPECULATION_SIDECAR", raising=False)
    program = (
        "import sys; from engine_shim.vllm import plugin; plugin.register();"
        "print([m for m in ('vllm', 'torch', 'grpc', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_package_announces_it():
    project = tomllib.loads((Path(engine_shim.__file__).parent / "pyproject.toml").read_text())
    entry_points = project["project"]["entry-points"]["vllm.general_plugins"]
    assert entry_points == {"speculation_controller": "engine_shim.vllm.plugin:register"}


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", ""])
def test_an_unknown_version_ends_the_process_with_the_reason(monkeypatch, version):
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: version)
    with pytest.raises(SystemExit, match=r"vLLM .*SPECULATION_ALLOW_UNKNOWN_VERSION=1"):
        plugin.register()


def test_a_vllm_that_cannot_be_imported_ends_the_process(monkeypatch):
    """There is no vLLM in this environment, as if it had moved everything."""
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: vllm_api.TESTED[0])
    with pytest.raises(SystemExit, match=r"HookError: vLLM has no vllm\.config\.vllm"):
        plugin.register()


def test_an_import_error_of_the_plugin_ends_the_process(monkeypatch):
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setitem(sys.modules, "engine_shim.vllm.draft_lengths", None)
    with pytest.raises(SystemExit, match="does not start: ModuleNotFoundError"):
        plugin.register()


def test_settings_of_another_engine_are_refused(monkeypatch):
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setenv("SPECULATION_DFLASH_MODEL_PATH", "/x")
    with pytest.raises(SystemExit, match="unknown setting SPECULATION_DFLASH_MODEL_PATH"):
        plugin.register()
    assert "dflash_model_path" not in VllmSettings.model_fields


def test_its_lines_are_in_vllms_log(monkeypatch, caplog):
    ours, theirs = logging.getLogger("engine_shim"), logging.getLogger("vllm")
    for logger in (ours, theirs):
        for name in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logger, name, getattr(logger, name))
    theirs.handlers, theirs.level = [caplog.handler], logging.INFO
    ours.handlers = []
    plugin._use_vllm_log_handlers()
    logging.getLogger("engine_shim.vllm.anything").info("it is steered")
    assert caplog.text.count("it is steered") == 1


def test_what_is_wrapped_has_the_signature_that_a_second_loading_expects():
    def post_init(self: Any) -> None: ...
    def propose(self: Any, num_speculative_tokens: int, sampled_token_ids: Any) -> None: ...

    configuration = SteeredConfiguration(VllmSettings())
    wrapped: list[tuple[Callable[[Any], Any], Any]] = [
        (configuration._around_post_init, post_init),
        (configuration._around_get_scheduler_cls, post_init),
        (draft_whole_block, propose),
        (skip_lookup_at_zero, propose),
    ]
    for wrapper, original in wrapped:
        assert inspect.signature(wrapper(original)) == inspect.signature(original)
