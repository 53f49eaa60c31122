"""vLLM's scheduler with its draft length chosen by the sidecar's plan.

One step, in vLLM's order:

  schedule                 select the requests, and the number of tokens of each
    _update_after_schedule choose the draft length of this step; the next step verifies the drafts
  update_from_output       the result has come: count its rows, let vLLM process it, report
  update_draft_token_ids   without async scheduling: store the drafts, except of undrafted requests

A request disables drafting in vLLM's extra arguments, which the OpenAI-compatible API takes as
`vllm_xargs`: `{"vllm_xargs": {"speculation": false}}`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

from engine_shim.common.errors import HookError, UnsupportedEngineError
from engine_shim.common.process import register_exit_handler
from engine_shim.common.row_groups import SPECULATION_PARAMETER
from engine_shim.common.status import LostCapabilityReporter, link_status, log_source_change
from engine_shim.common.waiting_prompts import WaitingPrompts
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.errors import LinkStartError
from engine_shim.link.lost_capabilities import error_reason
from engine_shim.link.plan_follower import StepChoice
from engine_shim.vllm import vllm_api
from engine_shim.vllm.draft_lengths import ignored_length_warning, unread_layers_warning
from engine_shim.vllm.engine_description import describe_engine
from engine_shim.vllm.recurrent_targets import require_correct_state
from engine_shim.vllm.settings import VllmSettings
from engine_shim.vllm.step_reports import LaunchedStep, StepReporter, StepRows, unread_prompt_tokens
from speculation.v1 import engine_pb2

_log = logging.getLogger(__name__)


class SchedulerHooks:
    """The plugin's part of one scheduler: chooses draft lengths and reports steps.

    Runs on the scheduler's own thread.

    gammas: the prepared draft lengths.  undrafted: requests that must not be drafted for.
    """

    def __init__(self, link: EngineLink, reporter: StepReporter, gammas: Iterable[int]) -> None:
        self._link = link
        self._reporter: StepReporter | None = reporter
        self._lost_capabilities = LostCapabilityReporter(link)
        self._has_gamma_zero = 0 in gammas
        self._last_choice = link.plan_follower.safe_default
        # The number of drafts per row that the last step was to make.
        self._draft_limit = self._last_choice.gamma
        # By request: the choice under which its drafts are made, which its next step verifies.
        self._choice_by_request: dict[str, StepChoice] = {}
        self.undrafted: set[str] = set()

    def after_add_request(self, request: Any, requests: Mapping[str, Any]) -> None:
        """Reads whether a request disables drafting.

        A part of a streamed request can disable drafting later.  Only a new request with the name
        of one that has just ended enables it again.
        """
        name: str = request.request_id
        if is_speculation_disabled(request):
            self.undrafted.add(name)
        elif requests.get(name) is request:
            self.undrafted.discard(name)

    def after_schedule(self, output: Any, requests: Mapping[str, Any]) -> None:
        """Chooses the draft length of a scheduled step, and remembers the step and the choice."""
        names = output.num_scheduled_tokens
        choice_by_request = self._choice_by_request
        self._forget_requests(output, requests)
        verified_choices = [choice_by_request.get(name) for name in names]
        draft_choice = self._choose(names, requests)
        if draft_choice is not None:
            choice_by_request.update(dict.fromkeys(names, draft_choice))
        if names:
            skips_drafting = self._has_gamma_zero and (
                draft_choice is None or self.undrafted.issuperset(names)
            )
            output.num_spec_tokens_to_schedule = self._draft_limit = (
                0 if skips_drafting else self._last_choice.gamma
            )
        if self._reporter is not None:
            context_lengths = [requests[name].num_computed_tokens for name in names]
            self._reporter.add_launched_step(
                LaunchedStep(
                    output, verified_choices, context_lengths, draft_choice, perf_counter()
                )
            )

    def _forget_requests(self, output: Any, requests: Mapping[str, Any]) -> None:
        """Forgets requests that have ended, and the drafts of those that were preempted."""
        for name in output.preempted_req_ids or ():
            self._choice_by_request.pop(name, None)
        for name in output.finished_req_ids:
            self._choice_by_request.pop(name, None)
            request = requests.get(name)
            # A new request may already have the same name.
            if request is None or request.is_finished():
                self.undrafted.discard(name)

    def _choose(self, names: Mapping[str, int], requests: Mapping[str, Any]) -> StepChoice | None:
        """Returns the choice for the rows that will decode next; None without such rows."""
        decoding_rows = 0
        for name, scheduled in names.items():
            request = requests[name]
            # vLLM's condition for a prompt that has been read to its end.
            decoding_rows += request.num_computed_tokens + scheduled >= (
                request.num_tokens + request.num_output_placeholders
            )
        if decoding_rows == 0:
            self._link.poll()
            return None
        choice = self._link.choose(decoding_rows)
        if choice.source is not self._last_choice.source:
            log_source_change(self._last_choice.source, choice.source)
        self._last_choice = choice
        return choice

    def truncate_drafts(self, drafts: Iterable[list[int]]) -> None:
        """Cuts each row's drafts to the number that the last step was to make.

        If a sequence is too long for the drafter, vLLM's first model runner returns zeros, always
        as many as it could draft.  Before vLLM 0.32 the second one returns that many in every step.
        """
        for row in drafts:
            del row[self._draft_limit :]

    def withhold_drafts(self, names: Iterable[str], requests: Mapping[str, Any]) -> None:
        """Removes the drafts of requests that must not be drafted for."""
        for name in self.undrafted.intersection(names):
            request = requests.get(name)
            if request is not None:
                request.spec_token_ids = []

    def count_rows(
        self, output: Any, result: Any, requests: Mapping[str, Any]
    ) -> tuple[LaunchedStep, StepRows] | None:
        """Counts the rows of a result before vLLM processes it."""
        if self._reporter is None:
            return None
        try:
            launch = self._reporter.pop_launched_step(output)
            if launch is None:
                return None
            return launch, self._reporter.count_rows(launch, result, requests, self.undrafted)
        except Exception as error:  # noqa: BLE001 - telemetry must not end an engine
            self._stop_reporting(error)
            return None

    def after_process_result(self, counted_step: tuple[LaunchedStep, StepRows] | None) -> None:
        """Reports a step after vLLM has processed its result."""
        if self._reporter is None or counted_step is None:
            return
        try:
            self._reporter.report_step(*counted_step)
        except Exception as error:  # noqa: BLE001 - same
            self._stop_reporting(error)

    def status(self) -> dict[str, Any]:
        """Returns the state of the link in plain values."""
        return link_status(self._link) | {
            "reporting": self._reporter is not None,
            "skipped": 0 if self._reporter is None else self._reporter.skipped_steps,
            "lost": self._lost_capabilities.status(),
        }

    def poll(self) -> None:
        """Reads the packets of the agent, between two steps."""
        self._link.poll()

    def close(self) -> None:
        """Ends the agent."""
        self._link.close()

    def _stop_reporting(self, error: Exception) -> None:
        self._reporter = None
        _log.exception("steps are no longer reported to the sidecar")
        self._lost_capabilities.mark_lost(engine_pb2.CAPABILITY_REPORT, error_reason(error))


def is_speculation_disabled(request: Any) -> bool:
    """Whether a request has the extra argument `speculation: false`.

    The OpenAI-compatible API converts false to 0, because its extra arguments are texts or numbers.
    """
    extra_args = getattr(request.sampling_params, "extra_args", None)
    if not isinstance(extra_args, Mapping):
        return False
    value = extra_args.get(SPECULATION_PARAMETER)
    return isinstance(value, (bool, int, float)) and value == 0


def start_hooks(scheduler: Any, settings: VllmSettings) -> SchedulerHooks:
    """Checks the scheduler, describes the engine and starts the link.  Raises PluginError."""
    config = scheduler.vllm_config
    speculative = config.speculative_config
    gammas = settings.prepared_gammas(speculative.num_speculative_tokens)
    prepared = set((scheduler.dynamic_sd_lookup or [])[1:])
    if not set(gammas) <= prepared:
        raise HookError(
            f"draft lengths {sorted(set(gammas) - prepared)} were not prepared by vLLM, only "
            f"{sorted(prepared)}: the plugin's configuration did not take effect"
        )
    require_correct_state(scheduler.kv_cache_config)
    for warning in (
        ignored_length_warning(vllm_api.vllm_version(), config),
        unread_layers_warning(config),
    ):
        if warning:
            _log.warning("%s", warning)
    spec = describe_engine(config, settings, gammas)
    try:
        link = EngineLink.start(spec, settings, speculative.num_speculative_tokens)
    except LinkStartError as error:
        raise UnsupportedEngineError(str(error)) from error
    register_exit_handler(link.close)
    reporter = StepReporter(
        link,
        gammas,
        may_draft_less=speculative.method == "ngram",
        is_async=bool(config.scheduler_config.async_scheduling),
        waiting_prompts=WaitingPrompts(lambda: scheduler.waiting, unread_prompt_tokens),
    )
    _log.info("%s is steered: draft lengths %s", spec.engine_id, ",".join(map(str, gammas)))
    return SchedulerHooks(link, reporter, gammas)


def make_steered_scheduler(base: Any, settings: VllmSettings) -> Any:
    """Returns a subclass of vLLM's scheduler, synchronous or not, that is steered.

    Raises UnsupportedEngineError for any other class.
    """
    scheduler = vllm_api.require_contract(vllm_api.SCHEDULER)
    vllm_api.require_contract(vllm_api.ASYNC_SCHEDULER)
    if not (isinstance(base, type) and issubclass(base, scheduler)):
        raise UnsupportedEngineError(
            f"the scheduler is {base!r}, which is not a subclass of vLLM's {vllm_api.SCHEDULER}"
        )

    class SteeredScheduler(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.speculation = start_hooks(self, settings)

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            self.speculation.after_add_request(request, self.requests)

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            self.speculation.after_schedule(scheduler_output, self.requests)
            super()._update_after_schedule(scheduler_output)
            if self.speculation.undrafted:
                self.speculation.withhold_drafts(
                    scheduler_output.num_scheduled_tokens, self.requests
                )

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            counted_step = self.speculation.count_rows(
                scheduler_output, model_runner_output, self.requests
            )
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self.speculation.after_process_result(counted_step)
            return outputs

        def update_draft_token_ids(self, draft_token_ids: Any) -> None:
            self.speculation.truncate_drafts(draft_token_ids.draft_token_ids)
            super().update_draft_token_ids(draft_token_ids)
            if self.speculation.undrafted:
                self.speculation.withhold_drafts(draft_token_ids.req_ids, self.requests)

        def shutdown(self) -> None:
            self.speculation.close()
            super().shutdown()

    SteeredScheduler.__name__ = SteeredScheduler.__qualname__ = f"Steered{base.__name__}"
    return SteeredScheduler
