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
    from engine_shim.common.checks import protobuf_check, require_no_obstacle
    from engine_shim.vllm import vllm_api
    from engine_shim.vllm.configuration import SteeredConfiguration
    from engine_shim.vllm.draft_lengths import hook_drafting
    from engine_shim.vllm.settings import VllmSettings

    _use_vllm_log_handlers()
    settings = VllmSettings.load_or_raise()
    require_no_obstacle([protobuf_check()])
    settings.require_version("vLLM", vllm_api.vllm_version(), vllm_api.TESTED, vllm_api.COMPATIBLE)
    SteeredConfiguration(settings).hook()
    hook_drafting()


def _use_vllm_log_handlers() -> None:
    """Sends the plugin's log lines to vLLM's handlers, which log only vLLM's own package."""
    shim_logger, vllm_logger = logging.getLogger("engine_shim"), logging.getLogger("vllm")
    if vllm_logger.handlers and not shim_logger.handlers:
        shim_logger.handlers, shim_logger.propagate = list(vllm_logger.handlers), False
        shim_logger.setLevel(vllm_logger.level)
