"""Entry point `speculation_controller` of the group `vllm.general_plugins`.

vLLM calls `register` in every process it starts: the API server, the engine core and the workers.
It logs an error while this module is imported and continues without it, so nothing is imported here
that could fail; an error of `register` ends the process.
"""

import logging
import os

SIDECAR_VARIABLE = "SPECULATION_SIDECAR"


def register() -> None:
    """Hooks the plugin into this process of vLLM; does nothing unless SPECULATION_SIDECAR is set.

    Raises SystemExit with the reason when the plugin cannot work here.
    """
    if not os.environ.get(SIDECAR_VARIABLE):
        return
    from engine_shim.common.errors import register_or_exit

    register_or_exit(_register)


def _register() -> None:
    from engine_shim.common.checks import protobuf_check, require
    from engine_shim.vllm import vllm_api
    from engine_shim.vllm.configuration import SteeredConfiguration
    from engine_shim.vllm.draft_lengths import hook_drafting
    from engine_shim.vllm.settings import VllmSettings

    _log_as_vllm()
    settings = VllmSettings.load_or_refuse()
    require([protobuf_check()])
    settings.require_version("vLLM", vllm_api.vllm_version(), vllm_api.TESTED, vllm_api.READ)
    SteeredConfiguration(settings).hook()
    hook_drafting()


def _log_as_vllm() -> None:
    """Sends the plugin's log lines to vLLM's handlers, which log only vLLM's own package."""
    ours, theirs = logging.getLogger("engine_shim"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)
