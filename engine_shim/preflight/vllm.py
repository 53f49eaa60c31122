"""Tells whether a vLLM with these flags would be steered, with the checks of a real start.

vLLM's own parser makes the configuration with the plugin's hooks in place, as in its API server.
So this command refuses what a start refuses.  Only configurations are read, no weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any, Final

from engine_shim.common.checks import Check, checked, protobuf_check
from engine_shim.common.errors import PluginError
from engine_shim.preflight.verdict import (
    Drafter,
    InputError,
    Memory,
    Verdict,
    flags_behind,
    parsing,
    variables_of,
)
from engine_shim.vllm import vllm_api
from engine_shim.vllm.configuration import SteeredConfiguration, checks, is_served
from engine_shim.vllm.draft_lengths import disregarded, draft_length_of, runner_of, unread_layers
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


class _Observed(SteeredConfiguration):
    """Keeps the engine's configuration, even if a check refuses it."""

    config: Any = None

    def prepare(self, config: Any) -> None:
        """Stores the configuration, then prepares it as the plugin does."""
        if self.config is None and is_served(config):
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
    settings = VllmSettings.load_or_refuse()
    first = settings.version_check("vLLM", version, vllm_api.TESTED, vllm_api.READ)
    if first.obstacle:
        return Verdict("vLLM", version, (first,))
    begun = (first, protobuf_check())
    if begun[-1].obstacle:
        return Verdict("vLLM", version, begun)
    observed = _Observed(settings)
    refusal = ""
    try:
        observed.hook()
        _make(flags)
    except PluginError as error:
        refusal = str(error)
    except ImportError as error:
        raise InputError(f"vLLM {version} cannot be imported here: {error}") from error
    except (ValueError, OSError, AssertionError, RuntimeError) as error:
        raise InputError(f"vLLM refuses these flags itself: {error}") from error
    found = [*begun, _plugin_check()]
    if observed.config is not None:
        found += checks(observed.config, settings)
    if refusal and refusal not in {check.refusal for check in found}:
        found.append(Check("the start", "refused", refusal))
    return _answered(version, settings, tuple(found), observed.config)


def _answered(
    version: str, settings: VllmSettings, found: tuple[Check, ...], config: Any
) -> Verdict:
    if any(check.obstacle for check in found):
        return Verdict("vLLM", version, found)
    speculative = config.speculative_config
    gammas = settings.gammas_within(speculative.num_speculative_tokens)
    model = speculative.draft_model_config
    facts = {
        "model runner": str(runner_of(config)),
        "drafts in a step": _drafting(version, config),
        "tensor parallelism": str(config.parallel_config.tensor_parallel_size),
        "async scheduling": "on" if config.scheduler_config.async_scheduling else "off",
        "largest batch": str(config.scheduler_config.max_num_seqs),
        "device": str(config.device_config.device_type),
    }
    if unread := unread_layers(config):
        facts["layers of the drafter"] = unread
    name = str(speculative.method)
    drafter = Drafter(name, gammas, "" if model is None or name == "ngram" else str(model.model))
    memory = Memory({"predicted": False}, (_MEMORY,))
    variables = variables_of(settings, gammas)
    return Verdict("vLLM", version, found, facts, (drafter,), memory, variables)


def _drafting(version: str, config: Any) -> str:
    """Describes what the draft length changes, and how to make the drafter follow it."""
    length = draft_length_of(version, config)
    known = (
        f"{length.drafting}; at a draft length of 0, {length.at_zero}" if length else "not known"
    )
    concern = disregarded(version, config)
    return f"{known}. {concern[0].upper()}{concern[1:]}" if concern else known


def _make(flags: Sequence[str]) -> None:
    """Makes the configuration that a server with these flags would have."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = vllm_api.server_parser()(FlexibleArgumentParser(prog="vllm serve"))
    with parsing("vLLM"):
        asked = parser.parse_args(flags_behind(_LAUNCHERS, flags))
    if getattr(asked, "model_tag", None):
        asked.model = asked.model_tag
    AsyncEngineArgs.from_cli_args(asked).create_engine_config()


def _plugin_check() -> Check:
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    allowed = os.environ.get("VLLM_PLUGINS")
    is_named = allowed is None or PLUGIN in {name.strip() for name in allowed.split(",")}
    is_there = any(one.name == PLUGIN for one in entry_points(group=DEFAULT_PLUGINS_GROUP))
    return checked(
        "plugin",
        "found" if is_there and is_named else "not loaded",
        {
            "vLLM does not find it: install speculation-controller-shim in this environment": (
                not is_there
            ),
            f"VLLM_PLUGINS={allowed} leaves it out: add {PLUGIN}": not is_named,
        },
    )
