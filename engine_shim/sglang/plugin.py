"""Entry point `speculation_controller` of the group `sglang.srt.plugins`.

SGLang calls `register` in every process it starts, before it builds anything.  SGLang would only
log an error of a plugin; here it ends the process, so that no server starts unsteered by mistake.
"""

import os
import sys

from engine_shim.common.errors import register_or_exit

SIDECAR_VARIABLE = "SPECULATION_SIDECAR"


def register() -> None:
    """Hooks the plugin into this process of SGLang; does nothing unless SPECULATION_SIDECAR is set.

    Raises SystemExit with the reason when the plugin cannot work here.
    """
    if not os.environ.get(SIDECAR_VARIABLE):
        return
    register_or_exit(_register)


def _register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from engine_shim.common.checks import protobuf_check, require_no_obstacle
    from engine_shim.sglang.adaptive_policy import SteeredPolicy
    from engine_shim.sglang.api import attention_dp, hook_check, sglang_api, versions
    from engine_shim.sglang.api.settings import load_settings
    from engine_shim.sglang.server_args import SteeredConfiguration
    from engine_shim.sglang.startup import EngineStartup

    settings = load_settings()
    require_no_obstacle([protobuf_check()])
    settings.require_version("SGLang", versions.sglang_version(), versions.TESTED)
    configuration = SteeredConfiguration(settings)
    register_resolution_hook(sglang_api.RESOLUTION_STEP)(configuration.resolve)
    hook_check.replace(sglang_api.CANDIDATE_STEPS, configuration.candidate_steps)
    hook_check.around(sglang_api.RESERVE_FOR_GRAPHS, configuration.reserve_for_graphs)
    hook_check.around(attention_dp.ADAPTIVE_UNSUPPORTED_REASON, attention_dp.around_adaptive_reason)
    hook_check.replace(sglang_api.POLICY_CLASS, SteeredPolicy)
    # A process that has not loaded the scheduler's module (the detokenizer) never runs one.
    if sglang_api.SCHEDULER_MODULE in sys.modules:
        startup = EngineStartup(settings)
        hook_check.around(sglang_api.INIT_MODEL_WORKER, startup.around_init_model_worker)
