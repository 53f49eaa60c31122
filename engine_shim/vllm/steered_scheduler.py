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
from engine_shim.common.process import at_exit
from engine_shim.common.row_groups import SPECULATION
from engine_shim.common.status import Losses, link_status, log_source
from engine_shim.common.waiting_prompts import WaitingPrompts
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.errors import LinkStartError
from engine_shim.link.losses import reason_of
from engine_shim.link.plan_follower import StepChoice
from engine_shim.vllm import vllm_api
from engine_shim.vllm.draft_lengths import disregarded, unread_layers
from engine_shim.vllm.engine_description import introduce
from engine_shim.vllm.recurrent_targets import require_kept_state
from engine_shim.vllm.settings import VllmSettings
from engine_shim.vllm.step_reports import Launch, Rows, StepTap, prompt_tokens
from speculation.v1 import engine_pb2

_log = logging.getLogger(__name__)


class Steering:
    """The plugin's part of one scheduler: chooses draft lengths and reports steps.

    Runs on the scheduler's own thread.

    gammas: the prepared draft lengths.  undrafted: requests that must not be drafted for.
    """

    def __init__(self, link: EngineLink, tap: StepTap, gammas: Iterable[int]) -> None:
        self._link = link
        self._tap: StepTap | None = tap
        self._losses = Losses(link)
        self._can_rest = 0 in gammas
        self._last = link.steering.safe
        # The number of drafts per row that the last step was to make.
        self._drafts = self._last.gamma
        # By request: the choice under which its drafts are made, which its next step verifies.
        self._drafted_under: dict[str, StepChoice] = {}
        self.undrafted: set[str] = set()

    def arrived(self, request: Any, requests: Mapping[str, Any]) -> None:
        """Reads whether a request disables drafting.

        A part of a streamed request can disable drafting later.  Only a new request with the name
        of one that has just ended enables it again.
        """
        name: str = request.request_id
        if may_not_be_drafted_for(request):
            self.undrafted.add(name)
        elif requests.get(name) is request:
            self.undrafted.discard(name)

    def scheduled(self, output: Any, requests: Mapping[str, Any]) -> None:
        """Chooses the draft length of a scheduled step, and remembers the step and the choice."""
        names = output.num_scheduled_tokens
        under = self._drafted_under
        self._forget(output, requests)
        drafted_under = [under.get(name) for name in names]
        drafts_under = self._choose(names, requests)
        if drafts_under is not None:
            under.update(dict.fromkeys(names, drafts_under))
        if names:
            rests = self._can_rest and (drafts_under is None or self.undrafted.issuperset(names))
            output.num_spec_tokens_to_schedule = self._drafts = 0 if rests else self._last.gamma
        if self._tap is not None:
            computed = [requests[name].num_computed_tokens for name in names]
            self._tap.launched(
                Launch(output, drafted_under, computed, drafts_under, perf_counter())
            )

    def _forget(self, output: Any, requests: Mapping[str, Any]) -> None:
        """Forgets requests that have ended, and the drafts of those that were preempted."""
        for name in output.preempted_req_ids or ():
            self._drafted_under.pop(name, None)
        for name in output.finished_req_ids:
            self._drafted_under.pop(name, None)
            request = requests.get(name)
            # A new request may already have the same name.
            if request is None or request.is_finished():
                self.undrafted.discard(name)

    def _choose(self, names: Mapping[str, int], requests: Mapping[str, Any]) -> StepChoice | None:
        """Returns the choice for the rows that will decode next; None without such rows."""
        decoding = 0
        for name, scheduled in names.items():
            request = requests[name]
            # vLLM's condition for a prompt that has been read to its end.
            decoding += request.num_computed_tokens + scheduled >= (
                request.num_tokens + request.num_output_placeholders
            )
        if decoding == 0:
            self._link.poll()
            return None
        choice = self._link.choose(decoding)
        if choice.source is not self._last.source:
            log_source(self._last.source, choice.source)
        self._last = choice
        return choice

    def cut(self, drafts: Iterable[list[int]]) -> None:
        """Cuts each row's drafts to the number that the last step was to make.

        If a sequence is too long for the drafter, vLLM's first model runner returns zeros, always
        as many as it could draft.  Before vLLM 0.32 the second one returns that many in every step.
        """
        for row in drafts:
            del row[self._drafts :]

    def withhold(self, names: Iterable[str], requests: Mapping[str, Any]) -> None:
        """Removes the drafts of requests that must not be drafted for."""
        for name in self.undrafted.intersection(names):
            request = requests.get(name)
            if request is not None:
                request.spec_token_ids = []

    def read(
        self, output: Any, result: Any, requests: Mapping[str, Any]
    ) -> tuple[Launch, Rows] | None:
        """Counts the rows of a result before vLLM processes it."""
        if self._tap is None:
            return None
        try:
            launch = self._tap.launch_of(output)
            if launch is None:
                return None
            return launch, self._tap.rows(launch, result, requests, self.undrafted)
        except Exception as error:  # noqa: BLE001 - telemetry must not end an engine
            self._stop_reporting(error)
            return None

    def worked_in(self, found: tuple[Launch, Rows] | None) -> None:
        """Reports a step after vLLM has processed its result."""
        if self._tap is None or found is None:
            return
        try:
            self._tap.settle(*found)
        except Exception as error:  # noqa: BLE001 - same
            self._stop_reporting(error)

    def status(self) -> dict[str, Any]:
        """Returns the state of the link in plain values."""
        return link_status(self._link) | {
            "reporting": self._tap is not None,
            "skipped": 0 if self._tap is None else self._tap.skipped,
            "lost": self._losses.status(),
        }

    def poll(self) -> None:
        """Reads the packets of the agent, between two steps."""
        self._link.poll()

    def close(self) -> None:
        """Ends the agent."""
        self._link.close()

    def _stop_reporting(self, error: Exception) -> None:
        self._tap = None
        _log.exception("steps are no longer reported to the sidecar")
        self._losses.lose(engine_pb2.CAPABILITY_REPORT, reason_of(error))


