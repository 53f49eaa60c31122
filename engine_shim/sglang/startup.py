"""Builds and checks all parts of one steered engine when its scheduler starts.

If a part is missing, or SGLang prepared other draft lengths than requested, the engine does not
start.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookRegistry

import engine_shim
from engine_shim.common.checks import require_no_obstacle
from engine_shim.common.errors import HookError, PluginError
from engine_shim.common.process import register_exit_handler
from engine_shim.common.status import LostCapabilityReporter
from engine_shim.common.waiting_prompts import WaitingPrompts
from engine_shim.link.engine_link import EngineLink, make_plan_follower
from engine_shim.link.errors import LinkStartError
from engine_shim.link.rank_commands import RankCommands
from engine_shim.link.rank_plan_sync import RankPlanSync
from engine_shim.link.secret import resolve_secret
from engine_shim.sglang import eager_passes, graph_states
from engine_shim.sglang.adaptive_policy import RuntimeSwitch, SteeredPolicy
from engine_shim.sglang.api import attention_dp, hook_check, ranks, sglang_api
from engine_shim.sglang.drafters import foreign_checkpoints
from engine_shim.sglang.drafters.drafter_fit import drafter_checks
from engine_shim.sglang.drafters.sleeping_drafter import SleepingDrafter, cannot_sleep_reason
from engine_shim.sglang.engine_description import (
    DFLASH_NAME,
    add_lookup,
    describe_engine,
    learner_index,
    set_batch_limits,
)
from engine_shim.sglang.graph_states import GraphStates
from engine_shim.sglang.hooks import SECOND_DRAFTER_INDEX, EngineHooks
from engine_shim.sglang.learning.learning_steps import LearningSteps
from engine_shim.sglang.request_options import RequestClasses, RequestOptions, read_key
from engine_shim.sglang.server_args import SteeredConfiguration
from engine_shim.sglang.step_reports import StepReporter, unread_prompt_tokens
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_shim.sglang.api.settings import PluginSettings
    from engine_shim.sglang.drafters.dflash import DFlashDrafter
    from engine_shim.sglang.drafters.dual import DualDrafter
    from engine_shim.sglang.learning.deployment import Deployment
    from engine_shim.sglang.learning.online_updates import OnlineUpdates
    from engine_shim.sglang.learning.online_weights import OnlineWeights
    from engine_shim.sglang.learning.signal_collector import SignalCollector

# Settings by which every rank builds its drafters, chooses its steps, reads versions or takes part
# in online updates.  All other settings concern rank 0 alone (the link, signals, the trainer), or
# only decide whether a rank starts (SPECULATION_REQUIRE_DRAFTERS).
AGREED_SETTINGS: Final = (
    "gammas",
    "graph_limits",
    "safe_gamma",
    "grace_seconds",
    "sleep_positions",
    "dflash_model_path",
    "dflash_revision",
    "learner",
    "lookup",
    "online_updates",
    "online_scope",
    "signals_folder",
)

_log = logging.getLogger(__name__)


class EngineStartup:
    """Hooks the start of one engine, in the process of its scheduler."""

    def __init__(self, settings: PluginSettings) -> None:
        self._settings = settings
        self._switch = RuntimeSwitch()
        self._graph_states = GraphStates(settings.graph_limits)
        self._class_key = read_key(settings.class_key_file)
        self._rank_commands = RankCommands()

    def around_init_model_worker(self, original: Callable[..., None], scheduler: Any) -> None:
        """Hooks the worker before it exists, and its steps when it is ready to serve."""
        # Imported here, because SGLang's models import only on a machine that can run them.
        from engine_shim.sglang.drafters import sd2_model

        require_no_obstacle(drafter_checks(scheduler.server_args, self._settings))
        hook_check.around(sglang_api.RESOLVE_CAPTURE, foreign_checkpoints.around_resolve)
        if sglang_api.is_dflash_only(scheduler.server_args):
            from engine_shim.sglang.drafters import dflash_only

            dflash_only.register()
        sd2_model.register()
        hook_check.around(sglang_api.RESOLVE_HIDDEN_SIZE, sd2_model.around_carried_width)
        hook_check.replace(sglang_api.APPLY_RUNTIME_STATE, self._switch.apply_runtime_state)
        hook_check.around(sglang_api.BUILD_STATE, self._graph_states.around_build)
        if attention_dp.is_enabled():
            hook_check.around(sglang_api.INIT_GRAPHS, graph_states.around_init_cuda_graphs)
        dual_drafter = None
        if self._settings.dflash_model_path:
            from engine_shim.sglang.drafters.dual import DualDrafter

            dual_drafter = DualDrafter(
                self._settings.dflash_model_path,
                self._settings.dflash_revision,
                self._settings.gammas,
                required=self._settings.require_drafters,
            )
            dual_drafter.register()
        self._predict_memory(scheduler.server_args)
        _apply_hooks()
        for target in sglang_api.STEP_TARGETS:
            # Fails on a name that SGLang has moved before the weights are loaded.
            pkgutil.resolve_name(target)
        original(scheduler)
        self._build_hooks(scheduler, dual_drafter).register()
        _apply_hooks()

    def _predict_memory(self, server_args: Any) -> None:
        """Predicts the memory that draft lengths take; logs an error and continues without it."""
        try:
            self._graph_states.set_prediction(
                SteeredConfiguration(self._settings).predict_memory(server_args)
            )
        except Exception:  # noqa: BLE001 - an informational figure must not end an engine
            _log.exception("the memory of the draft lengths cannot be predicted")

    def _build_hooks(self, scheduler: Any, dual_drafter: DualDrafter | None) -> EngineHooks:
        """Checks what was built, introduces the engine, starts the link.  Raises PluginError."""
        worker, settings = scheduler.draft_worker, self._settings
        # Comes before any collective operation of the ranks.
        self._rank_commands = RankCommands(has_other_ranks=ranks.has_other_ranks())
        ranks.require_agreement(agreement_facts(settings, engine_shim.__version__))
        policy = _require_policy(worker)
        gammas = tuple(policy.candidate_steps)
        self._switch.prepare(worker, gammas)
        # Detects a DFlash drafter that cannot draft with its graphs before there is traffic.
        dflash_drafter = (
            sglang_api.dflash_only_drafter(worker.draft_worker)
            if dual_drafter is None
            else dual_drafter.dflash_drafter
        )
        startup_lost_capabilities = LostCapabilityReporter()
        if dflash_drafter is not None:
            dflash_drafter.rehearse(required=dual_drafter is None or settings.require_drafters)
            if dflash_drafter.failure_reason:
                startup_lost_capabilities.mark_lost(
                    engine_pb2.CAPABILITY_DRAFTER, dflash_drafter.failure_reason, DFLASH_NAME
                )
        no_sleep_reason = cannot_sleep_reason(worker)
        if gammas[0] > 0 or settings.sleep_positions == 0:
            no_sleep_reason = "the settings exclude it"
        sleeping_drafter = None
        if no_sleep_reason is None:
            sleeping_drafter = SleepingDrafter(worker, settings.sleep_positions, dual_drafter)
        learner = learner_index(scheduler, settings.learner, has_second=dual_drafter is not None)
        learning_dflash = dflash_drafter if learner == SECOND_DRAFTER_INDEX else None
        online, rank_weights = self._build_online_updates(
            worker, scheduler, learning_dflash, startup_lost_capabilities
        )
        collector, deployment = self._build_collection(
            worker, scheduler, learning_dflash, startup_lost_capabilities
        )
        spec = describe_engine(
            scheduler,
            settings,
            gammas,
            can_sleep=sleeping_drafter is not None,
            can_update_online=online is not None,
            can_collect=collector is not None,
            can_take_versions=deployment is not None,
            second_drafter=dual_drafter,
            learner=learner,
            lost=startup_lost_capabilities.all,
        )
        row_drafting = None
        if settings.lookup:
            from engine_shim.sglang.drafters.row_drafting import RowDrafting

            row_drafting = RowDrafting(worker, add_lookup(spec))
        set_batch_limits(spec, self._graph_states.batch_limits)
        eager = eager_passes.watch_drafters(
            worker, worker.adaptive_controller._states.values(), dflash_drafter
        )
        link = None
        try:
            plan_follower = make_plan_follower(spec, settings, policy.startup_gamma)
            if ranks.is_first_rank():
                secret = resolve_secret(settings.signals_folder)
                link = EngineLink.start(spec, settings, policy.startup_gamma, secret)
                plan_follower = link.plan_follower
        except LinkStartError as error:
            raise PluginError(str(error)) from error
        reporter = None
        is_decode_server = sglang_api.config_leaf("disaggregation_mode") == "decode"
        if link is not None:
            register_exit_handler(link.close)
            waiting_prompts = None if is_decode_server else _count_waiting_prompts(scheduler)
            reporter = StepReporter(
                link,
                tuple(spec.fingerprint.graph_batch_sizes),
                eager,
                row_drafting,
                waiting_prompts,
            )
            self._graph_states.log()
            eager.log()
            _log.info(
                "steered by %s as %s: drafters %s, draft lengths %s, the drafter %s",
                settings.sidecar,
                spec.engine_id,
                ", ".join(drafter.name for drafter in spec.drafters),
                list(gammas),
                "may sleep" if no_sleep_reason is None else f"never sleeps ({no_sleep_reason})",
            )
        plan_sync, lost_capabilities = (
            RankPlanSync(plan_follower, link),
            LostCapabilityReporter(link, startup_lost_capabilities.all),
        )
        return EngineHooks(
            policy=policy,
            plan_sync=plan_sync,
            lost_capabilities=lost_capabilities,
            graph_states=self._graph_states,
            eager=eager,
            rank_commands=self._rank_commands,
            has_other_ranks=ranks.has_other_ranks(),
            has_attention_dp=attention_dp.is_enabled(),
            link=link,
            reporter=reporter,
            sleeping_drafter=sleeping_drafter,
            dual_drafter=dual_drafter,
            dflash_drafter=dflash_drafter,
            row_drafting=row_drafting,
            request_options=RequestOptions(
                RequestClasses(
                    settings.classes,
                    key=self._class_key,
                    prompt_tokens=settings.class_prompt_tokens,
                    adapters=sglang_api.lora_adapters(scheduler.tp_worker.model_runner),
                ),
                scheduler.tp_worker.model_runner.model_config.vocab_size - 1,
                is_decode_server=is_decode_server,
            ),
            learning=_drop_empty_learning(
                LearningSteps(
                    plan_sync=plan_sync,
                    lost_capabilities=lost_capabilities,
                    learner_index=learner,
                    online=online,
                    rank_weights=rank_weights,
                    collector=collector,
                    deployment=deployment,
                    split_features=None if dual_drafter is None else dual_drafter.split,
                )
            ),
        )

    def _build_online_updates(
        self,
        worker: Any,
        scheduler: Any,
        learning_dflash: DFlashDrafter | None,
        lost_capabilities: LostCapabilityReporter,
    ) -> tuple[OnlineUpdates | None, OnlineWeights | None]:
        """Makes the online updates of rank 0, or the weights that another rank keeps for them.

        learning_dflash: the drafter that learns, if it is not the engine's own.  lost_capabilities:
        receives the reason if that drafter no longer drafts, or has no student.
        """
        if not self._settings.online_updates:
            return None, None
        if learning_dflash is not None and (
            failure_reason := next(
                filter(None, ranks.peers().all_gather(learning_dflash.failure_reason)), ""
            )
        ):
            # It may have failed on one rank only, and all ranks have to know.
            lost_capabilities.mark_lost(engine_pb2.CAPABILITY_UPDATE_ONLINE, failure_reason)
            return None, None
        from engine_shim.sglang.learning.learning_steps import make_online_updates
        from engine_shim.sglang.learning.online_updates import OnlineUpdates
        from engine_shim.sglang.training.students import UnsupportedDrafterError

        device, peers = scheduler.tp_worker.model_runner.device, ranks.peers()
        try:
            online = make_online_updates(
                worker, device, peers, self._settings, self._rank_commands, learning_dflash
            )
        except UnsupportedDrafterError as error:
            lost_capabilities.mark_lost(
                engine_pb2.CAPABILITY_UPDATE_ONLINE,
                f"the plugin cannot train this kind of drafter: {error}",
            )
            return None, None
        if not isinstance(online, OnlineUpdates):
            return None, online
        register_exit_handler(online.close)
        return online, None

    def _build_collection(
        self,
        worker: Any,
        scheduler: Any,
        learning_dflash: DFlashDrafter | None,
        lost_capabilities: LostCapabilityReporter,
    ) -> tuple[SignalCollector | None, Deployment | None]:
        """Makes the signal collector and the deployment, or neither.

        Signals are useful only for a drafter that takes versions.

        learning_dflash: as for `_build_online_updates`.  lost_capabilities: receives the reason if
        the drafter has no student.  Rank 0 has both; the other ranks carry out the orders of its
        deployment.
        """
        if not self._settings.signals_folder:
            return None, None
        from engine_shim.sglang.learning.deployment import Deployment
        from engine_shim.sglang.learning.signal_collector import make_collector
        from engine_shim.sglang.learning.student import live_drafter
        from engine_shim.sglang.training.students import UnsupportedDrafterError
        from engine_shim.sglang.training.versions import VersionError

        runner, folder = scheduler.tp_worker.model_runner, self._settings.signals_folder
        try:
            drafter = live_drafter(worker, ranks.peers(), learning_dflash)
            deployment = Deployment(Path(folder), drafter, self._rank_commands)
            if not ranks.is_first_rank():
                return None, None
            collector = make_collector(runner, self._settings)
        except UnsupportedDrafterError as error:
            for capability in (
                engine_pb2.CAPABILITY_COLLECT,
                engine_pb2.CAPABILITY_TAKE_VERSIONS,
            ):
                lost_capabilities.mark_lost(
                    capability, f"the plugin cannot train this kind of drafter: {error}"
                )
            return None, None
        except (OSError, VersionError) as error:
            raise PluginError(f"SPECULATION_SIGNALS_FOLDER: {error}") from error
        register_exit_handler(collector.close)
        return collector, deployment


def _drop_empty_learning(learning_steps: LearningSteps) -> LearningSteps | None:
    """Returns None if the engine has no part that learns, so that steps skip all of it."""
    parts = (
        learning_steps.online,
        learning_steps.rank_weights,
        learning_steps.collector,
        learning_steps.deployment,
    )
    return None if all(part is None for part in parts) else learning_steps


def agreement_facts(settings: PluginSettings, shim_version: str) -> dict[str, Any]:
    """Returns the values that must be equal on all ranks, by the names that an error shows."""
    return {"the installed plugin": shim_version} | {
        f"SPECULATION_{name.upper()}": getattr(settings, name) for name in AGREED_SETTINGS
    }


def _apply_hooks() -> None:
    HookRegistry.apply_hooks()
    hook_check.require_hooks(*hook_check.registered_targets())


def _count_waiting_prompts(scheduler: Any) -> WaitingPrompts:
    return WaitingPrompts(lambda: scheduler.waiting_queue, unread_prompt_tokens)


def _require_policy(worker: Any) -> SteeredPolicy:
    """Returns the policy that SGLang constructed.

    Raises HookError if it is not the plugin's, or if SGLang prepared other draft lengths.
    """
    controller: Any = getattr(worker, "adaptive_controller", None)
    policy = getattr(controller, "params", None)
    if not isinstance(policy, SteeredPolicy):
        raise HookError(
            f"SGLang never constructed the plugin's policy (found {type(policy).__name__} in "
            f"{type(worker).__name__}): the draft length would not be steered"
        )
    gammas = tuple(policy.candidate_steps)
    prepared_gammas = tuple(sorted(controller._states))
    if prepared_gammas != gammas:
        raise HookError(f"SGLang prepared draft lengths {prepared_gammas}, not {gammas}")
    step_tokens = sglang_api.max_step_tokens()
    if step_tokens != gammas[-1] + 1:
        raise HookError(
            f"SGLang sized its buffers for {step_tokens} draft tokens, {gammas[-1] + 1} are needed"
        )
    return policy
