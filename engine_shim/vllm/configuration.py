"""Checks the engine's configuration, and completes it so that vLLM prepares every draft length.

vLLM can select its draft length by the batch size (`num_speculative_tokens_per_batch_size`), and
prepares graphs for each length in this schedule.  The plugin writes a schedule that contains all of
SPECULATION_GAMMAS, and then selects the length by the sidecar's plan instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

from engine_shim.common.checks import Check, make_check, require_no_obstacle
from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.vllm import vllm_api
from engine_shim.vllm.recurrent_targets import recurrent_check
from engine_shim.vllm.settings import VllmSettings

# Methods whose proposers accept a variable length, in both of vLLM's model runners.
METHODS: Final = ("eagle", "eagle3", "mtp", "dflash", "ngram", "draft_model")
_SCHEDULE_FIELD: Final = "num_speculative_tokens_per_batch_size"
# Prefix of the error texts at the engine's start.
_ERROR_PREFIX: Final = "SPECULATION_SIDECAR is set, but "

_log = logging.getLogger(__name__)

Schedule = list[tuple[int, int, int]]


class SteeredConfiguration:
    """Hooks for every process in which vLLM makes or uses its configuration."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings

    def hook(self) -> None:
        """Wraps `VllmConfig.__post_init__` and `SchedulerConfig.get_scheduler_cls`, once."""
        config = vllm_api.require_contract(vllm_api.CONFIG)
        scheduler_config = vllm_api.require_contract(vllm_api.SCHEDULER_CONFIG)
        if not hasattr(config.__post_init__, "speculation_controller"):
            config.__post_init__ = self._around_post_init(config.__post_init__)
        original = scheduler_config.get_scheduler_cls
        if not hasattr(original, "speculation_controller"):
            scheduler_config.get_scheduler_cls = self._around_get_scheduler_cls(original)

    def _around_post_init(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(original)
        def post_init(config: Any) -> None:
            self.prepare(config)
            original(config)
            if is_engine_config(config):
                require_schedule(config)

        post_init.speculation_controller = True  # type: ignore[attr-defined]
        return post_init

    def _around_get_scheduler_cls(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(original)
        def get_scheduler_cls(config: Any) -> Any:
            from engine_shim.vllm.steered_scheduler import make_steered_scheduler

            return make_steered_scheduler(original(config), self._settings)

        get_scheduler_cls.speculation_controller = True  # type: ignore[attr-defined]
        return get_scheduler_cls

    def prepare(self, config: Any) -> None:
        """Writes the schedule into a `VllmConfig`.  Raises UnsupportedEngineError.

        Configurations that vLLM makes for itself are not changed (`is_engine_config`), and a copy
        of a prepared configuration already has the schedule.
        """
        if not is_engine_config(config):
            return
        require_no_obstacle(configuration_checks(config, self._settings))
        speculative = config.speculative_config
        gammas = self._settings.prepared_gammas(speculative.num_speculative_tokens)
        max_batch_size = config.scheduler_config.max_num_seqs
        schedule = make_schedule(gammas, max_batch_size)
        if getattr(speculative, _SCHEDULE_FIELD) is None:
            _log.info("draft lengths %s are prepared", ",".join(map(str, gammas)))
            setattr(speculative, _SCHEDULE_FIELD, schedule)


def is_engine_config(config: Any) -> bool:
    """Whether a `VllmConfig` belongs to an engine.

    vLLM makes others for itself: without a model, and for the drafter's model alone, to warm its
    weight cache.
    """
    model = config.model_config
    return model is not None and getattr(model, "runner_type", "") != "draft"


def make_schedule(gammas: Sequence[int], max_batch_size: int) -> Schedule:
    """Returns a schedule with every draft length, each at as large a batch size as possible.

    vLLM chooses the sizes of its graphs by the largest batch of each length.
    """
    first_batch_size = max_batch_size - len(gammas) + 1
    longest, *shorter_gammas = sorted(gammas, reverse=True)
    return [(1, first_batch_size, longest)] + [
        (first_batch_size + offset, first_batch_size + offset, gamma)
        for offset, gamma in enumerate(shorter_gammas, start=1)
    ]


def unsupported_gammas_reason(
    gammas: Sequence[int], max_gamma: int, max_batch_size: int
) -> str | None:
    """Returns why an engine cannot prepare these draft lengths; None if it can.

    max_gamma: `num_speculative_tokens`.  max_batch_size: `max_num_seqs`.
    """
    listed = ",".join(map(str, gammas))
    if gammas[-1] == 0:
        return "SPECULATION_GAMMAS lists no draft length above 0: there is nothing to steer"
    if gammas[-1] != max_gamma:
        return (
            f"SPECULATION_GAMMAS is {listed}, but num_speculative_tokens is {max_gamma}: it has to "
            "be "
            "the largest of them, because vLLM sizes its buffers by it"
        )
    if max_batch_size < len(gammas):
        return (
            f"max_num_seqs is {max_batch_size}: vLLM can prepare one draft length for each batch "
            "size, "
            f"and {listed} are {len(gammas)}; raise it, or list fewer in SPECULATION_GAMMAS"
        )
    return None


def configuration_checks(config: Any, settings: VllmSettings) -> tuple[Check, ...]:
    """Checks a `VllmConfig` of an engine, before or after its schedule was written."""
    speculative, parallel = config.speculative_config, config.parallel_config
    basic_checks = (
        _method_check(speculative),
        recurrent_check(config.model_config),
        _prefixed_check(
            "data parallelism",
            parallel.data_parallel_size,
            f"data_parallel_size is {parallel.data_parallel_size}: vLLM allows one draft length "
            "only where its ranks have batches of their own; run one server each",
            parallel.data_parallel_size > 1,
        ),
        _prefixed_check(
            "pipeline parallelism",
            parallel.pipeline_parallel_size,
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: several batches are on "
            "their way at once, which is untested; use tensor_parallel_size instead",
            parallel.pipeline_parallel_size > 1,
        ),
    )
    if speculative is None:
        return basic_checks
    max_gamma, max_batch_size = (
        speculative.num_speculative_tokens,
        config.scheduler_config.max_num_seqs,
    )
    gammas = settings.prepared_gammas(max_gamma)
    is_verification_adaptive = getattr(speculative, "enable_adaptive_verification", False)
    has_parallel_drafting = speculative.method != "dflash" and getattr(
        speculative, "parallel_drafting", False
    )
    return (
        *basic_checks,
        _prefixed_check(
            "parallel drafting",
            "on" if has_parallel_drafting else "off",
            f"the drafter drafts all tokens in one pass (parallel_drafting with "
            f"{speculative.method!r}: P-EAGLE, PARD), and vLLM misreads its tokens as rows of "
            "another length when the draft length changes; use another drafter",
            has_parallel_drafting,
        ),
        _prefixed_check(
            "adaptive verification",
            "on" if is_verification_adaptive else "off",
            "enable_adaptive_verification is set: vLLM then verifies another number of drafts "
            "than the sidecar asks for; leave it out",
            is_verification_adaptive,
        ),
        Check(
            "draft lengths",
            ",".join(map(str, gammas)),
            unsupported_gammas_reason(gammas, max_gamma, max_batch_size) or "",
        ),
        _schedule_check(speculative, gammas, max_batch_size),
    )


def _method_check(speculative: Any) -> Check:
    methods = ", ".join(METHODS)
    if speculative is None:
        reason = f"there is no --speculative-config: one with a method of {methods} is needed"
        return Check("method", "none", f"{reason} (or unset SPECULATION_SIDECAR)", _ERROR_PREFIX)
    return _prefixed_check(
        "method",
        speculative.method,
        f"the speculative method is {speculative.method!r}: one of {methods} is needed, whose "
        "drafts may have another length in each step",
        speculative.method not in METHODS,
    )


def _schedule_check(speculative: Any, gammas: Sequence[int], max_batch_size: int) -> Check:
    user_schedule = getattr(speculative, _SCHEDULE_FIELD)
    topic = "schedule of draft lengths"
    if user_schedule is None or unsupported_gammas_reason(gammas, gammas[-1], max_batch_size):
        return Check(topic, "none" if user_schedule is None else "given")
    differs = [tuple(entry) for entry in user_schedule] != make_schedule(gammas, max_batch_size)
    obstacle = (
        f"{_SCHEDULE_FIELD} and SPECULATION_SIDECAR exclude each other: the sidecar decides, and "
        "SPECULATION_GAMMAS lists the draft lengths; leave the schedule out"
    )
    return make_check(topic, "given" if differs else "the plugin's", {obstacle: differs})


def _prefixed_check(topic: str, actual: object, obstacle: str, applies: object) -> Check:
    return make_check(topic, actual, {obstacle: applies}, _ERROR_PREFIX)


def require_schedule(config: Any) -> None:
    """Raises UnsupportedEngineError if vLLM has removed the schedule from its configuration."""
    if getattr(config.speculative_config, _SCHEDULE_FIELD) is None:
        raise UnsupportedEngineError(
            "vLLM does not allow variable draft lengths in this configuration; its log has the "
            "reason: 'Disabling num_speculative_tokens_per_batch_size'"
        )
