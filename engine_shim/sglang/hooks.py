"""The hooks around the steps of one engine, in the scheduler's process.

One decode step, in SGLang's order:

  add_rank_updates          several ranks: adds the sidecar's updates for all
                            (link/rank_plan_sync.py)
    add_control_requests    data-parallel attention: adds them to the received requests instead
  around_forward            adopts updates; decides; catches up a drafter that slept; launches
    AdaptiveController      asks the policy, applies gamma's runtime state (RuntimeSwitch)
    draft, verify
    around_draft_extend     asleep: stores what the drafter would have read
  around_resolve            the result is on the CPU: reads it
  after_process_result      SGLang has added the tokens to the answers: reports the step

No error here may end an engine.  Code that only serves telemetry or the drafter's speed is guarded,
and after an error it is switched off with one log line.  Several ranks are the exception, because
no rank may continue differently from the others: there an error in the drafter's part ends the
engine, like one in SGLang's own drafter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from engine_shim.common.status import LostCapabilityReporter, link_status
from engine_shim.link.lost_capabilities import error_reason
from engine_shim.link.rank_commands import RankCommand, RankCommands
from engine_shim.sglang.api import attention_dp, hook_check, ranks, sglang_api
from engine_shim.sglang.drafters.row_counts import Role
from engine_shim.sglang.eager_passes import NO_PASSES, EagerPasses
from engine_shim.sglang.engine_description import DFLASH_NAME
from engine_shim.sglang.step_reports import (
    LaunchedStep,
    StepReporter,
    delivered_token_counts,
    discarded_rows,
    kv_tokens_at_launch,
    kv_tokens_before,
)
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_shim.link.engine_link import EngineLink
    from engine_shim.link.plan_follower import StepChoice
    from engine_shim.link.rank_plan_sync import RankPlanSync, RankUpdate
    from engine_shim.sglang.adaptive_policy import SteeredPolicy
    from engine_shim.sglang.drafters.dflash import DFlashDrafter
    from engine_shim.sglang.drafters.dual import DualDrafter
    from engine_shim.sglang.drafters.row_drafting import RowDrafting
    from engine_shim.sglang.drafters.sleeping_drafter import SleepingDrafter
    from engine_shim.sglang.graph_states import GraphStates
    from engine_shim.sglang.learning.learning_steps import LearningSteps
    from engine_shim.sglang.request_options import RequestOptions


# Indices in the engine's description: the engine's own drafter, and a second one.
OWN_DRAFTER_INDEX, SECOND_DRAFTER_INDEX = 0, 1
OWN_DRAFTER_ROLE = Role(OWN_DRAFTER_INDEX, is_mixed=False)
# The status of learning in an engine without learning.
NO_LEARNING_STATUS = {"online": None, "signals": None, "draft": None}

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class EngineHooks:
    """Joins the steps of one engine to its link; made after the engine's workers are built.

    plan_sync, rank_commands: what this rank has adopted.  has_other_ranks: whether other ranks must
    agree with this one.  has_attention_dp: each rank has its own batch (see api/attention_dp.py).
    link, reporter: of rank 0 only.  dflash_drafter: the engine's DFlash drafter, `dual_drafter`'s
    or the only one.  row_drafting: the prompt lookup, which may draft single rows.
    request_options: the options of requests.  learning: online updates and signals of one drafter.
    Parts that the engine does not have are None, and parts that have failed are set to None.
    """

    policy: SteeredPolicy
    plan_sync: RankPlanSync
    lost_capabilities: LostCapabilityReporter
    graph_states: GraphStates
    eager: EagerPasses
    rank_commands: RankCommands = field(default_factory=RankCommands)
    has_other_ranks: bool = False
    has_attention_dp: bool = False
    link: EngineLink | None = None
    reporter: StepReporter | None = None
    sleeping_drafter: SleepingDrafter | None = None
    dual_drafter: DualDrafter | None = None
    dflash_drafter: DFlashDrafter | None = None
    row_drafting: RowDrafting | None = None
    request_options: RequestOptions | None = None
    learning: LearningSteps | None = None
    # The step from its launch to the end of its draft-extend.  The scheduler launches one step at
    # a time.
    _launching_step: LaunchedStep | None = field(default=None, init=False)
    # With data-parallel attention: updates to broadcast in this iteration of the scheduler.
    _outgoing_updates: list[RankUpdate | RankCommand] = field(default_factory=list, init=False)

    def register(self) -> None:
        """Registers all hooks with SGLang."""
        hook_check.around(sglang_api.FORWARD, self.around_forward)
        hook_check.around(sglang_api.DRAFT_EXTEND, self.around_draft_extend)
        hook_check.around(sglang_api.RESOLVE_TOKENS, self.around_resolve)
        hook_check.after(sglang_api.PROCESS_DECODE_RESULT, self.after_process_result)
        hook_check.after(sglang_api.INTERNAL_STATE, self.after_internal_state)
        if self.has_other_ranks:
            hook_check.after(sglang_api.POLL_TIMEOUT_ABORTS, self.add_rank_updates)
            hook_check.after(sglang_api.INIT_REQUEST_DISPATCHER, self.after_init_dispatcher)
        hook_check.around(sglang_api.DRAFT, self.around_draft)
        if self.row_drafting is not None:
            hook_check.around(sglang_api.COPY_RESULT, self.row_drafting.around_copy)
        if self.has_attention_dp:
            hook_check.after(attention_dp.UPDATE_GATHER_BATCH, attention_dp.store_rank_sizes)
            hook_check.after(attention_dp.PULL_RAW_REQUESTS, self.add_control_requests)

    def add_rank_updates(self, aborts: list[Any], _: Any) -> list[Any]:
        """Adds the sidecar's updates to a broadcast.

        Runs after `Scheduler._poll_timeout_aborts`, on rank 0.
        """
        updates: list[RankUpdate | RankCommand] = [
            *self.plan_sync.outgoing_updates(),
            *self.rank_commands.outgoing_commands(),
        ]
        if not self.has_attention_dp:
            return [*aborts, *updates]
        self._outgoing_updates = updates
        return aborts

    def add_control_requests(self, received: list[Any] | None, _: Any) -> list[Any] | None:
        """Adds the updates, as control requests, to what `_pull_raw_reqs` has received."""
        updates, self._outgoing_updates = self._outgoing_updates, []
        return received if received is None else [*received, *updates]

    def after_init_dispatcher(self, _: None, scheduler: Any) -> None:
        """Runs after `Scheduler.init_request_dispatcher`."""
        ranks.add_handlers(scheduler, self.plan_sync.adopt, self.rank_commands.adopt)

    def around_forward(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `EAGLEWorkerV2.forward_batch_generation`, prefills included.

        Calls no function for parts that the engine does not have or the step does not need.  On
        the thread of a busy engine a call costs much, mostly because its code and data are not in
        the processor's caches.
        """
        if self.has_other_ranks:
            self.rank_commands.execute_adopted()
        else:
            self.plan_sync.receive_and_adopt()
        if not batch.forward_mode.is_decode() or batch.is_extend_in_batch:
            return self._run_without_decoding(original, worker, batch, *args, **kwargs)
        largest_batch_size = attention_dp.largest_batch(batch) if self.has_attention_dp else 0
        choice = self.plan_sync.choose(largest_batch_size or len(batch.reqs))
        self.policy.set_choice(choice)
        previous_launch, sleeping_drafter, eager = (
            self._launching_step,
            self.sleeping_drafter,
            self.eager,
        )
        launch = LaunchedStep(
            choice, batch.forward_iter, kv_tokens_at_launch(batch), largest_batch_size
        )
        is_drafter_idle = choice.asleep and choice.gamma == 0
        if self.row_drafting is not None and choice.gamma:
            is_drafter_idle = self.row_drafting.drafts_alone(choice.drafter_index)
        if sleeping_drafter is not None and (is_drafter_idle or sleeping_drafter.is_behind):
            unknown_tokens = (
                0
                if previous_launch is None or previous_launch.is_read_back
                else previous_launch.choice.gamma + 1
            )
            launch.asleep = self._try_catch_up(
                sleeping_drafter, batch, is_drafter_idle, unknown_tokens
            )
            if not is_drafter_idle and sleeping_drafter.must_wait_one_step:
                launch.is_catching_up = True
                launch.choice = self._choice_while_waking(choice)
        if self.learning is not None:
            launch.update_status = self.learning.before_step()
        request_options = self.request_options
        if request_options is not None and (
            request_options.has_any or request_options.is_decode_server
        ):
            launch.undrafted_rows, launch.labels = request_options.undrafted_and_labels(batch.reqs)
        if (row_drafting := self.row_drafting) is not None:
            unknown_tokens = (
                0
                if previous_launch is None or previous_launch.is_read_back
                else previous_launch.choice.gamma + 1
            )
            row_drafting.attempt(lambda: row_drafting.before_decode(batch, unknown_tokens))
            if choice.gamma == 0 and not (launch.asleep or launch.is_catching_up):
                row_drafting.attempt(
                    lambda: row_drafting.compare_first_tokens(batch, worker.draft_worker)
                )
        self._launching_step = launch
        eager.step_passes = NO_PASSES
        result = original(worker, batch, *args, **kwargs)
        launch.eager = eager.step_passes
        if self.dflash_drafter is not None:
            self._report_lost_dflash(self.dflash_drafter)
        if row_drafting is not None and row_drafting.failure_reason:
            report_lost_lookup(self.lost_capabilities, row_drafting)
        result.speculation_launch = launch
        return result

    def _run_without_decoding(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a prefill, or an empty batch beside other ranks' batches."""
        if batch.forward_mode.is_idle():
            if self.has_attention_dp and not batch.is_extend_in_batch:
                # Other ranks decode, and this one takes part with an empty batch.
                self.policy.set_choice(self.plan_sync.choose(attention_dp.largest_batch(batch)))
            return original(worker, batch, *args, **kwargs)
        if self.sleeping_drafter is not None:
            self.sleeping_drafter.forget_requests(batch.reqs)
        if self.request_options is not None:
            self.request_options.before_prefill(batch.reqs)
        if (row_drafting := self.row_drafting) is not None:
            row_drafting.attempt(lambda: row_drafting.before_prefill(batch))
        learning = self.learning
        tokens = None if learning is None else learning.before_prefill(batch)
        result = original(worker, batch, *args, **kwargs)
        if self.dflash_drafter is not None:
            self._report_lost_dflash(self.dflash_drafter)
        if learning is not None:
            learning.after_prefill(batch, tokens, result)
        return result

    def around_draft(
        self, original: Callable[..., Any], draft: Any, batch: Any, **kwargs: Any
    ) -> Any:
        """Drafts with the drafter that the plan names (wraps `EagleDraftWorker.draft`)."""
        launch = self._launching_step
        if launch is None or batch.forward_mode.is_idle():
            return original(draft, batch, **kwargs)
        verify = self._draft(launch, original, draft, batch, **kwargs)
        if launch.undrafted_rows and self.request_options is not None:
            self.request_options.withhold_drafts(verify, launch.undrafted_rows)
        return verify

    def _draft(
        self,
        launch: LaunchedStep,
        original: Callable[..., Any],
        draft: Any,
        batch: Any,
        **kwargs: Any,
    ) -> Any:
        row_drafting, role, verify = self.row_drafting, self._step_role(launch), None
        if role.main is None and row_drafting is not None:
            verify = row_drafting.attempt(lambda: row_drafting.draft_alone(draft, batch))
            if verify is not None:
                return verify
        elif role.main == SECOND_DRAFTER_INDEX and self.dual_drafter is not None:
            verify = self.dual_drafter.draft(draft, batch)
        if verify is None:
            if role.main != OWN_DRAFTER_INDEX:
                role = OWN_DRAFTER_ROLE
                launch.choice = launch.choice._replace(drafter_index=OWN_DRAFTER_INDEX)
                launch.asleep = False
            verify = original(draft, batch, **kwargs)
        if row_drafting is not None:
            row_drafting.attempt(
                lambda: row_drafting.add_lookup(verify, batch, role, self.plan_sync.mixture_rules())
            )
            if row_drafting.failure_reason and role.is_mixed and role.main is not None:
                launch.choice = launch.choice._replace(drafter_index=role.main)
        return verify

    def _step_role(self, launch: LaunchedStep) -> Role:
        """Returns the role that a step drafts in."""
        index = launch.choice.drafter_index
        if self.row_drafting is not None:
            return self.row_drafting.roles[index]
        return Role(index, is_mixed=False)

    def around_draft_extend(
        self, original: Callable[..., None], draft: Any, batch: Any, result: Any, **kwargs: Any
    ) -> None:
        """Wraps the method `EagleDraftWorker._draft_extend_for_decode`."""
        launch, sleeping_drafter = self._launching_step, self.sleeping_drafter
        if (row_drafting := self.row_drafting) is not None and not batch.forward_mode.is_idle():
            reports = self.reporter is not None
            row_drafting.attempt(lambda: row_drafting.after_verify(batch, result, reports=reports))
        if (learning := self.learning) is not None:
            learner_role = Role(learning.learner_index, is_mixed=False)
            is_by_learner = (
                launch is None
                or launch.choice.gamma == 0
                or self._step_role(launch) == learner_role
            )
            undrafted = () if launch is None else launch.undrafted_rows
            learning.after_verify(batch, result, by_learner=is_by_learner, undrafted=undrafted)
        if (
            launch is not None
            and sleeping_drafter is not None
            and (launch.asleep or launch.is_catching_up)
        ):
            try:
                width = launch.choice.gamma + 1
                if launch.asleep:
                    launch.backlog_step = sleeping_drafter.sleep_through(batch, result, width)
                    return
                launch.backlog_step = sleeping_drafter.store_step(
                    batch, result, width, is_read=True
                )
            except Exception as error:  # for example out of memory: continue as if awake
                if self.has_other_ranks:
                    raise
                launch.asleep = False
                self._stop_sleeping(error)
        if self.dual_drafter is not None:
            self.dual_drafter.follow(batch, result, kwargs.get("kv_loc_plan"))
        original(draft, batch, result, **kwargs)

    def around_resolve(
        self, original: Callable[..., Any], processor: Any, result: Any, batch: Any
    ) -> Any:
        """Wraps the method `SchedulerBatchResultProcessor._resolve_spec_v2_tokens`."""
        launch: LaunchedStep | None = getattr(result, "speculation_launch", None)
        if launch is not None:
            launch.is_read_back = True
        tokens = original(processor, result, batch)
        if launch is not None and launch.backlog_step is not None:
            # The bonus token is one more than the accepted drafts.
            launch.backlog_step.counts = [k + 1 for k in result.num_correct_drafts_per_req_cpu]
        if launch is None or self.reporter is None:
            return tokens
        try:
            if launch.kv_tokens is None:
                launch.kv_tokens = kv_tokens_before(batch.reqs, tokens)
            launch.discarded_rows, launch.tokens = discarded_rows(batch.reqs), tokens
            launch.read_at = perf_counter()
        except Exception as error:  # noqa: BLE001 - telemetry must not end an engine
            self._stop_reporting(error)
        return tokens

    def after_process_result(self, _: None, processor: Any, batch: Any, result: Any) -> None:
        """Runs after `SchedulerBatchResultProcessor.process_batch_result_decode`."""
        launch: LaunchedStep | None = getattr(result, "speculation_launch", None)
        if launch is None or self.reporter is None:
            return
        try:
            self.reporter.report_step(launch, result, delivered_token_counts(launch, batch.reqs))
        except Exception as error:  # noqa: BLE001 - telemetry must not end an engine
            self._stop_reporting(error)

    def _stop_reporting(self, error: Exception) -> None:
        self.reporter = None
        _log.exception("steps are no longer reported to the sidecar")
        self.lost_capabilities.mark_lost(engine_pb2.CAPABILITY_REPORT, error_reason(error))

    def after_internal_state(self, result: Any, *arguments: Any) -> None:
        """Runs after SGLang has filled in the `internal_states` of `/server_info`."""
        if self.link is not None:
            if not self.has_other_ranks:
                self.plan_sync.receive_and_adopt()  # the engine may have been idle for a long time
            state = sglang_api.internal_state(result, arguments)
            state["speculation_controller"] = self.status()

    def status(self) -> dict[str, Any]:
        """Returns the state of the link and the counters of all parts, as plain values."""
        return link_status(self.link) | {
            "sleep": None
            if self.sleeping_drafter is None
            else asdict(self.sleeping_drafter.counters),
            **(NO_LEARNING_STATUS if self.learning is None else self.learning.status()),
            "reporting": self.reporter is not None,
            "prepared": self.graph_states.status(),
            "eager": self.eager.status(),
            "lost": self.lost_capabilities.status(),
        }

    def _report_lost_dflash(self, block: DFlashDrafter) -> None:
        if not block.failure_reason:
            return
        report_lost_dflash(self.lost_capabilities, block, self.row_drafting)
        if self.learning is not None and (
            self.dual_drafter is None or self.learning.learner_index == SECOND_DRAFTER_INDEX
        ):
            self.learning.stop(block.failure_reason)

    def _try_catch_up(
        self, sleeping_drafter: SleepingDrafter, batch: Any, asleep: bool, unknown_tokens: int
    ) -> bool:
        """Returns whether the drafter can sleep through the step that begins."""
        try:
            sleeping_drafter.before_step(batch, asleep=asleep, unknown_tokens=unknown_tokens)
        except Exception as error:  # for example out of memory
            if self.has_other_ranks:
                raise
            self._stop_sleeping(error)
            return False
        return asleep

    def _choice_while_waking(self, choice: StepChoice) -> StepChoice:
        """Returns the choice that runs while the planned drafter is still waking up."""
        if self.row_drafting is None or choice.gamma == 0:
            return choice
        return choice._replace(drafter_index=self.row_drafting.lookup_index, probe_id=0)

    def _stop_sleeping(self, error: Exception) -> None:
        self.sleeping_drafter = None
        self.lost_capabilities.mark_lost(engine_pb2.CAPABILITY_SLEEP, error_reason(error))
        _log.exception(
            "the drafter stays awake from now on; it drafts without the KV of tokens that it missed"
        )


def report_lost_dflash(
    losses: LostCapabilityReporter, block: DFlashDrafter, row_drafting: RowDrafting | None
) -> None:
    """Reports to the sidecar that a DFlash drafter, and its mixture with the lookup, are lost."""
    losses.mark_lost(engine_pb2.CAPABILITY_DRAFTER, block.failure_reason, DFLASH_NAME)
    if row_drafting is not None and (mixture := row_drafting.mixture_name(DFLASH_NAME)):
        losses.mark_lost(engine_pb2.CAPABILITY_DRAFTER, block.failure_reason, mixture)


def report_lost_lookup(
    lost_capabilities: LostCapabilityReporter, row_drafting: RowDrafting
) -> None:
    """Reports to the sidecar that the lookup, and all mixtures with it, are lost."""
    for name in row_drafting.ended_drafter_names:
        lost_capabilities.mark_lost(
            engine_pb2.CAPABILITY_DRAFTER, row_drafting.failure_reason, name
        )
