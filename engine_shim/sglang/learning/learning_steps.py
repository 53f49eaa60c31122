"""Calls the parts of learning around an engine's steps, in the order of the steps.

    before_step      applies online updates; puts the plan's version of the drafter into service
    before_prefill   restores the first weights for new requests (SPECULATION_ONLINE_SCOPE=request)
    after_prefill    collects the ends of prompts
    after_verify     learns from what the step has verified, and collects it

No error here may end an engine.  A part that fails is switched off with one log line, and the loss
is reported to the sidecar.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.link.lost_capabilities import error_reason
from engine_shim.sglang.learning import verified_step
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_shim.common.status import LostCapabilityReporter
    from engine_shim.link.rank_commands import RankCommands
    from engine_shim.link.rank_plan_sync import RankPlanSync
    from engine_shim.sglang.api.ranks import Peers
    from engine_shim.sglang.api.settings import PluginSettings
    from engine_shim.sglang.learning.deployment import Deployment
    from engine_shim.sglang.learning.online_updates import OnlineUpdates
    from engine_shim.sglang.learning.online_weights import OnlineWeights
    from engine_shim.sglang.learning.signal_collector import SignalCollector


_log = logging.getLogger(__name__)

_REFUSAL_LEAD: Final = "SPECULATION_ONLINE_UPDATES is set, but the drafter cannot learn"


@dataclass(kw_only=True, slots=True, eq=False)
class LearningSteps:
    """Connects the learning of one drafter to the engine's steps.

    learner_index: index of the drafter that learns.  online, rank_weights: its online updates, on
    rank 0 and on the other ranks.  split_features: divides the target's hidden states between two
    drafters, if there are two.  Parts that the engine does not have are None.
    """

    plan_sync: RankPlanSync
    lost_capabilities: LostCapabilityReporter
    learner_index: int
    online: OnlineUpdates | None = None
    rank_weights: OnlineWeights | None = None
    collector: SignalCollector | None = None
    deployment: Deployment | None = None
    split_features: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    def before_step(self) -> verified_step.UpdateStatus:
        """Returns the update status of the decode step that begins."""
        self._run_online(lambda online: online.before_step())
        status = verified_step.NO_UPDATE if self.online is None else self.online.update_status()
        deployment = self.deployment
        if deployment is None:
            return status
        try:
            is_replaced = deployment.before_step(self.plan_sync.draft_version())
            if self.online is not None:
                collecting = self.plan_sync.collects_signals()
                deployment.store_learnt(self.online, collecting=collecting, is_replaced=is_replaced)
        except Exception as error:  # noqa: BLE001 - out of memory, say: current weights serve
            is_replaced = False
            deployment.stop(error_reason(error))
            _log.exception("versions of the drafter are no longer put into service")
            self.lost_capabilities.mark_lost(
                engine_pb2.CAPABILITY_TAKE_VERSIONS, error_reason(error)
            )
        return status._replace(
            reset=status.reset or is_replaced,
            version=deployment.counters.version,
            learnt_from=deployment.counters.learnt_from,
        )

    def before_prefill(self, batch: Any) -> torch.Tensor | None:
        """Runs when a prefill begins, before the drafter reads it.

        Returns the tokens for `after_prefill`; None if the engine collects no signals.
        """
        request_ids = [request.rid for request in batch.reqs]
        self._run_online(lambda online: online.before_prefill(request_ids))
        if self.rank_weights is not None:
            self.rank_weights.start_prefill(request_ids)
        # The drafter's part of the prefill replaces `input_ids`.
        tokens: torch.Tensor | None = None if self.collector is None else batch.input_ids
        return tokens

    def after_prefill(self, batch: Any, tokens: torch.Tensor | None, result: Any) -> None:
        """Keeps the ends of the prompts while signals are collected."""
        if tokens is not None and self.plan_sync.collects_signals():
            prompt = verified_step.make_prompt_pass(batch, tokens, self._features(result))
            self._run_collector(lambda collector: collector.after_prefill(prompt))

    def after_verify(
        self, batch: Any, result: Any, *, by_learner: bool, undrafted: Sequence[int]
    ) -> None:
        """Gives the learner what a step has verified, with the hidden states that it reads.

        by_learner: whether the learner drafted the step, if anything was drafted.  undrafted: rows
        of requests that must not be drafted for.
        """
        if self.online is None and self.collector is None:
            return
        features = self._features(result)
        assert features is not None
        verification = verified_step.Verification(batch, result, features, by_learner, undrafted)
        self._run_online(
            lambda online: online.after_verify(verification, self.plan_sync.update_stride())
        )
        self._run_collector(
            lambda collector: collector.after_verify(
                verification, collecting=self.plan_sync.collects_signals()
            )
        )

    def stop(self, reason: str) -> None:
        """Ends all learning, because the drafter no longer drafts."""
        self._run_online(lambda online: online.close(reason))
        if self.collector is not None and not self.collector.end_reason:
            self._run_collector(lambda collector: collector.stop(reason))
        if self.deployment is not None:
            self.deployment.stop(reason)
            self.lost_capabilities.mark_lost(engine_pb2.CAPABILITY_TAKE_VERSIONS, reason)

    def status(self) -> dict[str, Any]:
        """Returns the counters of each part, as plain values."""
        return {
            "online": None if self.online is None else asdict(self.online.counters),
            "signals": None if self.collector is None else self.collector.status(),
            "draft": None if self.deployment is None else asdict(self.deployment.counters),
        }

    def _features(self, result: Any) -> torch.Tensor | None:
        """Returns the hidden states that the learner reads of a pass of the target."""
        features: torch.Tensor | None = result.logits_output.hidden_states
        if features is None or self.split_features is None:
            return features
        return self.split_features(features)[self.learner_index]

    def _run_online(self, part: Callable[[OnlineUpdates], None]) -> None:
        """Runs one part of the online updates, if there are any; an error switches them off."""
        online = self.online
        if online is None:
            return
        try:
            part(online)
        except Exception as error:  # noqa: BLE001 - out of memory, say
            _log.exception("an online update of the drafter failed")
            online.close(error_reason(error))
        if online.end_reason:
            self.lost_capabilities.mark_lost(engine_pb2.CAPABILITY_UPDATE_ONLINE, online.end_reason)

    def _run_collector(self, part: Callable[[SignalCollector], None]) -> None:
        """Runs one part of the collection of training signals; an error switches it off."""
        if self.collector is None:
            return
        try:
            part(self.collector)
        except Exception as error:  # noqa: BLE001 - out of memory, say
            _log.exception("training signals are no longer collected")
            self.collector.stop(error_reason(error))
        if self.collector.end_reason:
            self.lost_capabilities.mark_lost(
                engine_pb2.CAPABILITY_COLLECT, self.collector.end_reason
            )


def unsupported_device_reason(device: str, *, has_other_ranks: bool) -> str:
    """Explains why drafters cannot learn on a device; "" if they can.

    has_other_ranks: whether several ranks share the drafter.
    """
    if device not in ("cpu", "cuda"):
        return f"{_REFUSAL_LEAD}: on {device} this is untested"
    if has_other_ranks and device != "cpu":
        return (
            f"{_REFUSAL_LEAD}: several ranks exchange weights over the host's network, for which "
            "the "
            f"engine would wait on {device}"
        )
    return ""


def make_online_updates(
    worker: Any,
    device: str,
    peers: Peers,
    settings: PluginSettings,
    rank_commands: RankCommands,
    second_drafter: Any = None,
) -> OnlineUpdates | OnlineWeights:
    """Makes the online updates of this `EAGLEWorkerV2`; on ranks other than 0 only its weights.

    device: on which it runs.  peers: that share the drafter.  rank_commands: of this rank.
    second_drafter: the `DFlashDrafter` beside the engine's own, if that learns.  Raises
    UnsupportedEngineError, and UnsupportedDrafterError for a drafter that has no student.
    """
    from engine_shim.sglang.learning.online_updates import OnlineUpdates
    from engine_shim.sglang.learning.online_weights import OnlineWeights
    from engine_shim.sglang.learning.student import live_drafter

    reason = unsupported_device_reason(device, has_other_ranks=peers.has_other_ranks)
    if reason:
        raise UnsupportedEngineError(reason)
    drafter = live_drafter(worker, peers, second_drafter)
    if peers.rank:
        weights = OnlineWeights(drafter, per_request=settings.online_scope == "request")
        weights.register_commands(rank_commands)
        return weights
    return OnlineUpdates(drafter, settings, settings.gammas[-1], rank_commands)
