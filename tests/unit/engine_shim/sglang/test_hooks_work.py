"""What the hooks do in a decode step of an engine that is left alone, counted."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import engine_shim
from engine_shim.sglang.api import hook_check, sglang_api
from tests.support.hooked_steps import HookedSteps
from tests.unit.engine_shim.link.in_process_agents import linked

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


@pytest.fixture(params=BATCHES)
def engine(request: pytest.FixtureRequest) -> Iterator[HookedSteps]:
    with linked() as (link, _, agent):
        yield HookedSteps(link, agent, request.param)


def operators_of(engine: HookedSteps) -> int:
    with Operators() as counted:
        engine.step()
    operator_count: int = counted.count
    return operator_count


def test_a_step_with_a_drafter_awake_has_no_operators_of_torch(engine: HookedSteps) -> None:
    engine.set_plan(3)
    for _ in range(3):
        assert operators_of(engine) == 0
    assert engine.next_report().gamma == 3


def test_a_step_asleep_has_as_many_operators_of_torch_as_it_keeps_tensors(
    engine: HookedSteps,
) -> None:
    engine.set_plan(0, asleep=True)
    for _ in range(3):
        # A slice and a copy of the tokens, and of the hidden states.
        assert operators_of(engine) == 4
    assert engine.hooks.sleeping_drafter is not None
    assert engine.hooks.sleeping_drafter.counters.slept == 3


def calls_of(engine: HookedSteps) -> Counter[str]:
    """Python's functions of the project that a step calls, by name."""
    call_counts: Counter[str] = Counter()

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDER):
            call_counts[frame.f_code.co_qualname] += 1

    sys.setprofile(see)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return call_counts


def test_a_plan_that_is_in_use_is_not_looked_up_again(engine: HookedSteps) -> None:
    engine.set_plan(3)
    first = calls_of(engine)
    assert {"PlanFollower.accept", "PlanFollower.choose", "ArmHistory.flag_change"} <= first.keys()
    call_counts = calls_of(engine)
    assert call_counts == {
        "EngineHooks.around_forward": 1,
        "RankPlanSync.receive_and_adopt": 1,
        "EngineLink.receive": 1,
        "PlanFollower.choice_source": 1,
        "RankPlanSync.choose": 1,
        "kv_tokens_at_launch": 1,
        "LaunchedStep.__init__": 1,
        "EngineHooks.around_draft_extend": 1,
        "EngineHooks.around_resolve": 1,
        "kv_tokens_before": 1,
        "kv_tokens_before.<locals>.<listcomp>": 1,
        "discarded_rows": 1,
        "discarded_rows.<locals>.<listcomp>": 1,
        "EngineHooks.after_process_result": 1,
        "delivered_token_counts": 1,
        "StepReporter.report_step": 1,
        "EngineLink.report": 1,
        "StepReporter.report_step.<locals>.<lambda>": 1,
        "StepReporter._fill": 1,
        "StepReporter._measure_step": 1,
        "StepReporter._set_flags": 1,
    }


@pytest.mark.parametrize("several", [False, True])
def test_only_an_engine_of_several_ranks_adds_to_its_broadcasts(
    engine: HookedSteps, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked: list[str] = []
    for kind in ("around", "after"):
        monkeypatch.setattr(hook_check, kind, lambda target, _: hooked.append(target))
    engine.hooks.has_other_ranks = several
    engine.hooks.register()
    broadcasting = {sglang_api.POLL_TIMEOUT_ABORTS, sglang_api.INIT_REQUEST_DISPATCHER}
    assert broadcasting & set(hooked) == (broadcasting if several else set())
