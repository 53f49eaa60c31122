"""The plugin in the scheduler's process: hooks around the steps of one engine, joined to its link.

One decode step, in SGLang's order:

  own_requests              what came from the sidecar, for all ranks (see link/ranks.py)
  around_forward            decide; catch a drafter up that has slept; launch
    AdaptiveController      asks the policy, puts gamma's runtime state into use (RuntimeSwitch)
    draft, verify
    around_draft_extend     asleep: keep what the drafter would have read
  around_resolve            the result is on the CPU: report

Nothing here may end an engine: what only serves telemetry or the drafter's speed is guarded, and
switches itself off with one log line.  Only of several ranks none may go on differently from the
others: there an error in the drafter's part ends the engine, as one in SGLang's own drafter does.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engine_shim.link.engine_link import EngineLink, steering_of
from engine_shim.link.errors import LinkStartError
from engine_shim.link.losses import reason_of
from engine_shim.link.ranks import Ranks
from engine_shim.link.secret import secret_of
from engine_shim.sglang import hook_check, ranks, sglang_api
from engine_shim.sglang.adaptive_policy import SteeredPolicy
from engine_shim.sglang.drafters.idle_kv import IdleDrafter, cannot_sleep_reason
from engine_shim.sglang.engine_description import introduce, set_batch_limits
from engine_shim.sglang.errors import HookError, PluginError
from engine_shim.sglang.graph_states import GraphStates
from engine_shim.sglang.learning.verified_step import Verification
from engine_shim.sglang.losses import BLOCK_DRAFTER, Losses
from engine_shim.sglang.runtime_switch import RuntimeSwitch
from engine_shim.sglang.step_reports import (
    NO_NEWS,
    Launch,
    StepTap,
    UpdateStatus,
    kv_tokens_at_launch,
    kv_tokens_committed,
)
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_shim.sglang.drafters.dual import DualDrafter
    from engine_shim.sglang.learning.deployment import Deployment
    from engine_shim.sglang.learning.online_updates import OnlineUpdates
    from engine_shim.sglang.learning.signal_collector import SignalCollector
    from engine_shim.sglang.settings import PluginSettings

# The second drafter's place in the introduction.
SECOND = 1

_log = logging.getLogger(__name__)


class EngineHooks:
    """Everything of one steered engine; made once, in the process of its scheduler."""

    def __init__(self, settings: PluginSettings) -> None:
        self._settings = settings
        self._switch = RuntimeSwitch()
        self._link: EngineLink | None = None
        self._policy: SteeredPolicy | None = None
        self._ranks: Ranks | None = None
        self._tap: StepTap | None = None
        self._sleep: IdleDrafter | None = None
        self._dual: DualDrafter | None = None
        self._online: OnlineUpdates | None = None
        self._collector: SignalCollector | None = None
        self._deployment: Deployment | None = None
        self._several = False
        self._graph_states = GraphStates()
        self._losses = Losses()
        # The step between its launch and the end of its draft-extend; the scheduler launches one
        # at a time.
        self._launching: Launch | None = None

    def around_init_model_worker(self, original: Callable[..., None], scheduler: Any) -> None:
        """Hooks the worker before it exists, and starts the link when it is ready to serve."""
        if sglang_api.is_dflash_only(scheduler.server_args):
            from engine_shim.sglang.drafters import dflash_only

            dflash_only.register()
        # Only here: SGLang's models want a machine that can run them.
        from engine_shim.sglang.drafters import sd2_model

        sd2_model.register()
        hook_check.register(sglang_api.FORWARD, self.around_forward, HookType.AROUND)
        hook_check.register(sglang_api.DRAFT_EXTEND, self.around_draft_extend, HookType.AROUND)
        hook_check.register(sglang_api.RESOLVE_TOKENS, self.around_resolve, HookType.AROUND)
        hook_check.register(sglang_api.INTERNAL_STATE, self.after_internal_state, HookType.AFTER)
        hook_check.register(
            sglang_api.APPLY_RUNTIME_STATE, self._switch.apply_runtime_state, HookType.REPLACE
        )
        hook_check.register(
            sglang_api.BUILD_STATE, self._graph_states.around_build, HookType.AROUND
        )
        if self._settings.dflash_model_path:
            from engine_shim.sglang.drafters.dual import DualDrafter

            self._dual = DualDrafter(
                self._settings.dflash_model_path,
                self._settings.dflash_revision,
                self._settings.gammas,
                partial(self._losses.lose, engine_pb2.CAPABILITY_DRAFTER, drafter=BLOCK_DRAFTER),
            )
            self._dual.register()
            hook_check.register(sglang_api.DRAFT, self.around_draft, HookType.AROUND)
        hook_check.register(sglang_api.OWN_REQUESTS, self.own_requests, HookType.AFTER)
        hook_check.register(sglang_api.REQUEST_KINDS, self.after_request_kinds, HookType.AFTER)
        HookRegistry.apply_hooks()
        hook_check.require_hooks(*hook_check.registered_targets())
        original(scheduler)
        self._start(scheduler)

    def own_requests(self, aborts: list[Any], _: Any) -> list[Any]:
        """After `Scheduler._poll_timeout_aborts`, on rank 0: the sidecar's part of a broadcast."""
        return aborts if self._ranks is None else [*aborts, *self._ranks.outgoing()]

    def after_request_kinds(self, _: None, scheduler: Any) -> None:
        """Runs after `Scheduler.init_request_dispatcher`."""
        assert self._ranks is not None, "SGLang builds its workers first"
        ranks.add_handler(scheduler, self._ranks.adopt)

    def around_forward(
        self, original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `EAGLEWorkerV2.forward_batch_generation`, prefills included."""
        policy = self._policy
        if policy is None or batch.forward_mode.is_idle():
            return original(worker, batch, *args, **kwargs)
        sleep = self._sleep
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            if sleep is not None:
                sleep.forget(batch.reqs)
            self._update(lambda online: online.before_prefill([r.rid for r in batch.reqs]))
            return original(worker, batch, *args, **kwargs)
        choice = policy.decide(batch.seq_lens.shape[0])
        launch = Launch(choice, batch.forward_iter, kv_tokens_at_launch(batch))
        if sleep is not None:
            launch.asleep = self._catch_up(sleep, batch, choice.asleep and choice.gamma == 0)
        self._update(lambda online: online.before_step())
        launch.update_status = self._update_status()
        self._launching = launch
        result = original(worker, batch, *args, **kwargs)
        result.speculation_launch = launch
        return result

    def around_draft(
        self, original: Callable[..., Any], draft: Any, batch: Any, **kwargs: Any
    ) -> Any:
        """Wraps `EagleDraftWorker.draft`, with a second drafter."""
        launch = self._launching
        if launch is not None and launch.choice.drafter_index == SECOND and self._dual:
            verify = self._dual.draft(draft, batch)
            if verify is not None:
                return verify
            launch.choice = launch.choice._replace(drafter_index=0)
        return original(draft, batch, **kwargs)

    def around_draft_extend(
        self, original: Callable[..., None], draft: Any, batch: Any, result: Any, **kwargs: Any
    ) -> None:
        """Wraps the method `EagleDraftWorker._draft_extend_for_decode`."""
        launch, sleep = self._launching, self._sleep
        self._learn(batch, result, launch)
        if launch is not None and launch.asleep and sleep is not None:
            try:
                sleep.sleep_through(batch, result)
                return
            except Exception as error:  # out of memory, say: then as if awake
                if self._several:
                    raise
                launch.asleep = False
                self._stop_sleeping(error)
        if self._dual is not None:
            self._dual.follow(batch, result, kwargs.get("kv_loc_plan"))
        original(draft, batch, result, **kwargs)

    def around_resolve(
        self, original: Callable[..., Any], processor: Any, result: Any, batch: Any
    ) -> Any:
        """Wraps the method `SchedulerBatchResultProcessor._resolve_spec_v2_tokens`."""
        launch: Launch | None = getattr(result, "speculation_launch", None)
        if launch is None or self._tap is None:
            return original(processor, result, batch)
        if launch.kv_tokens is None:
            launch.kv_tokens = kv_tokens_committed(batch.reqs)
        tokens = original(processor, result, batch)
        try:
            self._tap.settle(launch, result)
        except Exception as error:  # noqa: BLE001 - telemetry must not end an engine
            self._tap = None
            _log.exception("steps are no longer reported to the sidecar")
            self._losses.lose(engine_pb2.CAPABILITY_REPORT, reason_of(error))
        return tokens

    def after_internal_state(self, result: Any, *arguments: Any) -> None:
        """Runs after SGLang has filled in the `internal_states` of `/server_info`."""
        if self._link is not None:
            state = sglang_api.internal_state(result, arguments)
            state["speculation_controller"] = self.status()

    def status(self) -> dict[str, Any]:
        """The state of the link and the counters of idling, as plain values."""
        status = asdict(self._link.status()) if self._link is not None else {}
        status = {name: _plain(value) for name, value in status.items()}
        status["sleep"] = None if self._sleep is None else asdict(self._sleep.counters)
        status["online"] = None if self._online is None else asdict(self._online.counters)
        status["signals"] = None if self._collector is None else self._collector.status()
        status["draft"] = None if self._deployment is None else self._deployment.status()
        status["reporting"] = self._tap is not None
        status["prepared"] = self._graph_states.status()
        status["lost"] = self._losses.status()
        return status

    def _catch_up(self, sleep: IdleDrafter, batch: Any, asleep: bool) -> bool:
        """True when the drafter may sleep through the step that begins."""
        try:
            sleep.before_step(batch, asleep=asleep)
        except Exception as error:  # out of memory, say: then it drafts cold
            if self._several:
                raise
            self._stop_sleeping(error)
            return False
        return asleep

    def _update(self, part: Callable[[OnlineUpdates], None]) -> None:
        """One part of the online updates, if there are any; after an error there are no more."""
        online = self._online
        if online is None:
            return
        try:
            part(online)
        except Exception as error:  # noqa: BLE001 - out of memory, say
            _log.exception("an online update of the drafter failed")
            online.close(reason_of(error))
        if online.over:
            self._losses.lose(engine_pb2.CAPABILITY_UPDATE_ONLINE, online.over)

    def _update_status(self) -> UpdateStatus:
        """Returns the update status of the step that begins, once the plan's version serves."""
        update_status = NO_NEWS if self._online is None else self._online.update_status()
        deployment = self._deployment
        if deployment is None or self._ranks is None:
            return update_status
        try:
            other = deployment.before_step(self._ranks.draft_version())
        except Exception as error:  # noqa: BLE001 - out of memory, say: what serves goes on
            other = False
            deployment.stop(reason_of(error))
            _log.exception("no more versions of the drafter are put into service")
            self._losses.lose(engine_pb2.CAPABILITY_TAKE_VERSIONS, reason_of(error))
        return update_status._replace(
            reset=update_status.reset or other, version=deployment.counters.version
        )

    def _learn(self, batch: Any, result: Any, launch: Launch | None) -> None:
        """Has those who learn from it see what a step has verified; the engine's own drafter does.

        A second one reads other hidden states, and drafts for itself.
        """
        steering, second = self._ranks, self._dual
        if steering is None or (self._online is None and self._collector is None):
            return
        features = result.logits_output.hidden_states
        if second is not None:
            features, _ = second.split(features)
        own = second is None or launch is None or launch.choice.drafter_index != SECOND
        found = Verification(batch, result, features, own)
        self._update(lambda online: online.after_verify(found, steering.stride()))
        self._collect(found, collecting=steering.collects())

    def _collect(self, found: Verification, *, collecting: bool) -> None:
        """Keeps training signals; after an error no more."""
        if self._collector is None:
            return
        try:
            self._collector.after_verify(found, collecting=collecting)
        except Exception as error:  # noqa: BLE001 - out of memory, say
            _log.exception("training signals are kept no more")
            self._collector.give_up(reason_of(error))
        if self._collector.over:
            self._losses.lose(engine_pb2.CAPABILITY_COLLECT, self._collector.over)

    def _start_collecting(self, worker: Any, scheduler: Any) -> None:
        if not self._settings.signals_folder or not ranks.is_first():
            return
        from engine_shim.sglang.learning.deployment import deployment_for
        from engine_shim.sglang.learning.signal_collector import collector_for
        from engine_shim.training.versions import VersionError

        runner = scheduler.tp_worker.model_runner
        try:
            self._collector = collector_for(worker, runner, self._settings)
            self._deployment = deployment_for(worker, self._settings)
        except (OSError, VersionError) as error:
            raise PluginError(f"SPECULATION_SIGNALS_FOLDER: {error}") from error
        atexit.register(self._collector.close)

    def _start_updates(self, worker: Any, scheduler: Any) -> None:
        if not self._settings.online_updates:
            return
        from engine_shim.sglang.learning.online_updates import updates_for

        self._online = updates_for(worker, scheduler.tp_worker.model_runner, self._settings)
        atexit.register(self._online.close)

    def _stop_sleeping(self, error: Exception) -> None:
        self._sleep = None
        self._losses.lose(engine_pb2.CAPABILITY_SLEEP, reason_of(error))
        _log.exception("the drafter stays awake from now on; requests that it missed draft cold")

    def _rehearse(self, draft: Any) -> None:
        """Finds a DFlash drafter that cannot draft before there is traffic.  Raises PluginError."""
        if self._dual is not None:
            self._dual.rehearse(required=self._settings.require_drafters)
        elif sglang_api.dflash_only(draft) is not None:
            draft.lost = partial(
                self._losses.lose, engine_pb2.CAPABILITY_DRAFTER, drafter=BLOCK_DRAFTER
            )
            draft.rehearse()

    def _start(self, scheduler: Any) -> None:
        """Checks what was built, introduces the engine, starts the link.  Raises PluginError."""
        worker = scheduler.draft_worker
        controller: Any = getattr(worker, "adaptive_controller", None)
        policy = getattr(controller, "params", None)
        if not isinstance(policy, SteeredPolicy):
            raise HookError(
                f"SGLang never constructed the plugin's policy (found {type(policy).__name__} in "
                f"{type(worker).__name__}): the draft length would not be steered"
            )
        gammas = tuple(policy.candidate_steps)
        graph_states = tuple(sorted(controller._states))
        if graph_states != gammas:
            raise HookError(f"SGLang prepared draft lengths {graph_states}, not {gammas}")
        widest = sglang_api.widest_step()
        if widest != gammas[-1] + 1:
            raise HookError(
                f"SGLang sized its buffers for {widest} draft tokens, {gammas[-1] + 1} are needed"
            )
        self._switch.prepare(worker, gammas)
        self._rehearse(worker.draft_worker)
        sleepless = cannot_sleep_reason(worker)
        if gammas[0] > 0 or self._settings.sleep_positions == 0:
            sleepless = "the settings leave no room for it"
        if sleepless is None:
            self._sleep = IdleDrafter(worker, self._settings.sleep_positions, self._dual)
        self._start_updates(worker, scheduler)
        self._start_collecting(worker, scheduler)
        spec = introduce(
            scheduler,
            self._settings,
            gammas,
            can_sleep=sleepless is None,
            can_update_online=self._online is not None,
            can_collect=self._collector is not None,
            can_take_versions=self._deployment is not None,
            second=self._dual,
            lost=self._losses.all,
        )
        set_batch_limits(spec, policy.batch_limits)
        try:
            steering = steering_of(spec, self._settings, policy.startup_gamma)
            ranks.require_agreement(
                {
                    "the installed plugin": spec.fingerprint.shim_version,
                    "SPECULATION_GAMMAS": gammas,
                    "SPECULATION_GRAPH_LIMITS": self._settings.graph_limits,
                    "SPECULATION_SAFE_GAMMA": self._settings.safe_gamma,
                    "SPECULATION_GRACE_SECONDS": self._settings.grace_seconds,
                    "SPECULATION_SLEEP_POSITIONS": self._settings.sleep_positions,
                    "SPECULATION_DFLASH_MODEL_PATH": self._settings.dflash_model_path,
                }
            )
            if ranks.is_first():
                secret = secret_of(self._settings.signals_folder)
                self._link = EngineLink.start(spec, self._settings, policy.startup_gamma, secret)
                steering = self._link.steering
                self._losses.report_by(self._link)
        except LinkStartError as error:
            raise PluginError(str(error)) from error
        self._several = ranks.are_several()
        self._policy, self._ranks = policy, Ranks(steering, self._link)
        policy.steer_by(self._ranks)
        if self._link is None:
            return
        atexit.register(self._link.close)
        self._tap = StepTap(self._link, tuple(spec.fingerprint.graph_batch_sizes))
        self._graph_states.log()
        _log.info(
            "steered by %s as %s: drafters %s, draft lengths %s, the drafter %s",
            self._settings.sidecar,
            spec.engine_id,
            ", ".join(drafter.name for drafter in spec.drafters),
            list(gammas),
            "may sleep" if sleepless is None else f"never sleeps ({sleepless})",
        )


def _plain(value: Any) -> Any:
    """An enum by its name; None for what JSON has no number for; anything else as it is."""
    if isinstance(value, Enum):
        return value.name
    return None if isinstance(value, float) and not isfinite(value) else value
