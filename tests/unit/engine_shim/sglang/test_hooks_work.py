"""What the hooks do in a decode step of an engine that is left alone, counted."""

import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import engine_shim
from engine_shim.link import packets
from engine_shim.link.packets import PlanPacket, RowEntry
from engine_shim.link.ranks import Ranks
from engine_shim.sglang.api import hook_check, sglang_api
from engine_shim.sglang.api.losses import Losses
from engine_shim.sglang.drafters.idle_kv import IdleDrafter
from engine_shim.sglang.eager_passes import EagerPasses
from engine_shim.sglang.graph_states import GraphStates
from engine_shim.sglang.hooks import EngineHooks
from engine_shim.sglang.step_reports import StepTap
from tests.unit.engine_shim.link.in_process_agents import linked
from tests.unit.engine_shim.sglang.test_hooks import Mode

BATCHES = (1, 64)
_FOLDER = str(Path(engine_shim.__file__).parent)


class Operators(TorchDispatchMode):
    """Counts what torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, _: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.count += 1
        return operator(*arguments, **(named or {}))


class Engine:
    """The hooks of an engine of one rank around steps that compute nothing."""

    def __init__(self, link: Any, agent: socket.socket, size: int) -> None:
        worker = SimpleNamespace(_stub_skipped_draft_extend=lambda *_: None)
        self.hooks = EngineHooks(
            policy=SimpleNamespace(run=lambda _: None),  # type: ignore[arg-type]
            ranks=Ranks(link.steering, link),
            losses=Losses(),
            graph_states=GraphStates(),
            eager=EagerPasses(),
            link=link,
            tap=StepTap(link),
            sleep=IdleDrafter(worker, 100),
        )
        self._agent = agent
        self._iteration = 0
        self._requests = [
            SimpleNamespace(
                rid=str(place),
                kv=SimpleNamespace(kv_committed_len=9),
                finished_reason=None,
                is_retracted=False,
            )
            for place in range(size)
        ]

    def take(self, gamma: int, *, asleep: bool = False) -> None:
        """Sends a plan."""
        row = RowEntry(64, 0, gamma, asleep, None)
        plan = PlanPacket(1, 1, time.monotonic_ns(), 600_000, 1, 0, (row,))
        self._agent.send(packets.encode_plan(plan))

    def step(self) -> bytes:
        """Runs a step in which each sequence gets one token; gives its report's packet."""
        size = len(self._requests)
        self._iteration += 1
        batch = SimpleNamespace(
            forward_mode=Mode("decode"),
            is_extend_in_batch=False,
            forward_iter=self._iteration,
            reqs=self._requests,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

        def forward(_: Any, batch: Any) -> Any:
            chosen = self.hooks._launching
            assert chosen is not None
            result = SimpleNamespace(
                speculative_num_draft_tokens=chosen.choice.gamma + 1,
                num_correct_drafts_per_req_cpu=[0] * size,
                next_token_ids=tokens,
                logits_output=SimpleNamespace(hidden_states=hidden),
            )
            self.hooks.around_draft_extend(lambda *_: None, None, batch, result)
            return result

        tokens, hidden = torch.zeros(size, dtype=torch.int64), torch.zeros(size, 4)
        result = self.hooks.around_forward(forward, None, batch)
        self.hooks.around_resolve(lambda *_: [[0]] * size, None, result, batch)
        return self._agent.recv(4096)


@pytest.fixture(params=BATCHES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with linked() as (link, _, agent):
        yield Engine(link, agent, request.param)


def operators_of(engine: Engine) -> int:
    with Operators() as counted:
        engine.step()
    made: int = counted.count
    return made - 2  # its own zeros


def test_a_step_with_a_drafter_awake_has_no_operators_of_torch(engine: Engine) -> None:
    engine.take(3)
    for _ in range(3):
        assert operators_of(engine) == 0
    assert packets.decode_report(engine.step()).gamma == 3


def test_a_step_asleep_has_as_many_operators_of_torch_as_it_keeps_tensors(engine: Engine) -> None:
    engine.take(0, asleep=True)
    for _ in range(3):
        # A slice and a copy of the tokens, and of the hidden states.
        assert operators_of(engine) == 4
    assert engine.hooks.sleep is not None
    assert engine.hooks.sleep.counters.slept == 3


def calls_of(engine: Engine) -> Counter[str]:
    """Python's functions of the project that a step calls, by name."""
    found: Counter[str] = Counter()

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDER):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(see)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return found


def test_a_plan_that_is_in_use_is_not_looked_up_again(engine: Engine) -> None:
    engine.take(3)
    first = calls_of(engine)
    assert {"PlanFollower.accept", "PlanFollower.choose", "StepTap._changed"} <= first.keys()
    found = calls_of(engine)
    assert found == {
        "EngineHooks.around_forward": 1,
        "Ranks.take_in": 1,
        "EngineLink.receive": 1,
        "PlanFollower.source_at": 1,
        "Ranks.choose": 1,
        "kv_tokens_at_launch": 1,
        "Launch.__init__": 1,
        "EngineHooks.around_draft_extend": 1,
        "EngineHooks.around_resolve": 1,
        "kv_tokens_before": 1,
        "kv_tokens_before.<locals>.<listcomp>": 1,
        "StepTap.settle": 1,
        "EngineLink.report": 1,
        "encode_report": 1,
    }


@pytest.mark.parametrize("several", [False, True])
def test_only_an_engine_of_several_ranks_adds_to_its_broadcasts(
    engine: Engine, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[str] = []
    monkeypatch.setattr(hook_check, "register", lambda target, *_: hooked.append(target))
    engine.hooks.several = several
    engine.hooks.register()
    broadcasting = {sglang_api.OWN_REQUESTS, sglang_api.REQUEST_KINDS}
    assert broadcasting & set(hooked) == (broadcasting if several else set())
