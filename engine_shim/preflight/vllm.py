"""Tells whether a vLLM with these flags would be steered, with the checks of a real start.

vLLM's own parser makes the configuration with the plugin's hooks in place, as in its API server.
So this command refuses what a start refuses.  Only configurations are read, no weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from engine_shim.common.checks import Check, make_check, protobuf_check
from engine_shim.common.errors import PluginError
from engine_shim.preflight.verdict import (
    Drafter,
    InputError,
    Memory,
    Verdict,
    environment_variables,
    raise_input_errors,
    strip_launcher,
)
from engine_shim.vllm import vllm_api
from engine_shim.vllm.configuration import (
    SteeredConfiguration,
    configuration_checks,
    is_engine_config,
)
from engine_shim.vllm.draft_lengths import (
    draft_length_effect,
    ignored_length_warning,
    model_runner,
    unread_layers_warning,
)
from engine_shim.vllm.settings import VllmSettings

PLUGIN: Final = "speculation_controller"
# Launch commands; the flags follow.
_LAUNCHERS: Final = (
    ("vllm", "serve"),
    ("python", "-m", "vllm.entrypoints.openai.api_server"),
    ("python3", "-m", "vllm.entrypoints.openai.api_server"),
    ("serve",),
)
_MEMORY: Final = (
    "Not predicted for vLLM. The plugin keeps nothing on the device itself, but vLLM captures "
    "graphs for each draft length. Its log says how much memory they took ('Graph capturing "
    "finished'): compare an engine with the plugin and one without."
)


class _ConfigurationRecorder(SteeredConfiguration):
    """Keeps the engine's configuration, even if a check refuses it."""

    config: Any = None

    def prepare(self, config: Any) -> None:
        """Stores the configuration, then prepares it as the plugin does."""
        if self.config is None and is_engine_config(config):
            self.config = config
        super().prepare(config)


def verdict(flags: Sequence[str]) -> Verdict:
    """Returns the verdict for vLLM's flags.  Raises InputError or PluginError.

    Installs the hooks of the plugin's configuration in this process.
    """
    version = vllm_api.vllm_version()
    if not version:
        raise InputError(
            "vLLM is not installed in this environment: run this in the engine's image or "
            "environment, where the shim is installed too"
        )
    settings = VllmSettings.load_or_raise()
    version_check = settings.version_check("vLLM", version, vllm_api.TESTED, vllm_api.COMPATIBLE)
    if version_check.obstacle:
        return Verdict("vLLM", version, (version_check,))
    initial_checks = (version_check, protobuf_check())
    if initial_checks[-1].obstacle:
        return Verdict("vLLM", version, initial_checks)
    recorder = _ConfigurationRecorder(settings)
    refusal = ""
    try:
        recorder.hook()
        _create_engine_config(flags)
    except PluginError as error:
        refusal = str(error)
    except ImportError as error:
        raise InputError(f"vLLM {version} cannot be imported here: {error}") from error
    except (ValueError, OSError, AssertionError, RuntimeError) as error:
        raise InputError(f"vLLM refuses these flags itself: {error}") from error
    check_results = [*initial_checks, _plugin_check()]
    if recorder.config is not None:
        check_results += configuration_checks(recorder.config, settings)
    if refusal and refusal not in {check.refusal for check in check_results}:
        check_results.append(Check("the start", "refused", refusal))
    return _verdict_from_checks(version, settings, tuple(check_results), recorder.config)


def _verdict_from_checks(
    version: str, settings: VllmSettings, check_results: tuple[Check, ...], config: Any
) -> Verdict:
    if any(check.obstacle for check in check_results):
        return Verdict("vLLM", version, check_results)
    speculative = config.speculative_config
    gammas = settings.prepared_gammas(speculative.num_speculative_tokens)
    model = speculative.draft_model_config
    facts = {
        "model runner": str(model_runner(config)),
        "drafts in a step": _describe_drafting(version, config),
        "tensor parallelism": str(config.parallel_config.tensor_parallel_size),
        "async scheduling": "on" if config.scheduler_config.async_scheduling else "off",
        "largest batch": str(config.scheduler_config.max_num_seqs),
        "device": str(config.device_config.device_type),
    }
    if layers_warning := unread_layers_warning(config):
        facts["layers of the drafter"] = layers_warning
    name = str(speculative.method)
    drafter = Drafter(name, gammas, "" if model is None or name == "ngram" else str(model.model))
    memory = Memory({"predicted": False}, (_MEMORY,))
    variables = environment_variables(settings, gammas)
    return Verdict("vLLM", version, check_results, facts, (drafter,), memory, variables)


def _describe_drafting(version: str, config: Any) -> str:
    """Describes what the draft length changes, and how to make the drafter follow it."""
    effect = draft_length_effect(version, config)
    description = (
        f"{effect.drafting}; at a draft length of 0, {effect.at_zero}" if effect else "not known"
    )
    warning = ignored_length_warning(version, config)
    return f"{description}. {warning[0].upper()}{warning[1:]}" if warning else description


def _create_engine_config(flags: Sequence[str]) -> None:
    """Makes the configuration that a server with these flags would have."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = vllm_api.server_parser()(FlexibleArgumentParser(prog="vllm serve"))
    with raise_input_errors("vLLM"):
        parsed_options = parser.parse_args(strip_launcher(_LAUNCHERS, flags))
    if getattr(parsed_options, "model_tag", None):
        parsed_options.model = parsed_options.model_tag
    AsyncEngineArgs.from_cli_args(parsed_options).create_engine_config()


def _plugin_check() -> Check:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    enabled_plugins = os.environ.get("VLLM_PLUGINS")
    is_enabled = enabled_plugins is None or PLUGIN in {
        name.strip() for name in enabled_plugins.split(",")
    }
    is_installed = any(
        entry_point.name == PLUGIN for entry_point in entry_points(group=DEFAULT_PLUGINS_GROUP)
    )
    return make_check(
        "plugin",
        "found" if is_installed and is_enabled else "not loaded",
        {
            "vLLM does not find it: install speculation-controller-shim in this environment": (
                not is_installed
            ),
            f"VLLM_PLUGINS={enabled_plugins} leaves it out: add {PLUGIN}": not is_enabled,
        },
    )
