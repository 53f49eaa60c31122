"""What goes wrong in the plugin does not go wrong in the engine."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.common.status import LostCapabilityReporter
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.sglang.drafters.sleeping_drafter import SleepCounters
from engine_shim.sglang.eager_passes import EagerPasses
from engine_shim.sglang.graph_states import GraphStates
from engine_shim.sglang.hooks import OWN_DRAFTER_INDEX, SECOND_DRAFTER_INDEX, EngineHooks
from engine_shim.sglang.learning.learning_steps import LearningSteps
from engine_shim.sglang.learning.online_updates import OnlineCounters
from engine_shim.sglang.learning.verified_step import (
    NO_UPDATE,
    PromptPass,
    UpdateStatus,
    Verification,
)
from speculation.v1.engine_pb2 import Capability, LostCapability


@dataclass
class Mode:
    """A forward mode."""

    name: str

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_idle(self) -> bool:
        return self.name == "idle"


class Sleep:
    """Records what it is asked, or fails at it."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.is_behind, self.must_wait_one_step = True, False
        self.counters = SleepCounters()
        self.calls: list[str] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call.startswith(self.failing or "nothing"):
            raise RuntimeError("out of memory")

    def before_step(self, batch: Any, *, asleep: bool, unknown_tokens: int) -> None:
        self._note(f"before {'asleep' if asleep else 'awake'}")

    def sleep_through(self, batch: Any, result: Any, width: int) -> None:
        self._note(f"through {width}")

    def forget_requests(self, requests: Any) -> None:
        self._note("forget")