def may_not_be_drafted_for(request: Any) -> bool:
    """Whether a request has the extra argument `speculation: false`.

    The OpenAI-compatible API converts false to 0, because its extra arguments are texts or numbers.
    """
    extra = getattr(request.sampling_params, "extra_args", None)
    if not isinstance(extra, Mapping):
        return False
    wish = extra.get(SPECULATION)
    return isinstance(wish, (bool, int, float)) and wish == 0


def start(scheduler: Any, settings: VllmSettings) -> Steering:
    """Checks the scheduler, describes the engine and starts the link.  Raises PluginError."""
    config = scheduler.vllm_config
    speculative = config.speculative_config
    gammas = settings.gammas_within(speculative.num_speculative_tokens)
    prepared = set((scheduler.dynamic_sd_lookup or [])[1:])
    if not set(gammas) <= prepared:
        raise HookError(
            f"draft lengths {sorted(set(gammas) - prepared)} were not prepared by vLLM, only "
            f"{sorted(prepared)}: the plugin's configuration did not take effect"
        )
    require_kept_state(scheduler.kv_cache_config)
    for concern in (disregarded(vllm_api.vllm_version(), config), unread_layers(config)):
        if concern:
            _log.warning("%s", concern)
    spec = introduce(config, settings, gammas)
    try:
        link = EngineLink.start(spec, settings, speculative.num_speculative_tokens)
    except LinkStartError as error:
        raise UnsupportedEngineError(str(error)) from error
    at_exit(link.close)
    tap = StepTap(
        link,
        gammas,
        may_draft_less=speculative.method == "ngram",
        is_async=bool(config.scheduler_config.async_scheduling),
        waiting=WaitingPrompts(lambda: scheduler.waiting, prompt_tokens),
    )
    _log.info("%s is steered: draft lengths %s", spec.engine_id, ",".join(map(str, gammas)))
    return Steering(link, tap, gammas)


def steered(base: Any, settings: VllmSettings) -> Any:
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
            self.speculation = start(self, settings)

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            self.speculation.arrived(request, self.requests)

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            self.speculation.scheduled(scheduler_output, self.requests)
            super()._update_after_schedule(scheduler_output)
            if self.speculation.undrafted:
                self.speculation.withhold(scheduler_output.num_scheduled_tokens, self.requests)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            found = self.speculation.read(scheduler_output, model_runner_output, self.requests)
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self.speculation.worked_in(found)
            return outputs

        def update_draft_token_ids(self, draft_token_ids: Any) -> None:
            self.speculation.cut(draft_token_ids.draft_token_ids)
            super().update_draft_token_ids(draft_token_ids)
            if self.speculation.undrafted:
                self.speculation.withhold(draft_token_ids.req_ids, self.requests)

        def shutdown(self) -> None:
            self.speculation.close()
            super().shutdown()

    SteeredScheduler.__name__ = SteeredScheduler.__qualname__ = f"Steered{base.__name__}"
    return SteeredScheduler
