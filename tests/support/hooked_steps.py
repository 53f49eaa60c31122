"""The shim's hooks around steps that compute nothing, in this process."""

import socket
from types import SimpleNamespace
from typing import Any, Final

import torch

from engine_shim.common.status import LostCapabilityReporter
from engine_shim.link.engine_link import EngineLink
from engine_shim.link.rank_plan_sync import RankPlanSync
from engine_shim.sglang.drafters.sleeping_drafter import SleepingDrafter
from engine_shim.sglang.eager_passes import EagerPasses
from engine_shim.sglang.graph_states import GraphStates
from engine_shim.sglang.hooks import EngineHooks
from engine_shim.sglang.step_reports import StepReporter
from speculation.v1.engine_pb2 import StepReport
from tests.support.link_messages import plan
from tests.support.step_reports import read_report, send_plan

_DECODE: Final = SimpleNamespace(is_decode=lambda: True)


class HookedSteps:
    """The hooks of an engine of one rank around steps that compute nothing."""

    def __init__(self, link: EngineLink, agent: socket.socket, size: int) -> None:
        worker = SimpleNamespace(_stub_skipped_draft_extend=lambda *_: None)
        self.hooks = EngineHooks(
            policy=SimpleNamespace(set_choice=lambda _: None),  # type: ignore[arg-type]
            plan_sync=RankPlanSync(link.plan_follower, link),
            lost_capabilities=LostCapabilityReporter(),
            graph_states=GraphStates(),
            eager=EagerPasses(),
            link=link,
            reporter=StepReporter(link),
            sleeping_drafter=SleepingDrafter(worker, 100),
        )
        self._agent = agent
        self._tokens, self._hidden = torch.zeros(size, dtype=torch.int64), torch.zeros(size, 4)
        self._gamma = self._iteration = 0
        self._requests = [
            SimpleNamespace(
                rid=str(place),
                kv=SimpleNamespace(kv_committed_len=9),
                finished_reason=None,
                finished_len=None,
                output_ids=[0] * 9,
                is_retracted=False,
            )
            for place in range(size)
        ]

    def set_plan(self, gamma: int, *, asleep: bool = False) -> None:
        """Sends a plan, for the next step."""
        plan_message = plan(1, gamma, lease_ms=600_000)
        plan_message.rows[0].drafter_asleep = asleep
        send_plan(self._agent, plan_message)
        self._gamma = gamma

    def step(self, *, hooked: bool = True) -> None:
        """Runs a step in which each sequence gets one token; hooked: through the hooks."""
        hooks, size = self.hooks, len(self._requests)
        self._iteration += 1
        batch = SimpleNamespace(
            forward_mode=_DECODE,
            is_extend_in_batch=False,
            forward_iter=self._iteration,
            reqs=self._requests,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

        def forward(_: Any, batch: Any) -> Any:
            result = SimpleNamespace(
                speculative_num_draft_tokens=self._gamma + 1,
                num_correct_drafts_per_req_cpu=[0] * size,
                next_token_ids=self._tokens,
                logits_output=SimpleNamespace(hidden_states=self._hidden),
            )
            if hooked:
                hooks.around_draft_extend(lambda *_: None, None, batch, result)
            return result

        tokens = [[0]] * size
        if hooked:
            result = hooks.around_forward(forward, None, batch)
            hooks.around_resolve(lambda *_: tokens, None, result, batch)
            hooks.after_process_result(None, None, batch, result)
        else:
            forward(None, batch)

    def next_report(self) -> StepReport:
        """Takes the oldest report that was sent."""
        return read_report(self._agent.recv(4096))