class Online:
    """Records what it is asked, or fails at it."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.counters = OnlineCounters()
        self.calls: list[str] = []
        self.end_reason = ""
        self.verification: Verification | None = None
        self.has_learnt = False

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call.split(maxsplit=1)[0] == self.failing:
            raise RuntimeError("out of memory")

    def before_prefill(self, request_ids: list[str]) -> None:
        self._note("prefill")

    def before_step(self) -> None:
        self._note("step")

    def update_status(self) -> UpdateStatus:
        return UpdateStatus(updating=True, reset=False, seconds=0.5)

    def after_verify(self, verification: Verification, stride: int) -> None:
        self.verification = verification
        self._note(f"verified {stride}")

    def close(self, reason: str) -> None:
        self.failing = ""
        self.counters.state = self.end_reason = reason


def adopted(
    choice: StepChoice, stride: int = 1, collects: bool = False, version: int | None = None
) -> Any:
    """What all ranks have adopted."""
    return SimpleNamespace(
        receive_and_adopt=lambda: None,
        choose=lambda _: choice,
        update_stride=lambda: stride,
        collects_signals=lambda: collects,
        draft_version=lambda: version,
    )


def chosen(gamma: int, *, asleep: bool = False, drafter: int = 0) -> StepChoice:
    return StepChoice(drafter, gamma, asleep, 1, 0, Source.PLAN, 0)


def session(*, asleep: bool, failing: str = "", gamma: int = 0) -> Any:
    parts: dict[str, Any] = {
        "policy": SimpleNamespace(set_choice=lambda _: None),
        "plan_sync": adopted(chosen(gamma, asleep=asleep)),
        "sleeping_drafter": Sleep(failing),
    }
    return EngineHooks(
        lost_capabilities=LostCapabilityReporter(),
        graph_states=GraphStates(),
        eager=EagerPasses(),
        **parts,
    )


def learns(hooks: Any, learner: int = OWN_DRAFTER_INDEX, **parts: Any) -> None:
    """Gives these hooks a drafter that learns."""
    split = None if hooks.dual_drafter is None else hooks.dual_drafter.split
    hooks.learning = LearningSteps(
        plan_sync=hooks.plan_sync,
        lost_capabilities=hooks.lost_capabilities,
        learner_index=learner,
        split_features=split,
        **parts,
    )


def batch(mode: str = "decode") -> Any:
    return SimpleNamespace(
        forward_mode=Mode(mode),
        is_extend_in_batch=mode == "extend",
        forward_iter=1,
        reqs=[],
        seq_lens=SimpleNamespace(shape=(1,)),
        seq_lens_sum=10,
    )


class Link:
    """Keeps what it is to tell the sidecar."""

    def __init__(self, hooks: Any) -> None:
        self.reported_losses: list[tuple[str, str]] = []
        hooks.lost_capabilities = LostCapabilityReporter(self)  # type: ignore[arg-type]
        if hooks.learning is not None:
            hooks.learning.lost_capabilities = hooks.lost_capabilities

    def report_lost_capability(self, lost_capability: LostCapability) -> None:
        self.reported_losses.append(
            (Capability.Name(lost_capability.capability), lost_capability.reason)
        )


def run_step(hooks: Any, mode: str = "decode") -> tuple[Any, bool]:
    """One forward with its draft-extend; gives the result and whether the drafter worked."""
    worked: list[bool] = []

    def forward(worker: Any, batch: Any, **_: Any) -> Any:
        result = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.zeros(4, 6)))
        if mode == "decode":
            hooks.around_draft_extend(lambda *_: worked.append(True), None, batch, result)
        return result

    return hooks.around_forward(forward, None, batch(mode)), bool(worked)


def test_a_step_that_sleeps_skips_the_draft_extend() -> None:
    hooks = session(asleep=True)
    result, worked = run_step(hooks)
    assert not worked
    assert result.speculation_launch.asleep
    assert hooks.sleeping_drafter.calls == ["before asleep", "through 1"]


@pytest.mark.parametrize(("asleep", "gamma"), [(False, 0), (False, 3), (True, 3)])
def test_a_step_that_drafts_or_stays_awake_does_not_sleep(asleep: bool, gamma: int) -> None:
    hooks = session(asleep=asleep, gamma=gamma)
    result, worked = run_step(hooks)
    assert worked
    assert not result.speculation_launch.asleep
    assert hooks.sleeping_drafter.calls == ["before awake"]


@pytest.mark.parametrize("failing", ["before", "through"])
def test_a_failure_to_sleep_keeps_the_drafter_awake_for_good(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = session(asleep=True, failing=failing)
    link = Link(hooks)
    with caplog.at_level(logging.ERROR):
        result, worked = run_step(hooks)
    assert worked
    assert not result.speculation_launch.asleep
    assert hooks.status()["sleep"] is None
    assert "stays awake" in caplog.text
    _, worked = run_step(hooks)
    assert worked
    assert link.reported_losses == [("CAPABILITY_SLEEP", "RuntimeError: out of memory")]


def test_a_prefill_is_no_step_but_wakes_its_requests() -> None:
    hooks = session(asleep=True)
    result, _ = run_step(hooks, "extend")
    assert hooks.sleeping_drafter.calls == ["forget"]
    assert not hasattr(result, "speculation_launch")


def test_a_drafter_learns_from_every_step_awake_or_asleep() -> None:
    hooks = session(asleep=False, gamma=3)
    hooks.plan_sync = adopted(chosen(3), stride=5)
    online = Online()
    learns(hooks, online=online)
    result, _ = run_step(hooks)
    assert online.calls == ["step", "verified 5"]
    assert result.speculation_launch.update_status == online.update_status() != NO_UPDATE
    run_step(hooks, "extend")
    assert online.calls[2:] == ["prefill"]
    hooks.plan_sync = adopted(chosen(0, asleep=True), stride=5)
    run_step(hooks)
    assert online.calls[3:] == ["step", "verified 5"]


@pytest.mark.parametrize("failing", ["prefill", "step", "verified"])
def test_a_failure_to_learn_ends_the_learning_and_nothing_else(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = session(asleep=False, gamma=3)
    learns(hooks, online=Online(failing))
    link = Link(hooks)
    run_step(hooks, "extend")
    _, worked = run_step(hooks)
    assert worked
    assert hooks.status()["online"]["state"] == "RuntimeError: out of memory"
    assert "an online update of the drafter failed" in caplog.text
    _, worked = run_step(hooks)
    assert worked
    assert link.reported_losses == [("CAPABILITY_UPDATE_ONLINE", "RuntimeError: out of memory")]


class Dual:
    """Two drafters, of which each reads half of the columns."""

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden[:, :3], hidden[:, 3:] + 1

    def follow(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("learner", [OWN_DRAFTER_INDEX, SECOND_DRAFTER_INDEX])
@pytest.mark.parametrize(
    ("drafter", "gamma"),
    [(OWN_DRAFTER_INDEX, 3), (SECOND_DRAFTER_INDEX, 3), (OWN_DRAFTER_INDEX, 0)],
)
def test_the_learner_sees_its_columns_and_whose_drafts_they_were(
    learner: int, drafter: int, gamma: int
) -> None:
    hooks = session(asleep=False, gamma=gamma)
    hooks.sleeping_drafter, hooks.dual_drafter = None, Dual()
    hooks.plan_sync = adopted(chosen(gamma, drafter=drafter))
    online = Online()
    learns(hooks, learner, online=online)
    run_step(hooks)
    verification = online.verification
    assert verification is not None
    assert torch.equal(verification.features, torch.full((4, 3), float(learner)))
    assert verification.by_learner == (drafter == learner or gamma == 0)


@pytest.mark.parametrize("learner", [OWN_DRAFTER_INDEX, SECOND_DRAFTER_INDEX])
def test_of_a_prompt_the_learners_columns_are_collected(learner: int) -> None:
    prompt_passes: list[PromptPass] = []
    hooks = session(asleep=False)
    hooks.sleeping_drafter, hooks.dual_drafter = None, Dual()
    hooks.plan_sync = adopted(chosen(3), 0, True)
    collector = SimpleNamespace(end_reason="", after_prefill=prompt_passes.append)
    learns(hooks, learner, collector=collector)
    prompts = SimpleNamespace(
        **vars(batch("extend")), input_ids=torch.arange(4), extend_lens=[4], prefix_lens=[0],
        chunked_req=None,
    )  # fmt: skip
    prompts.reqs = [SimpleNamespace(rid="one", multimodal_inputs=None)]

    def forward(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.zeros(4, 6)))

    hooks.around_forward(forward, None, prompts)
    (seen,) = prompt_passes
    assert torch.equal(seen.features, torch.full((4, 3), float(learner)))


@pytest.mark.parametrize(
    ("learner", "ends"), [(OWN_DRAFTER_INDEX, False), (SECOND_DRAFTER_INDEX, True)]
)
def test_what_learns_ends_with_its_drafter(learner: int, ends: bool) -> None:
    hooks = session(asleep=False, gamma=3)
    hooks.sleeping_drafter, hooks.dual_drafter = None, Dual()
    hooks.dflash_drafter = SimpleNamespace(failure_reason="out of memory")
    learns(hooks, learner, online=Online())
    link = Link(hooks)
    for _ in range(2):
        run_step(hooks)
    learning = [("CAPABILITY_UPDATE_ONLINE", "out of memory")] if ends else []
    assert link.reported_losses == [("CAPABILITY_DRAFTER", "out of memory"), *learning]


def test_a_trainer_that_ends_by_itself_is_reported() -> None:
    hooks = session(asleep=False, gamma=3)
    online = Online()
    learns(hooks, online=online)
    link = Link(hooks)
    run_step(hooks)
    assert link.reported_losses == []
    online.end_reason = "the trainer has ended with status -9"
    run_step(hooks)
    run_step(hooks)
    assert link.reported_losses == [
        ("CAPABILITY_UPDATE_ONLINE", "the trainer has ended with status -9")
    ]
    (status,) = hooks.status()["lost"]
    assert (status["capability"], status["reason"]) == link.reported_losses[0]


def test_an_idle_forward_passes_through() -> None:
    hooks = session(asleep=True)
    run_step(hooks, "idle")
    assert hooks.sleeping_drafter.calls == []


def test_a_failure_to_report_stops_reports_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("unforeseen error")

    hooks = session(asleep=False, gamma=3)
    hooks.reporter = SimpleNamespace(report_step=fail)
    link = Link(hooks)
    result, _ = run_step(hooks)
    assert hooks.status()["reporting"]
    with caplog.at_level(logging.ERROR):
        tokens = hooks.around_resolve(lambda *_: [[1, 2]], None, result, batch())
        hooks.after_process_result(None, None, batch(), result)
    assert tokens == [[1, 2]]
    assert not hooks.status()["reporting"]
    assert "no longer reported" in caplog.text
    assert link.reported_losses == [("CAPABILITY_REPORT", "ValueError: unforeseen error")]
    assert hooks.around_resolve(lambda *_: [[3]], None, result, batch()) == [[3]]


def test_a_dflash_drafter_that_has_failed_is_reported_once() -> None:
    hooks = session(asleep=False, gamma=3)
    hooks.dflash_drafter = SimpleNamespace(failure_reason="")
    link = Link(hooks)
    run_step(hooks)
    assert link.reported_losses == []
    hooks.dflash_drafter.failure_reason = "MemoryError: no room"
    for mode in ("extend", "decode"):
        run_step(hooks, mode)
    assert link.reported_losses == [("CAPABILITY_DRAFTER", "MemoryError: no room")]


def test_results_of_other_forwards_are_not_reported() -> None:
    hooks = session(asleep=False)
    hooks.reporter = SimpleNamespace(report_step=pytest.fail)
    assert hooks.around_resolve(lambda *_: [[1]], None, SimpleNamespace(), batch()) == [[1]]


def test_context_lengths_that_only_the_requests_know_are_those_before_the_step() -> None:
    hooks = session(asleep=False, gamma=3)
    seen: list[int] = []
    hooks.reporter = SimpleNamespace(report_step=lambda launch, *_: seen.append(launch.kv_tokens))
    result, _ = run_step(hooks)
    result.speculation_launch.kv_tokens = None
    request = SimpleNamespace(
        kv=SimpleNamespace(kv_committed_len=8), finished_reason=None, is_retracted=False
    )
    decoding = SimpleNamespace(reqs=[request])
    hooks.around_resolve(lambda *_: [[1]], None, result, decoding)
    hooks.after_process_result(None, None, decoding, result)
    assert seen == [7]


class Signals:
    """Records whether it is to collect, or fails at it."""

    def __init__(self, *, failing: bool = False) -> None:
        self.failing = failing
        self.collecting: list[bool] = []
        self.verifications: list[Verification] = []
        self.state = "ready"
        self.end_reason = ""

    def after_verify(self, verification: Verification, *, collecting: bool) -> None:
        self.collecting.append(collecting)
        self.verifications.append(verification)
        if self.failing:
            raise RuntimeError("out of memory")

    def status(self) -> dict[str, Any]:
        return {"state": self.state}

    def stop(self, reason: str) -> None:
        self.failing, self.state, self.end_reason = False, reason, reason


@pytest.mark.parametrize("asleep", [True, False])
def test_what_every_step_has_verified_is_offered_for_collection(asleep: bool) -> None:
    hooks = session(asleep=asleep, gamma=0)
    collector = Signals()
    for collects in (True, False):
        hooks.plan_sync = adopted(chosen(0, asleep=asleep), 0, collects)
        learns(hooks, collector=collector)
        run_step(hooks)
    assert collector.collecting == [True, False]


def test_a_failure_to_collect_ends_the_collecting_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hooks = session(asleep=False, gamma=3)
    hooks.plan_sync = adopted(chosen(3), 0, True)
    learns(hooks, collector=Signals(failing=True))
    link = Link(hooks)
    _, worked = run_step(hooks)
    assert worked
    assert hooks.status()["signals"] == {"state": "RuntimeError: out of memory"}
    assert "training signals are no longer collected" in caplog.text
    assert link.reported_losses == [("CAPABILITY_COLLECT", "RuntimeError: out of memory")]


def test_versions_that_cannot_be_served_any_more_are_reported() -> None:
    class Deployment:
        counters = SimpleNamespace(version=3, learnt_from=None)

        def before_step(self, wanted: int) -> bool:
            raise RuntimeError("out of memory")

        def stop(self, reason: str) -> None:
            assert reason == "RuntimeError: out of memory"

    hooks = session(asleep=False, gamma=3)
    hooks.plan_sync = adopted(chosen(3), version=4)
    learns(hooks, deployment=Deployment())
    link = Link(hooks)
    for _ in range(2):
        result, _ = run_step(hooks)
        assert result.speculation_launch.update_status.version == 3
    assert link.reported_losses == [("CAPABILITY_TAKE_VERSIONS", "RuntimeError: out of memory")]


class Second:
    """A second drafter that reads the last two columns, and may fail to draft."""

    def __init__(self, *, drafts: bool) -> None:
        self._drafts = drafts

    def draft(self, *_: Any) -> Any:
        return "a chain" if self._drafts else None

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden[:, :-2], hidden[:, -2:]

    def follow(self, _: Any, result: Any, __: Any) -> None:
        output = result.logits_output
        output.hidden_states, _ = self.split(output.hidden_states)


@pytest.mark.parametrize(
    ("drafter", "drafts", "by_learner"), [(0, True, True), (1, True, False), (1, False, True)]
)
def test_beside_a_second_drafter_the_own_one_learns(
    drafter: int, drafts: bool, by_learner: bool
) -> None:
    """From the columns it reads itself; and it receives whose drafts were verified."""
    hooks = session(asleep=False, gamma=3)
    hooks.dual_drafter, collector = Second(drafts=drafts), Signals()
    hooks.plan_sync = adopted(chosen(3, drafter=drafter), 0, True)
    learns(hooks, collector=collector)

    def forward(_: Any, forward_batch: Any, **__: Any) -> Any:
        output = SimpleNamespace(hidden_states=torch.arange(24.0).view(4, 6))
        result = SimpleNamespace(logits_output=output)
        hooks.around_draft(lambda *_: "the own chain", None, forward_batch)
        hooks.around_draft_extend(lambda *_: None, None, forward_batch, result)
        return result

    hooks.around_forward(forward, None, batch())
    (verification,) = collector.verifications
    assert verification.by_learner is by_learner
    assert torch.equal(verification.features, torch.arange(24.0).view(4, 6)[:, :4])
