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
from engine_shim.common.checks import require
from engine_shim.common.errors import HookError, PluginError
from engine_shim.common.process import at_exit
from engine_shim.common.status import Losses
from engine_shim.common.waiting_prompts import WaitingPrompts
from engine_shim.link.engine_link import EngineLink, steering_of
from engine_shim.link.errors import LinkStartError
from engine_shim.link.orders import Orders
from engine_shim.link.ranks import Ranks
from engine_shim.link.secret import secret_of
from engine_shim.sglang import eager_passes, graph_states
from engine_shim.sglang.adaptive_policy import RuntimeSwitch, SteeredPolicy
from engine_shim.sglang.api import attention_dp, hook_check, ranks, sglang_api
from engine_shim.sglang.drafters import foreign_checkpoints
from engine_shim.sglang.drafters.drafter_fit import drafter_checks
from engine_shim.sglang.drafters.idle_kv import IdleDrafter, cannot_sleep_reason
from engine_shim.sglang.engine_description import (
    DFLASH_NAME,
    add_lookup,
    introduce,
    learner_of,
    set_batch_limits,
)
from engine_shim.sglang.graph_states import GraphStates
from engine_shim.sglang.hooks import SECOND, EngineHooks
from engine_shim.sglang.learning.learning_steps import LearningSteps
from engine_shim.sglang.request_wishes import RequestClasses, RequestWishes, read_key
from engine_shim.sglang.server_args import SteeredConfiguration
from engine_shim.sglang.step_reports import StepTap, prompt_tokens
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
        self._orders = Orders()

    def around_init_model_worker(self, original: Callable[..., None], scheduler: Any) -> None:
        """Hooks the worker before it exists, and its steps when it is ready to serve."""
        # Imported here, because SGLang's models import only on a machine that can run them.
        from engine_shim.sglang.drafters import sd2_model

        require(drafter_checks(scheduler.server_args, self._settings))
        hook_check.around(sglang_api.RESOLVE_CAPTURE, foreign_checkpoints.around_resolve)
        if sglang_api.is_dflash_only(scheduler.server_args):
            from engine_shim.sglang.drafters import dflash_only

            dflash_only.register()
        sd2_model.register()
        hook_check.around(sglang_api.CARRIED_WIDTH, sd2_model.around_carried_width)
        hook_check.replace(sglang_api.APPLY_RUNTIME_STATE, self._switch.apply_runtime_state)
        hook_check.around(sglang_api.BUILD_STATE, self._graph_states.around_build)
        if attention_dp.is_on():
            hook_check.around(sglang_api.INIT_GRAPHS, graph_states.around_init_cuda_graphs)
        dual = None
        if self._settings.dflash_model_path:
            from engine_shim.sglang.drafters.dual import DualDrafter

            dual = DualDrafter(
                self._settings.dflash_model_path,
                self._settings.dflash_revision,
                self._settings.gammas,
                required=self._settings.require_drafters,
            )
            dual.register()
        self._predict_memory(scheduler.server_args)
        _apply_hooks()
        for target in sglang_api.STEP_TARGETS:
            # Fails on a name that SGLang has moved before the weights are loaded.
            pkgutil.resolve_name(target)
        original(scheduler)
        self._start(scheduler, dual).register()
        _apply_hooks()

    def _predict_memory(self, server_args: Any) -> None:
        """Predicts the memory that draft lengths take; logs an error and continues without it."""
        try:
            self._graph_states.expect(SteeredConfiguration(self._settings).predict(server_args))
        except Exception:  # noqa: BLE001 - an informational figure must not end an engine
            _log.exception("the memory of the draft lengths cannot be predicted")

    def _start(self, scheduler: Any, dual: DualDrafter | None) -> EngineHooks:
        """Checks what was built, introduces the engine, starts the link.  Raises PluginError."""
        worker, settings = scheduler.draft_worker, self._settings
        # Comes before any collective operation of the ranks.
        self._orders = Orders(several=ranks.are_several())
        ranks.require_agreement(facts_to_agree_on(settings, engine_shim.__version__))
        policy = _policy_of(worker)
        gammas = tuple(policy.candidate_steps)
        self._switch.prepare(worker, gammas)
        # Detects a DFlash drafter that cannot draft with its graphs before there is traffic.
        block = sglang_api.dflash_only(worker.draft_worker) if dual is None else dual.block
        found = Losses()
        if block is not None:
            block.rehearse(required=dual is None or settings.require_drafters)
            if block.over:
                found.lose(engine_pb2.CAPABILITY_DRAFTER, block.over, DFLASH_NAME)
        sleepless = cannot_sleep_reason(worker)
        if gammas[0] > 0 or settings.sleep_positions == 0:
            sleepless = "the settings exclude it"
        sleep = None
        if sleepless is None:
            sleep = IdleDrafter(worker, settings.sleep_positions, dual)
        learner = learner_of(scheduler, settings.learner, has_second=dual is not None)
        second = block if learner == SECOND else None
        online, follower = self._online_updates(worker, scheduler, second, found)
        collector, deployment = self._collection(worker, scheduler, second, found)
        spec = introduce(
            scheduler,
            settings,
            gammas,
            can_sleep=sleep is not None,
            can_update_online=online is not None,
            can_collect=collector is not None,
            can_take_versions=deployment is not None,
            second=dual,
            learner=learner,
            lost=found.all,
        )
        rows = None
        if settings.lookup:
            from engine_shim.sglang.drafters.row_drafting import RowDrafting

            rows = RowDrafting(worker, add_lookup(spec))
        set_batch_limits(spec, self._graph_states.batch_limits)
        eager = eager_passes.watch(worker, worker.adaptive_controller._states.values(), block)
        link = None
        try:
            steering = steering_of(spec, settings, policy.startup_gamma)
            if ranks.is_first():
                secret = secret_of(settings.signals_folder)
                link = EngineLink.start(spec, settings, policy.startup_gamma, secret)
                steering = link.steering
        except LinkStartError as error:
            raise PluginError(str(error)) from error
        tap = None
        without_prefills = sglang_api.config_leaf("disaggregation_mode") == "decode"
        if link is not None:
            at_exit(link.close)
            waiting = None if without_prefills else _waiting_prompts(scheduler)
            tap = StepTap(link, tuple(spec.fingerprint.graph_batch_sizes), eager, rows, waiting)
            self._graph_states.log()
            eager.log()
            _log.info(
                "steered by %s as %s: drafters %s, draft lengths %s, the drafter %s",
                settings.sidecar,
                spec.engine_id,
                ", ".join(drafter.name for drafter in spec.drafters),
                list(gammas),
                "may sleep" if sleepless is None else f"never sleeps ({sleepless})",
            )
        adopted, losses = Ranks(steering, link), Losses(link, found.all)
        return EngineHooks(
            policy=policy,
            ranks=adopted,
            losses=losses,
            graph_states=self._graph_states,
            eager=eager,
            orders=self._orders,
            several=ranks.are_several(),
            attention_dp=attention_dp.is_on(),
            link=link,
            tap=tap,
            sleep=sleep,
            dual=dual,
            block=block,
            rows=rows,
            wishes=RequestWishes(
                RequestClasses(
                    settings.classes,
                    key=self._class_key,
                    prompt_tokens=settings.class_prompt_tokens,
                    adapters=sglang_api.adapters(scheduler.tp_worker.model_runner),
                ),
                scheduler.tp_worker.model_runner.model_config.vocab_size - 1,
                without_prefills=without_prefills,
            ),
            learning=_learning(
                LearningSteps(
                    ranks=adopted,
                    losses=losses,
                    learner=learner,
                    online=online,
                    follower=follower,
                    collector=collector,
                    deployment=deployment,
                    split=None if dual is None else dual.split,
                )
            ),
        )

    def _online_updates(
        self, worker: Any, scheduler: Any, second: DFlashDrafter | None, losses: Losses
    ) -> tuple[OnlineUpdates | None, OnlineWeights | None]:
        """Makes the online updates of rank 0, or the weights that another rank keeps for them.

        second: the drafter that learns, if it is not the engine's own.  losses: receives the reason
        if that drafter no longer drafts, or has no student.
        """
        if not self._settings.online_updates:
            return None, None
        if second is not None and (over := next(filter(None, ranks.peers().told(second.over)), "")):
            # It may have failed on one rank only, and all ranks have to know.
            losses.lose(engine_pb2.CAPABILITY_UPDATE_ONLINE, over)
            return None, None
        from engine_shim.sglang.learning.learning_steps import updates_for
        from engine_shim.sglang.learning.online_updates import OnlineUpdates
        from engine_shim.sglang.training.students import UnsupportedDrafterError

        device, peers = scheduler.tp_worker.model_runner.device, ranks.peers()
        try:
            online = updates_for(worker, device, peers, self._settings, self._orders, second)
        except UnsupportedDrafterError as error:
            losses.lose(engine_pb2.CAPABILITY_UPDATE_ONLINE, f"the drafter has no student: {error}")
            return None, None
        if not isinstance(online, OnlineUpdates):
            return None, online
        at_exit(online.close)
        return online, None

    def _collection(
        self, worker: Any, scheduler: Any, second: DFlashDrafter | None, losses: Losses
    ) -> tuple[SignalCollector | None, Deployment | None]:
        """Makes both, or neither: signals are useful only for a drafter that takes versions.

        second: as for `_online_updates`.  losses: receives the reason if the drafter has no
        student.  Rank 0 has both; the other ranks carry out the orders of its deployment.
        """
        if not self._settings.signals_folder:
            return None, None
        from engine_shim.sglang.learning.deployment import Deployment
        from engine_shim.sglang.learning.signal_collector import collector_for
        from engine_shim.sglang.learning.student import live_drafter
        from engine_shim.sglang.training.students import UnsupportedDrafterError
        from engine_shim.sglang.training.versions import VersionError

        runner, folder = scheduler.tp_worker.model_runner, self._settings.signals_folder
        try:
            drafter = live_drafter(worker, ranks.peers(), second)
            deployment = Deployment(Path(folder), drafter, self._orders)
            if not ranks.is_first():
                return None, None
            collector = collector_for(runner, self._settings)
        except UnsupportedDrafterError as error:
            for capability in (
                engine_pb2.CAPABILITY_COLLECT,
                engine_pb2.CAPABILITY_TAKE_VERSIONS,
            ):
                losses.lose(capability, f"the drafter has no student: {error}")
            return None, None
        except (OSError, VersionError) as error:
            raise PluginError(f"SPECULATION_SIGNALS_FOLDER: {error}") from error
        at_exit(collector.close)
        return collector, deployment


