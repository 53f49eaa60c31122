"""Describes an engine to the sidecar: the EngineSpec of a scheduler that is ready to serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import engine_shim
from engine_shim.common.process import default_engine_id, hub_revision
from engine_shim.vllm import vllm_api
from engine_shim.vllm.draft_lengths import FIRST_RUNNER, model_runner
from engine_shim.vllm.settings import VllmSettings
from speculation.v1 import engine_pb2

# By vLLM's method name.
DRAFTER_KINDS: Final = {
    "eagle": engine_pb2.DRAFTER_KIND_MTP,
    "eagle3": engine_pb2.DRAFTER_KIND_MTP,
    "mtp": engine_pb2.DRAFTER_KIND_MTP,
    "dflash": engine_pb2.DRAFTER_KIND_DFLASH,
    "draft_model": engine_pb2.DRAFTER_KIND_STANDALONE,
    "ngram": engine_pb2.DRAFTER_KIND_NGRAM,
}
_DEFAULT_PORT: Final = 8000


def describe_engine(
    config: Any, settings: VllmSettings, gammas: Sequence[int]
) -> engine_pb2.EngineSpec:
    """Describes the engine of a `VllmConfig`."""
    speculative, is_async = config.speculative_config, config.scheduler_config.async_scheduling
    return engine_pb2.EngineSpec(
        engine_id=settings.engine_id or default_engine_id(server_id(sys.argv)),
        fingerprint=_fingerprint(config),
        drafters=[_drafter(speculative, gammas)],
        max_batch_size=config.scheduler_config.max_num_seqs,
        capabilities=engine_pb2.Capabilities(
            # At gamma 0 the drafter still reads every token, see draft_lengths.py.
            drafters_follow=True,
            overlap_steps=1 if is_async else 0,
            draft_lag=1,
        ),
    )


def server_id(arguments: Sequence[str]) -> int | str:
    """Returns the port that this command line serves on, or else a name for its server.

    The name identifies the unix socket (`--uds`), which vLLM prefers to a port, or the process.
    The scheduler's process has the command line of its server, which is the only source for this.
    """
    options = _read_configuration_file(_last_value(arguments, "--config"))
    options |= {
        name: value for name in ("port", "uds") if (value := _last_value(arguments, f"--{name}"))
    }
    if path := options.get("uds"):
        return f"uds-{sha256(path.encode()).hexdigest()[:8]}"
    port = options.get("port", "")
    if port.isdecimal() and int(port):
        return int(port)
    is_server = "serve" in arguments[1:2] or any(
        "api_server" in argument for argument in arguments[:1]
    )
    return _DEFAULT_PORT if is_server and not port else f"vllm-{os.getpid()}"


def _last_value(arguments: Sequence[str], option: str) -> str:
    """Returns the value of an option, the last one if it is repeated; "" if it is absent."""
    value = ""
    for index, argument in enumerate(arguments):
        name, equals, joined_value = argument.partition("=")
        if name == option:
            value = joined_value if equals else "".join(arguments[index + 1 : index + 2])
    return value


def _read_configuration_file(file: str) -> dict[str, str]:
    """Reads vLLM's configuration file; returns an empty dict if it cannot be read."""
    if not file:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {str(k): str(v) for k, v in content.items()} if isinstance(content, dict) else {}


def _drafter(speculative: Any, gammas: Sequence[int]) -> engine_pb2.Drafter:
    is_model = speculative.draft_model_config is not None and speculative.method != "ngram"
    model = str(speculative.draft_model_config.model) if is_model else ""
    return engine_pb2.Drafter(
        name=speculative.method,
        kind=DRAFTER_KINDS[speculative.method],
        gammas=gammas,
        model=model,
        revision=hub_revision(model, speculative.revision) if model else "",
    )


def _fingerprint(config: Any) -> engine_pb2.Fingerprint:
    model, parallel = config.model_config, config.parallel_config
    return engine_pb2.Fingerprint(
        target_model=model.model,
        target_revision=hub_revision(model.model, model.revision),
        engine="vllm",
        engine_version=vllm_api.vllm_version(),
        device=vllm_api.device_name(config),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization or "",
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        attention_backend=_execution_mode(config),
        shim_version=engine_shim.__version__,
    )


def _execution_mode(config: Any) -> str:
    """Describes what else the step time depends on: backend, graphs, scheduling, model runner.

    vLLM's graphs are for token counts and not for sequence counts, so `graph_batch_sizes` is empty.
    """
    backend = getattr(getattr(config.attention_config, "backend", None), "name", "auto")
    graphs = getattr(config.compilation_config.cudagraph_mode, "name", "NONE")
    scheduling = "async" if config.scheduler_config.async_scheduling else "sync"
    runner = "" if model_runner(config) == FIRST_RUNNER else ",runner2"
    return f"{backend},{graphs},{scheduling}".lower() + runner
