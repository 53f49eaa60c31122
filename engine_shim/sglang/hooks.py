"""The hooks around the steps of one engine, in the scheduler's process.

One decode step, in SGLang's order:

  own_requests              several ranks: adds the sidecar's updates for all (see link/ranks.py)
    after_received          data-parallel attention: adds them to the received requests instead
  around_forward            adopts updates; decides; catches up a drafter that slept; launches
    AdaptiveController      asks the policy, applies gamma's runtime state (RuntimeSwitch)
    draft, verify
    around_draft_extend     asleep: stores what the drafter would have read
  around_resolve            the result is on the CPU: reads it
  after_working_in          SGLang has added the tokens to the answers: reports the step

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

from engine_shim.common.status import Losses, link_status
from engine_shim.link.losses import reason_of
from engine_shim.link.orders import Order, Orders
from engine_shim.sglang.api import attention_dp, hook_check, ranks, sglang_api
from engine_shim.sglang.drafters.row_counts import Role
from engine_shim.sglang.eager_passes import NO_PASSES, EagerPasses
from engine_shim.sglang.engine_description import DFLASH_NAME
from engine_shim.sglang.step_reports import (
    Launch,
    StepTap,
    ended_rows,
    kept_tokens,
    kv_tokens_at_launch,
    kv_tokens_before,
)
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_shim.link.engine_link import EngineLink
    from engine_shim.link.plan_follower import StepChoice
    from engine_shim.link.ranks import Ranks, RankUpdate
    from engine_shim.sglang.adaptive_policy import SteeredPolicy
    from engine_shim.sglang.drafters.dflash import DFlashDrafter
    from engine_shim.sglang.drafters.dual import DualDrafter
    from engine_shim.sglang.drafters.idle_kv import IdleDrafter
    from engine_shim.sglang.drafters.row_drafting import RowDrafting
    from engine_shim.sglang.graph_states import GraphStates
    from engine_shim.sglang.learning.learning_steps import LearningSteps
    from engine_shim.sglang.request_wishes import RequestWishes


# Indices in the engine's description: the engine's own drafter, and a second one.
OWN, SECOND = 0, 1
OWN_ALONE = Role(OWN, is_mixed=False)
# The status of learning in an engine without learning.
NOTHING_LEARNS = {"online": None, "signals": None, "draft": None}

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class EngineHooks:
    """Joins the steps of one engine to its link; made after the engine's workers are built.

    ranks, orders: what this rank has adopted.  several: whether other ranks must agree with this
    one.  attention_dp: each rank has its own batch (see api/attention_dp.py).
    link, tap: of rank 0 only.  block: the engine's DFlash drafter, `dual`'s or the only one.
    rows: the prompt lookup, which may draft single rows.  wishes: the options of requests.
    learning: of one drafter, beside the steps.
    Parts that the engine does not have are None, and parts that have failed are set to None.
    """

    policy: SteeredPolicy
    ranks: Ranks
    losses: Losses
    graph_states: GraphStates
    eager: EagerPasses
    orders: Orders = field(default_factory=Orders)
    several: bool = False
    attention_dp: bool = False
    link: EngineLink | None = None
    tap: StepTap | None = None
    sleep: IdleDrafter | None = None
    dual: DualDrafter | None = None
    block: DFlashDrafter | None = None
    rows: RowDrafting | None = None
    wishes: RequestWishes | None = None
    learning: LearningSteps | None = None
    # The step from its launch to the end of its draft-extend.  The scheduler launches one step at
    # a time.
    _launching: Launch | None = field(default=None, init=False)
    # With data-parallel attention: updates to broadcast in this iteration of the scheduler.
    _outgoing: list[RankUpdate | Order] = field(default_factory=list, init=False)

    def register(self) -> None:
        """Registers all hooks with SGLang."""
        hook_check.around(sglang_api.FORWARD, self.around_forward)
        hook_check.around(sglang_api.DRAFT_EXTEND, self.around_draft_extend)
        hook_check.around(sglang_api.RESOLVE_TOKENS, self.around_resolve)
        hook_check.after(sglang_api.WORK_IN, self.after_working_in)
        hook_check.after(sglang_api.INTERNAL_STATE, self.after_internal_state)
        if self.several:
            hook_check.after(sglang_api.OWN_REQUESTS, self.own_requests)
            hook_check.after(sglang_api.REQUEST_KINDS, self.after_request_kinds)
        hook_check.around(sglang_api.DRAFT, self.around_draft)
        if self.rows is not None:
            hook_check.around(sglang_api.COPY_RESULT, self.rows.around_copy)
        if self.attention_dp:
            hook_check.after(attention_dp.GATHERED, attention_dp.keep_sizes)
            hook_check.after(attention_dp.RECEIVED, self.after_received)

    def own_requests(self, aborts: list[Any], _: Any) -> list[Any]:
        """Adds the sidecar's updates to a broadcast.

        Runs after `Scheduler._poll_timeout_aborts`, on rank 0.
        """
        updates: list[RankUpdate | Order] = [*self.ranks.outgoing(), *self.orders.outgoing()]
        if not self.attention_dp:
            return [*aborts, *updates]
        self._outgoing = updates
        return aborts

    def after_received(self, received: list[Any] | None, _: Any) -> list[Any] | None:
        """Adds the updates, as control requests, to what `_pull_raw_reqs` has received."""
        updates, self._outgoing = self._outgoing, []
        return received if received is None else [*received, *updates]

    def after_request_kinds(self, _: None, scheduler: Any) -> None:
        """Runs after `Scheduler.init_request_dispatcher`."""
        ranks.add_handler(scheduler, self.ranks.adopt, self.orders.adopt)

    def around_forward(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `EAGLEWorkerV2.forward_batch_generation`, prefills included.

        Calls no function for parts that the engine does not have or the step does not need.  On
        the thread of a busy engine a call costs much, mostly because its code and data are not in
        the processor's caches.
        """
        if self.several:
            self.orders.carry_out()
        else:
            self.ranks.take_in()
        if not batch.forward_mode.is_decode() or batch.is_extend_in_batch:
            return self._without_decoding(original, worker, batch, *args, **kwargs)
        largest = attention_dp.largest_batch(batch) if self.attention_dp else 0
        choice = self.ranks.choose(largest or len(batch.reqs))
        self.policy.run(choice)
        before, sleep, eager = self._launching, self.sleep, self.eager
        launch = Launch(choice, batch.forward_iter, kv_tokens_at_launch(batch), largest)
        idle = choice.asleep and choice.gamma == 0
        if self.rows is not None and choice.gamma:
            idle = self.rows.is_alone(choice.drafter_index)
        if sleep is not None and (idle or sleep.is_behind):
            unread = 0 if before is None or before.is_read_back else before.choice.gamma + 1
            launch.asleep = self._catch_up(sleep, batch, idle, unread)
            if not idle and sleep.must_wait:
                launch.waits = True
                launch.choice = self._while_waiting(choice)
        if self.learning is not None:
            launch.update_status = self.learning.before_step()
        wishes = self.wishes
        if wishes is not None and (wishes.is_asked or wishes.without_prefills):
            launch.undrafted, launch.labels = wishes.of(batch.reqs)
        if (rows := self.rows) is not None:
            unread = 0 if before is None or before.is_read_back else before.choice.gamma + 1
            rows.attempt(lambda: rows.before_decode(batch, unread))
            if choice.gamma == 0 and not (launch.asleep or launch.waits):
                rows.attempt(lambda: rows.watch(batch, worker.draft_worker))
        self._launching = launch
        eager.seen = NO_PASSES
        result = original(worker, batch, *args, **kwargs)
        launch.eager = eager.seen
        if self.block is not None:
            self._report_lost_block(self.block)
        if rows is not None and rows.over:
            lose_lookup(self.losses, rows)
        result.speculation_launch = launch
        return result

    def _without_decoding(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a prefill, or an empty batch beside other ranks' batches."""
        if batch.forward_mode.is_idle():
            if self.attention_dp and not batch.is_extend_in_batch:
                # Other ranks decode, and this one takes part with an empty batch.
                self.policy.run(self.ranks.choose(attention_dp.largest_batch(batch)))
            return original(worker, batch, *args, **kwargs)
        if self.sleep is not None:
            self.sleep.forget(batch.reqs)
        if self.wishes is not None:
            self.wishes.before_prefill(batch.reqs)
        if (rows := self.rows) is not None:
            rows.attempt(lambda: rows.before_prefill(batch))
        learning = self.learning
        tokens = None if learning is None else learning.before_prefill(batch)
        result = original(worker, batch, *args, **kwargs)
        if self.block is not None:
            self._report_lost_block(self.block)
        if learning is not None:
            learning.after_prefill(batch, tokens, result)
        return result

    def around_draft(
        self, original: Callable[..., Any], draft: Any, batch: Any, **kwargs: Any
    ) -> Any:
        """Drafts with the drafter that the plan names (wraps `EagleDraftWorker.draft`)."""
        launch = self._launching
        if launch is None or batch.forward_mode.is_idle():
            return original(draft, batch, **kwargs)
        verify = self._draft(launch, original, draft, batch, **kwargs)
        if launch.undrafted and self.wishes is not None:
            self.wishes.withhold(verify, launch.undrafted)
        return verify

    def _draft(
        self, launch: Launch, original: Callable[..., Any], draft: Any, batch: Any, **kwargs: Any
    ) -> Any:
        rows, role, verify = self.rows, self._role_of(launch), None
        if role.main is None and rows is not None:
            verify = rows.attempt(lambda: rows.draft_alone(draft, batch))
            if verify is not None:
                return verify
        elif role.main == SECOND and self.dual is not None:
            verify = self.dual.draft(draft, batch)
        if verify is None:
            if role.main != OWN:
                role = OWN_ALONE
                launch.choice = launch.choice._replace(drafter_index=OWN)
                launch.asleep = False
            verify = original(draft, batch, **kwargs)
        if rows is not None:
            rows.attempt(lambda: rows.join(verify, batch, role, self.ranks.rules()))
            if rows.over and role.is_mixed and role.main is not None:
                launch.choice = launch.choice._replace(drafter_index=role.main)
        return verify

    def _role_of(self, launch: Launch) -> Role:
        """Returns the role that a step drafts in."""
        index = launch.choice.drafter_index
        if self.rows is not None:
            return self.rows.roles[index]
        return Role(index, is_mixed=False)

    def around_draft_extend(
        self, original: Callable[..., None], draft: Any, batch: Any, result: Any, **kwargs: Any
    ) -> None:
        """Wraps the method `EagleDraftWorker._draft_extend_for_decode`."""
        launch, sleep = self._launching, self.sleep
        if (rows := self.rows) is not None and not batch.forward_mode.is_idle():
            reports = self.tap is not None
            rows.attempt(lambda: rows.after_verify(batch, result, reports=reports))
        if (learning := self.learning) is not None:
            alone = Role(learning.learner, is_mixed=False)
            own = launch is None or launch.choice.gamma == 0 or self._role_of(launch) == alone
            undrafted = () if launch is None else launch.undrafted
            learning.after_verify(batch, result, by_learner=own, undrafted=undrafted)
        if launch is not None and sleep is not None and (launch.asleep or launch.waits):
            try:
                width = launch.choice.gamma + 1
                if launch.asleep:
                    launch.slept = sleep.sleep_through(batch, result, width)
                    return
                launch.slept = sleep.keep(batch, result, width, is_read=True)
            except Exception as error:  # for example out of memory: continue as if awake
                if self.several:
                    raise
                launch.asleep = False
                self._stop_sleeping(error)
        if self.dual is not None:
            self.dual.follow(batch, result, kwargs.get("kv_loc_plan"))
        original(draft, batch, result, **kwargs)

    def around_resolve(
        self, original: Callable[..., Any], processor: Any, result: Any, batch: Any
    ) -> Any:
        """Wraps the method `SchedulerBatchResultProcessor._resolve_spec_v2_tokens`."""
        launch: Launch | None = getattr(result, "speculation_launch", None)
        if launch is not None:
            launch.is_read_back = True
        tokens = original(processor, result, batch)
        if launch is not None and launch.slept is not None:
            # The bonus token is one more than the accepted drafts.
            launch.slept.counts = [k + 1 for k in result.num_correct_drafts_per_req_cpu]
        if launch is None or self.tap is None:
            return tokens
        try:
            if launch.kv_tokens is None:
                launch.kv_tokens = kv_tokens_before(batch.reqs, tokens)
            launch.ended, launch.tokens = ended_rows(batch.reqs), tokens
            launch.read_at = perf_counter()
        except Exception as error:  # noqa: BLE001 - telemetry must not end an engine
            self._stop_reporting(error)
        return tokens

    def after_working_in(self, _: None, processor: Any, batch: Any, result: Any) -> None:
        """Runs after `SchedulerBatchResultProcessor.process_batch_result_decode`."""
        launch: Launch | None = getattr(result, "speculation_launch", None)
        if launch is None or self.tap is None:
            return
        try:
            self.tap.settle(launch, result, kept_tokens(launch, batch.reqs))
        except Exception as error:  # noqa: BLE001 - telemetry must not end an engine
            self._stop_reporting(error)

    def _stop_reporting(self, error: Exception) -> None:
        self.tap = None
        _log.exception("steps are no longer reported to the sidecar")
        self.losses.lose(engine_pb2.CAPABILITY_REPORT, reason_of(error))

    def after_internal_state(self, result: Any, *arguments: Any) -> None:
        """Runs after SGLang has filled in the `internal_states` of `/server_info`."""
        if self.link is not None:
            if not self.several:
                self.ranks.take_in()  # the engine may have been idle for a long time
            state = sglang_api.internal_state(result, arguments)
            state["speculation_controller"] = self.status()

    def status(self) -> dict[str, Any]:
        """Returns the state of the link and the counters of all parts, as plain values."""
        return link_status(self.link) | {
            "sleep": None if self.sleep is None else asdict(self.sleep.counters),
            **(NOTHING_LEARNS if self.learning is None else self.learning.status()),
            "reporting": self.tap is not None,
            "prepared": self.graph_states.status(),
            "eager": self.eager.status(),
            "lost": self.losses.status(),
        }

    def _report_lost_block(self, block: DFlashDrafter) -> None:
        if not block.over:
            return
        lose_block(self.losses, block, self.rows)
        if self.learning is not None and (self.dual is None or self.learning.learner == SECOND):
            self.learning.stop(block.over)

    def _catch_up(self, sleep: IdleDrafter, batch: Any, asleep: bool, unread: int) -> bool:
        """Returns whether the drafter can sleep through the step that begins."""
        try:
            sleep.before_step(batch, asleep=asleep, unread_tokens=unread)
        except Exception as error:  # for example out of memory: the drafter drafts cold
            if self.several:
                raise
            self._stop_sleeping(error)
            return False
        return asleep

    def _while_waiting(self, choice: StepChoice) -> StepChoice:
        """Returns the choice that runs while the planned drafter is still waking up."""
        if self.rows is None or choice.gamma == 0:
            return choice
        return choice._replace(drafter_index=self.rows.lookup, probe_id=0)

    def _stop_sleeping(self, error: Exception) -> None:
        self.sleep = None
        self.losses.lose(engine_pb2.CAPABILITY_SLEEP, reason_of(error))
        _log.exception(
            "the drafter stays awake from now on; it drafts cold for requests that it missed"
        )


def lose_block(losses: Losses, block: DFlashDrafter, rows: RowDrafting | None) -> None:
    """Reports to the sidecar that a DFlash drafter, and its mixture with the lookup, are lost."""
    losses.lose(engine_pb2.CAPABILITY_DRAFTER, block.over, DFLASH_NAME)
    if rows is not None and (mixture := rows.mixture_of(DFLASH_NAME)):
        losses.lose(engine_pb2.CAPABILITY_DRAFTER, block.over, mixture)


def lose_lookup(losses: Losses, rows: RowDrafting) -> None:
    """Reports to the sidecar that the lookup, and all mixtures with it, are lost."""
    for name in rows.names:
        losses.lose(engine_pb2.CAPABILITY_DRAFTER, rows.over, name)