def _learning(found: LearningSteps) -> LearningSteps | None:
    """Returns None if the engine has no part that learns, so that steps skip all of it."""
    parts = found.online, found.follower, found.collector, found.deployment
    return None if all(part is None for part in parts) else found


def facts_to_agree_on(settings: PluginSettings, shim_version: str) -> dict[str, Any]:
    """Returns the values that must be equal on all ranks, by the names that an error shows."""
    return {"the installed plugin": shim_version} | {
        f"SPECULATION_{name.upper()}": getattr(settings, name) for name in AGREED_SETTINGS
    }


def _apply_hooks() -> None:
    HookRegistry.apply_hooks()
    hook_check.require_hooks(*hook_check.registered_targets())


def _waiting_prompts(scheduler: Any) -> WaitingPrompts:
    return WaitingPrompts(lambda: scheduler.waiting_queue, prompt_tokens)


def _policy_of(worker: Any) -> SteeredPolicy:
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
    graph_states = tuple(sorted(controller._states))
    if graph_states != gammas:
        raise HookError(f"SGLang prepared draft lengths {graph_states}, not {gammas}")
    widest = sglang_api.widest_step()
    if widest != gammas[-1] + 1:
        raise HookError(
            f"SGLang sized its buffers for {widest} draft tokens, {gammas[-1] + 1} are needed"
        )
    return policy
