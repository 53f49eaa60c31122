"""An SGLang plugin for steering_bench: the SD2 drafter, with its steering left out."""

import sys
from typing import Any

from engine_shim.sglang.api import sglang_api


def leave_out() -> None:
    """The MLPs run as if nothing steered them, and the steering vector is a copy."""
    if sglang_api.SCHEDULER_MODULE not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def patch(scheduler: Any) -> None:
        del scheduler
        from engine_shim.sglang.drafters import sd2_model

        mlp_class: Any = sd2_model.Sd2Mlp
        model_class: Any = sd2_model.SteeredModel

        def plain_copy(model: Any, features: Any) -> Any:
            return features[..., : model.target_width].clone()

        def unsteered(mlp: Any, x: Any, forward_batch: Any = None) -> Any:
            mlp.steering = None
            return forward(mlp, x, forward_batch)

        forward = mlp_class.forward
        mlp_class.forward, model_class._steering = unsteered, plain_copy

    target = f"{sglang_api.SCHEDULER_MODULE}.Scheduler.maybe_init_draft_worker"
    HookRegistry.register(target, patch, HookType.BEFORE)
