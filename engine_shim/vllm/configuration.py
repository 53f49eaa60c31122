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

from engine_shim.common.checks import Check, checked, require
from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.vllm import vllm_api
from engine_shim.vllm.recurrent_targets import recurrent_check
from engine_shim.vllm.settings import VllmSettings

# Methods whose proposers accept a variable length, in both of vLLM's model runners.
METHODS: Final = ("eagle", "eagle3", "mtp", "dflash", "ngram", "draft_model")
_SCHEDULE: Final = "num_speculative_tokens_per_batch_size"
# Prefix of the error texts at the engine's start.
_LEAD: Final = "SPECULATION_SIDECAR is set, but "

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
            if is_served(config):
                require_schedule(config)

        post_init.speculation_controller = True  # type: ignore[attr-defined]
        return post_init

    def _around_get_scheduler_cls(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(original)
        def get_scheduler_cls(config: Any) -> Any:
            from engine_shim.vllm.steered_scheduler import steered

            return steered(original(config), self._settings)

        get_scheduler_cls.speculation_controller = True  # type: ignore[attr-defined]
        return get_scheduler_cls

    def prepare(self, config: Any) -> None:
        """Writes the schedule into a `VllmConfig`.  Raises UnsupportedEngineError.

        Configurations that vLLM makes for itself are not changed (`is_served`), and a copy of a
        prepared configuration already has the schedule.
        """
        if not is_served(config):
            return
        require(checks(config, self._settings))
        speculative = config.speculative_config
        gammas = self._settings.gammas_within(speculative.num_speculative_tokens)
        largest = config.scheduler_config.max_num_seqs
        schedule = schedule_of(gammas, largest)
        if getattr(speculative, _SCHEDULE) is None:
            _log.info("draft lengths %s are prepared", ",".join(map(str, gammas)))
            setattr(speculative, _SCHEDULE, schedule)


def is_served(config: Any) -> bool:
    """Whether a `VllmConfig` belongs to an engine.

    vLLM makes others for itself: without a model, and for the drafter's model alone, to warm its
    weight cache.
    """
    model = config.model_config
    return model is not None and getattr(model, "runner_type", "") != "draft"


def schedule_of(gammas: Sequence[int], largest: int) -> Schedule:
    """Returns a schedule with every draft length, each at as large a batch size as possible.

    vLLM chooses the sizes of its graphs by the largest batch of each length.
    """
    first = largest - len(gammas) + 1
    longest, *others = sorted(gammas, reverse=True)
    return [(1, first, longest)] + [
        (first + place, first + place, gamma) for place, gamma in enumerate(others, start=1)
    ]


def impossible_gammas(gammas: Sequence[int], most: int, largest: int) -> str | None:
    """Returns why an engine cannot prepare these draft lengths; None if it can.

    most: `num_speculative_tokens`.  largest: `max_num_seqs`.
    """
    listed = ",".join(map(str, gammas))
    if gammas[-1] == 0:
        return "SPECULATION_GAMMAS lists no draft length above 0: there is nothing to steer"
    if gammas[-1] != most:
        return (
            f"SPECULATION_GAMMAS is {listed}, but num_speculative_tokens is {most}: it has to be "
            "the largest of them, because vLLM sizes its buffers by it"
        )
    if largest < len(gammas):
        return (
            f"max_num_seqs is {largest}: vLLM can prepare one draft length for each batch size, "
            f"and {listed} are {len(gammas)}; raise it, or list fewer in SPECULATION_GAMMAS"
        )
    return None


def checks(config: Any, settings: VllmSettings) -> tuple[Check, ...]:
    """Checks a `VllmConfig` of an engine, before or after its schedule was written."""
    speculative, parallel = config.speculative_config, config.parallel_config
    found = (
        _method_check(speculative),
        recurrent_check(config.model_config),
        _check(
            "data parallelism",
            parallel.data_parallel_size,
            f"data_parallel_size is {parallel.data_parallel_size}: vLLM allows one draft length "
            "only where its ranks have batches of their own; run one server each",
            parallel.data_parallel_size > 1,
        ),
        _check(
            "pipeline parallelism",
            parallel.pipeline_parallel_size,
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: several batches are on "
            "their way at once, which is untested; use tensor_parallel_size instead",
            parallel.pipeline_parallel_size > 1,
        ),
    )
    if speculative is None:
        return found
    most, largest = speculative.num_speculative_tokens, config.scheduler_config.max_num_seqs
    gammas = settings.gammas_within(most)
    verifies = getattr(speculative, "enable_adaptive_verification", False)
    parallel_drafts = speculative.method != "dflash" and getattr(
        speculative, "parallel_drafting", False
    )
    return (
        *found,
        _check(
            "parallel drafting",
            "on" if parallel_drafts else "off",
            f"the drafter drafts all tokens in one pass (parallel_drafting with "
            f"{speculative.method!r}: P-EAGLE, PARD), and vLLM misreads its tokens as rows of "
            "another length when the draft length changes; use another drafter",
            parallel_drafts,
        ),
        _check(
            "adaptive verification",
            "on" if verifies else "off",
            "enable_adaptive_verification is set: vLLM then verifies another number of drafts "
            "than the sidecar asks for; leave it out",
            verifies,
        ),
        Check(
            "draft lengths",
            ",".join(map(str, gammas)),
            impossible_gammas(gammas, most, largest) or "",
        ),
        _schedule_check(speculative, gammas, largest),
    )


def _method_check(speculative: Any) -> Check:
    methods = ", ".join(METHODS)
    if speculative is None:
        reason = f"there is no --speculative-config: one with a method of {methods} is needed"
        return Check("method", "none", f"{reason} (or unset SPECULATION_SIDECAR)", _LEAD)
    return _check(
        "method",
        speculative.method,
        f"the speculative method is {speculative.method!r}: one of {methods} is needed, whose "
        "drafts may have another length in each step",
        speculative.method not in METHODS,
    )


def _schedule_check(speculative: Any, gammas: Sequence[int], largest: int) -> Check:
    found = getattr(speculative, _SCHEDULE)
    topic = "schedule of draft lengths"
    if found is None or impossible_gammas(gammas, gammas[-1], largest):
        return Check(topic, "none" if found is None else "given")
    differs = [tuple(entry) for entry in found] != schedule_of(gammas, largest)
    obstacle = (
        f"{_SCHEDULE} and SPECULATION_SIDECAR exclude each other: the sidecar decides, and "
        "SPECULATION_GAMMAS lists the draft lengths; leave the schedule out"
    )
    return checked(topic, "given" if differs else "the plugin's", {obstacle: differs})


def _check(topic: str, found: object, obstacle: str, is_so: object) -> Check:
    return checked(topic, found, {obstacle: is_so}, _LEAD)


def require_schedule(config: Any) -> None:
    """Raises UnsupportedEngineError if vLLM has removed the schedule from its configuration."""
    if getattr(config.speculative_config, _SCHEDULE) is None:
        raise UnsupportedEngineError(
            "vLLM does not allow variable draft lengths in this configuration; its log has the "
            "reason: 'Disabling num_speculative_tokens_per_batch_size'"
        )
