"""Completes and checks the engine's configuration.

SGLang sizes its buffers from the file that `--speculative-adaptive-config` names, in several places
outside its policy object.  Here all of them read SPECULATION_GAMMAS instead.  The plugin switches
`--speculative-adaptive` on, and the user writes neither that option nor the file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine_shim.common.checks import Check, make_check, require_no_obstacle
from engine_shim.sglang.api import attention_dp, hook_check, sglang_api
from engine_shim.sglang.api.attention import attention_shape
from engine_shim.sglang.drafters.foreign_checkpoints import foreign_kind, raw_config
from engine_shim.sglang.drafters.lookup import device_bytes
from engine_shim.sglang.learning.verified_step import MAX_WORKING_BYTES
from engine_shim.sglang.memory import MIB, Prediction, predict_reserve

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from engine_shim.sglang.api.settings import PluginSettings

_log = logging.getLogger(__name__)


class SteeredConfiguration:
    """Hooks for every process in which SGLang resolves or uses its configuration."""

    def __init__(self, settings: PluginSettings) -> None:
        self._settings = settings

    def candidate_steps(self, cfg_path: str | None = None) -> list[int]:
        """Replaces SGLang's `resolve_candidate_steps_from_config` by the one setting."""
        return list(self._settings.gammas)

    def resolve(self, args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
        """Wraps the configuration step that settles speculation.

        Raises UnsupportedEngineError or HookError; the server then does not start.
        """
        from sglang.srt.arg_groups.overrides import declare_resolution

        hook_check.require_hooks(*hook_check.registered_targets())
        config = sglang_api.resolving_args(args)
        require_no_obstacle(requested_flag_checks(config, self._settings))
        require_no_obstacle(checkpoint_kind_checks(config, self._settings))
        has_dflash = self._settings.dflash_model_path != "" or sglang_api.is_dflash_only(config)
        if sglang_api.is_dflash_only(config):
            # SGLang builds an engine for chains of any length; the block replaces its EAGLE head.
            declare_resolution(
                args,
                "speculation_controller",
                speculative_algorithm=sglang_api.CHAIN_ALGORITHM,
                speculative_num_draft_tokens=None,
            )
        declare_resolution(args, "speculation_controller", speculative_adaptive=True)
        previous(args)
        require_no_obstacle(flag_checks(args, self._settings, has_dflash=has_dflash))
        require_no_obstacle(resolution_checks(args, self._settings))

    def reserve_for_graphs(
        self, original: Callable[[ServerArgs], float], args: ServerArgs
    ) -> float:
        """Wraps SGLang's `reserve_for_graph_mb` (MiB): adds what further draft lengths take.

        SGLang calls it only if it chooses --mem-fraction-static itself.
        """
        prediction = self.predict_memory(args)
        _log.info("%s", prediction)
        return original(args) + prediction.total_mib

    def predict_memory(self, args: ServerArgs) -> Prediction:
        """Predicts the memory of each draft length but the first, and of the plugin's parts.

        Respects SPECULATION_GRAPH_LIMITS.
        """
        view = sglang_api.resolving_args(args)
        batches, limits = sglang_api.captured_batch_sizes(args), self._settings.graph_limits
        # SGLang sizes its memory before it fills in a draft length that the user has not set.
        start_gamma = view.speculative_num_steps or sglang_api.DEFAULT_GAMMA
        # DFlash alone drafts its block with one backend for all draft lengths.  The check reads the
        # arguments as the user wrote them, because SGLang resolves them to an EAGLE engine.
        shape = attention_shape(args, has_drafter_backends=not sglang_api.is_dflash_only(args))
        return Prediction(
            shape,
            start_gamma,
            tuple(
                predict_reserve(
                    gamma, [size for size in batches if size <= limits.get(gamma, size)], shape
                )
                for gamma in self._settings.gammas
                if gamma != start_gamma
            ),
            self._parts_mib(view, shape.target.context_tokens),
        )

    def _parts_mib(self, view: Any, context: int) -> dict[str, float]:
        """Returns the device memory of the plugin's own parts, in MiB by purpose."""
        settings = self._settings
        parts = {}
        if settings.signals_folder:
            parts["collecting training signals"] = (
                settings.signals_device_megabytes + MAX_WORKING_BYTES / MIB
            )
        if settings.lookup:
            rows = sglang_api.max_request_rows(view)
            width = sglang_api.max_row_tokens(view, context, settings.gammas[-1] + 1)
            parts["prompt lookup"] = device_bytes(rows, width) / MIB
        return parts


def requested_flag_checks(config: Any, settings: PluginSettings) -> tuple[Check, ...]:
    """Checks that the user set no option that conflicts with a steered draft length.

    config: SGLang's arguments as the user wrote them, before they are resolved.
    """
    gammas, safe_gamma = settings.gammas, settings.safe_gamma
    unlisted_text = f"is not among SPECULATION_GAMMAS {','.join(map(str, gammas))}"
    algorithm, steps = config.speculative_algorithm, config.speculative_num_steps
    has_dflash_only = sglang_api.is_dflash_only(config)
    skip_setting = os.environ.get(sglang_api.SKIP_VARIABLE, "").lower()
    drafter_obstacles = {
        f"SPECULATION_SIDECAR is set, but --speculative-algorithm is {algorithm}: one of "
        f"{', '.join(sglang_api.ALGORITHMS)} is needed (or unset SPECULATION_SIDECAR)": (
            (algorithm or "").upper() not in sglang_api.ALGORITHMS
        ),
        "SPECULATION_DFLASH_MODEL_PATH names a second drafter, but --speculative-algorithm is "
        "DFLASH already: unset one of them": has_dflash_only and settings.dflash_model_path != "",
        "--enable-custom-logit-processor: SGLang applies such processors where DFLASH "
        "verifies, but not where EAGLE's parts do, which a steered DFlash uses; leave it out, "
        "or unset SPECULATION_SIDECAR": has_dflash_only and config.enable_custom_logit_processor,
        "--speculative-algorithm DFLASH needs --speculative-draft-model-path": (
            has_dflash_only and config.speculative_draft_model_path is None
        ),
        **{
            f"--{option.replace('_', '-')} is untested where the draft length is steered: leave "
            "it out": has_dflash_only and getattr(config, option) is not None
            for option in ("speculative_dflash_block_size", "speculative_draft_window_size")
        },
    }
    adaptive_obstacles = {
        "--speculative-adaptive-config and SPECULATION_SIDECAR exclude each other: the "
        "sidecar decides, and SPECULATION_GAMMAS lists the draft lengths": (
            config.speculative_adaptive_config is not None
        )
    }
    topk_obstacles = {
        f"--speculative-eagle-topk {config.speculative_eagle_topk}: the draft length can "
        "be steered for chains (1) only, not for trees; set it to 1": (
            config.speculative_eagle_topk not in {None, 1}
        )
    }
    length_obstacles = {
        "SPECULATION_GAMMAS lists no draft length above 0: there is nothing to steer": (
            gammas[-1] == 0
        ),
        f"--speculative-num-steps {steps} {unlisted_text}: "
        "add it there, or start with one of them": (steps is not None and steps not in gammas),
        f"SPECULATION_SAFE_GAMMA={safe_gamma} {unlisted_text}: add it there, or name one of them": (
            safe_gamma is not None and safe_gamma not in gammas
        ),
    }
    sleep_obstacles = {
        f"unset {sglang_api.SKIP_VARIABLE}: with it the drafter would wake up with stale "
        "state; the sidecar's plan decides step by step whether the drafter sleeps": (
            skip_setting in {"1", "true", "yes", "y"}
        )
    }
    return (
        make_check("drafter", algorithm or "none", drafter_obstacles),
        make_check(
            "adaptive mode of SGLang",
            config.speculative_adaptive_config or "none",
            adaptive_obstacles,
        ),
        make_check("topk", config.speculative_eagle_topk or 1, topk_obstacles),
        make_check("draft lengths", ",".join(map(str, gammas)), length_obstacles),
        make_check("sleep of the drafter", skip_setting or "by plan", sleep_obstacles),
    )


def checkpoint_kind_checks(config: Any, settings: PluginSettings) -> tuple[Check, ...]:
    """Checks by their config.json that all drafters are of kinds that SGLang can run.

    config: SGLang's arguments as the user wrote them, before they are resolved.  Raises
    UnsupportedEngineError for a config.json that is not a JSON object.
    """
    paths = {
        "kind of drafter": config.speculative_draft_model_path,
        "kind of second drafter": settings.dflash_model_path,
    }
    return tuple(
        Check(topic, "unknown to SGLang" if kind else "known", kind and f"{path}: {kind}")
        for topic, path in paths.items()
        if path
        for kind in [foreign_kind(raw_config(path))]
    )


def flag_checks(
    args: ServerArgs, settings: PluginSettings, *, has_dflash: bool
) -> tuple[Check, ...]:
    """Checks how the engine runs, by its flags.  has_dflash: it has a DFlash drafter."""
    return (
        attention_dp.attention_dp_check(args, settings, has_dflash=has_dflash),
        *sglang_api.flag_checks(args),
        *([sglang_api.dflash_options_check(args)] if has_dflash else []),
    )


def resolution_checks(args: ServerArgs, settings: PluginSettings) -> tuple[Check, ...]:
    """Checks the flags as SGLang has resolved them; must run after its speculation step."""
    config = sglang_api.resolving_args(args)
    start_gamma = config.speculative_num_steps
    limit_obstacles = {
        f"SPECULATION_GRAPH_LIMITS limits {start_gamma}, the draft length that the engine starts "
        "with: it is needed at every batch size (--speculative-num-steps names another)": (
            start_gamma in settings.graph_limits
        )
    }
    adaptive_obstacles = {
        "SPECULATION_SIDECAR is set, but SGLang switched adaptive speculation off (its log says "
        "why: 'speculative_adaptive disabled')": not config.speculative_adaptive
    }
    return (
        sglang_api.sglang_conditions_check(args),
        make_check("draft length at the start", start_gamma, limit_obstacles),
        make_check(
            "draft lengths that change",
            "allowed" if config.speculative_adaptive else "switched off",
            adaptive_obstacles,
        ),
    )
