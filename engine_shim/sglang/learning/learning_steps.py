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
from engine_shim.link.losses import reason_of
from engine_shim.sglang.learning import verified_step
from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_shim.common.status import Losses
    from engine_shim.link.orders import Orders
    from engine_shim.link.ranks import Ranks
    from engine_shim.sglang.api.ranks import Peers
    from engine_shim.sglang.api.settings import PluginSettings
    from engine_shim.sglang.learning.deployment import Deployment
    from engine_shim.sglang.learning.online_updates import OnlineUpdates
    from engine_shim.sglang.learning.online_weights import OnlineWeights
    from engine_shim.sglang.learning.signal_collector import SignalCollector


_log = logging.getLogger(__name__)

_REFUSED: Final = "SPECULATION_ONLINE_UPDATES is set, but the drafter cannot learn"


@dataclass(kw_only=True, slots=True, eq=False)
class LearningSteps:
    """Connects the learning of one drafter to the engine's steps.

    learner: index of the drafter that learns.  online, follower: its online updates, on rank 0 and
    on the other ranks.  split: divides the target's hidden states between two drafters, if there
    are two.  Parts that the engine does not have are None.
    """

    ranks: Ranks
    losses: Losses
    learner: int
    online: OnlineUpdates | None = None
    follower: OnlineWeights | None = None
    collector: SignalCollector | None = None
    deployment: Deployment | None = None
    split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

    def before_step(self) -> verified_step.UpdateStatus:
        """Returns the update status of the decode step that begins."""
        self._update(lambda online: online.before_step())
        status = verified_step.NO_UPDATE if self.online is None else self.online.update_status()
        deployment = self.deployment
        if deployment is None:
            return status
        try:
            other = deployment.before_step(self.ranks.draft_version())
            if self.online is not None:
                collecting = self.ranks.collects()
                deployment.keep_learnt(self.online, collecting=collecting, others_serve=other)
        except Exception as error:  # noqa: BLE001 - out of memory, say: current weights serve
            other = False
            deployment.stop(reason_of(error))
            _log.exception("versions of the drafter are no longer put into service")
            self.losses.lose(engine_pb2.CAPABILITY_TAKE_VERSIONS, reason_of(error))
        return status._replace(
            reset=status.reset or other,
            version=deployment.counters.version,
            learnt_from=deployment.counters.learnt_from,
        )

    def before_prefill(self, batch: Any) -> torch.Tensor | None:
        """Runs when a prefill begins, before the drafter reads it.

        Returns the tokens for `after_prefill`; None if the engine collects no signals.
        """
        request_ids = [request.rid for request in batch.reqs]
        self._update(lambda online: online.before_prefill(request_ids))
        if self.follower is not None:
            self.follower.follow_prefill(request_ids)
        # The drafter's part of the prefill replaces `input_ids`.
        tokens: torch.Tensor | None = None if self.collector is None else batch.input_ids
        return tokens

    def after_prefill(self, batch: Any, tokens: torch.Tensor | None, result: Any) -> None:
        """Keeps the ends of the prompts while signals are collected."""
        if tokens is not None and self.ranks.collects():
            found = verified_step.prompt_pass(batch, tokens, self._features(result))
            self._collect(lambda collector: collector.after_prefill(found))

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
        found = verified_step.Verification(batch, result, features, by_learner, undrafted)
        self._update(lambda online: online.after_verify(found, self.ranks.stride()))
        self._collect(
            lambda collector: collector.after_verify(found, collecting=self.ranks.collects())
        )

    def stop(self, why: str) -> None:
        """Ends all learning, because the drafter no longer drafts."""
        self._update(lambda online: online.close(why))
        if self.collector is not None and not self.collector.over:
            self._collect(lambda collector: collector.give_up(why))
        if self.deployment is not None:
            self.deployment.stop(why)
            self.losses.lose(engine_pb2.CAPABILITY_TAKE_VERSIONS, why)

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
        if features is None or self.split is None:
            return features
        return self.split(features)[self.learner]

    def _update(self, part: Callable[[OnlineUpdates], None]) -> None:
        """Runs one part of the online updates, if there are any; an error switches them off."""
        online = self.online
        if online is None:
            return
        try:
            part(online)
        except Exception as error:  # noqa: BLE001 - out of memory, say
            _log.exception("an online update of the drafter failed")
            online.close(reason_of(error))
        if online.over:
            self.losses.lose(engine_pb2.CAPABILITY_UPDATE_ONLINE, online.over)

    def _collect(self, part: Callable[[SignalCollector], None]) -> None:
        """Runs one part of the collection of training signals; an error switches it off."""
        if self.collector is None:
            return
        try:
            part(self.collector)
        except Exception as error:  # noqa: BLE001 - out of memory, say
            _log.exception("training signals are no longer collected")
            self.collector.give_up(reason_of(error))
        if self.collector.over:
            self.losses.lose(engine_pb2.CAPABILITY_COLLECT, self.collector.over)


def refused_device(device: str, *, several: bool) -> str:
    """Explains why drafters cannot learn on a device; "" if they can.

    several: whether several ranks share the drafter.
    """
    if device not in ("cpu", "cuda"):
        return f"{_REFUSED}: on {device} this is untested"
    if several and device != "cpu":
        return (
            f"{_REFUSED}: several ranks exchange weights over the host's network, for which the "
            f"engine would wait on {device}"
        )
    return ""


def updates_for(
    worker: Any,
    device: str,
    ranks: Peers,
    settings: PluginSettings,
    orders: Orders,
    second: Any = None,
) -> OnlineUpdates | OnlineWeights:
    """Makes the online updates of this `EAGLEWorkerV2`; on ranks other than 0 only its weights.

    device: on which it runs.  ranks: that share the drafter.  orders: of this rank.  second: the
    `DFlashDrafter` beside the engine's own, if that learns.  Raises UnsupportedEngineError, and
    UnsupportedDrafterError for a drafter that has no student.
    """
    from engine_shim.sglang.learning.online_updates import OnlineUpdates
    from engine_shim.sglang.learning.online_weights import OnlineWeights
    from engine_shim.sglang.learning.student import live_drafter

    reason = refused_device(device, several=ranks.several)
    if reason:
        raise UnsupportedEngineError(reason)
    drafter = live_drafter(worker, ranks, second)
    if ranks.rank:
        weights = OnlineWeights(drafter, per_request=settings.online_scope == "request")
        weights.follow(orders)
        return weights
    return OnlineUpdates(drafter, settings, settings.gammas[-1], orders)
