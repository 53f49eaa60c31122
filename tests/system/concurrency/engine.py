"""An engine that runs steps by the real link, and the ledger of what it was told."""

import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from controller.core.clock import VirtualClock
from engine_shim.link.engine_link import EngineLink, make_plan_follower
from engine_shim.link.messages import (
    MAX_PACKET_BYTES,
    ArrivedPlan,
    encode_plan,
    table_digest,
)
from engine_shim.link.plan_follower import StepChoice, make_safe_default
from engine_shim.link.rank_plan_sync import RankPlanSync, RankUpdate
from engine_shim.link.settings import LinkSettings
from speculation.v1.engine_pb2 import (
    DRAFTER_KIND_DFLASH,
    DRAFTER_KIND_MTP,
    Capabilities,
    Drafter,
    EngineSpec,
    Fingerprint,
)
from tests.support.step_reports import send, step_report
from tests.system.concurrency.ledger import Ledger, Step
from tests.system.concurrency.processes import AgentProcess

STEP_SECONDS: Final = 0.01
_GRACE_SECONDS: Final = 4.0
_MAX_BATCH_SIZE: Final = 16


def specs() -> list[EngineSpec]:
    """One with two drafters, that can sleep and learn; one plain, of few batch buckets."""
    rich = EngineSpec(
        engine_id="rich",
        drafters=[
            Drafter(name="mtp", kind=DRAFTER_KIND_MTP, gammas=(0, 1, 3, 5)),
            Drafter(name="dflash", kind=DRAFTER_KIND_DFLASH, gammas=(0, 4, 7)),
        ],
        max_batch_size=_MAX_BATCH_SIZE,
        capabilities=Capabilities(
            can_sleep=True, can_switch_drafter=True, can_update_online=True, can_collect=True
        ),
    )
    plain = EngineSpec(
        engine_id="plain",
        fingerprint=Fingerprint(graph_batch_sizes=(1, 8, 16)),
        drafters=[Drafter(name="mtp", kind=DRAFTER_KIND_MTP, gammas=(0, 1, 2, 3))],
        max_batch_size=_MAX_BATCH_SIZE,
    )
    return [rich, plain]


class Agents:
    """Where the supervisor stands: hands out the sockets of agents that were started."""

    def __init__(self) -> None:
        self._new_sockets: deque[socket.socket] = deque()
        self.starts = 0
        self.agent_pid = None

    def add(self, ours: socket.socket) -> None:
        self._new_sockets.append(ours)
        self.starts += 1

    def take_socket(self) -> socket.socket | None:
        newest = self._new_sockets.pop() if self._new_sockets else None
        while self._new_sockets:
            self._new_sockets.popleft().close()
        return newest

    def stop(self) -> None:
        while self._new_sockets:
            self._new_sockets.pop().close()


class RankedEngine:
    """Runs steps: one choice, one report each.  `ranks` of them adopt alike.

    note: told of every choice and report.
    """

    def __init__(
        self, spec: EngineSpec, ranks: int, clock: VirtualClock, note: Callable[..., None]
    ) -> None:
        self.spec = spec
        self._note = note
        self._clock = clock
        settings = LinkSettings(sidecar="unix:controller.sock", grace_seconds=_GRACE_SECONDS)
        steerings = [make_plan_follower(spec, settings, 1) for _ in range(ranks)]
        self.agents = Agents()
        self.link = EngineLink(self.agents, steerings[0])  # type: ignore[arg-type]
        self._ranks = [RankPlanSync(steering, None) for steering in steerings]
        self._ranks[0] = RankPlanSync(steerings[0], self.link)
        self._steerings = steerings
        self._held_back: list[RankUpdate] = []
        # The newest plans that its steering took.
        self._taken: deque[ArrivedPlan] = deque(maxlen=4)
        # The newest plan that its agent had as packets were lost.
        self._missed: tuple[int, int] | None = None
        self.ledger = Ledger(spec, _GRACE_SECONDS, make_safe_default(1))
        self.agent: AgentProcess | None = None
        self.step = 0

    def choose(self, batch_size: int, lose_broadcast: bool) -> StepChoice:
        """Alike on all ranks, and as the ledger will have it."""
        if len(self._ranks) == 1:
            choice, judged_at = self.link.choose(batch_size), self._clock.now()
        else:
            updates = self._ranks[0].outgoing_updates()
            if lose_broadcast:
                self._held_back = updates
            else:
                for rank in self._ranks:
                    for update in (*self._held_back, *updates):
                        rank.adopt(update)
                self._held_back = []
            choices = {rank.choose(batch_size) for rank in self._ranks}
            assert len(choices) == 1, f"the ranks differ: {choices}"
            choice, judged_at = choices.pop(), self._ranks[0]._last_adopted.now
        believed = self._steerings[0].plan
        self._note("chosen", self.spec.engine_id, batch_size, choice)
        self.ledger.chosen(choice, batch_size, judged_at, believed)
        if believed is not None:
            arrived_at = self._steerings[0].lease_end - believed.lease_ms * 1e-3
            arrived = ArrivedPlan(believed, round(arrived_at * 1e9))
            if arrived not in self._taken:
                self._taken.append(arrived)
            regime = believed.regime
            regime_key = (regime.mode, regime.stride, believed.draft_version)
            assert regime_key == self.ledger.regime(believed.session, believed.epoch)
        return choice

    def lose_packet(self) -> None:
        """The next packet for it, plan or event, is not read."""
        peer = self.link._connect_if_possible()
        if peer is not None:
            self._missed = self.ledger.newest_taken
            with contextlib.suppress(OSError):
                peer.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)

    def repeat_packet(self, back: int) -> None:
        """A packet that was taken comes again: the newest, or one `back` plans before it."""
        if self.agent is None or self.agent.port is None:
            return
        mine = [known for known in self._taken if known.plan.session == self.ledger.newest[0]]
        if mine:
            known = mine[max(0, len(mine) - 1 - back)]
            late = encode_plan(known._replace(table_digest=table_digest(known.plan)))
            with contextlib.suppress(OSError):
                self.agent.port._peer.send(late, socket.MSG_DONTWAIT)

    @property
    def is_up_to_date(self) -> bool:
        """Whether it has the newest plan that its agent took up, or cannot have it."""
        believed, newest = self.link.plan_follower.plan, self.ledger.newest_taken
        reached = believed is not None and (believed.session, believed.epoch) == newest
        return reached or self.agent is None or newest in {self._missed, (0, 0)}

    def run(self, batch_size: int, accepted: int, lose_broadcast: bool = False) -> StepChoice:
        """One step; `accepted` draft tokens by each sequence, if that many were drafted."""
        choice = self.choose(batch_size, lose_broadcast)
        counts = [0] * (choice.gamma + 1)
        counts[min(accepted, choice.gamma)] = batch_size
        self.step += 1
        self.ledger.stepped(self.step, Step(choice, batch_size, tuple(counts)))
        report = step_report(
            self.step,
            counts,
            choice,
            kv_tokens=batch_size * 512,
            drafter=self.spec.drafters[choice.drafter_index].name,
            step_seconds=STEP_SECONDS * (1 + 0.1 * choice.gamma),
        )
        sent = send(self.link, report)
        self._note("reported", self.spec.engine_id, self.step, counts, sent)
        return choice
