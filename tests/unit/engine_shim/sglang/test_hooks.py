"""What goes wrong in the plugin does not go wrong in the engine."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.common.status import Losses
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.sglang.drafters.idle_kv import IdleCounters
from engine_shim.sglang.eager_passes import EagerPasses
from engine_shim.sglang.graph_states import GraphStates
from engine_shim.sglang.hooks import OWN, SECOND, EngineHooks
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
        self.is_behind, self.must_wait = True, False
        self.counters = IdleCounters()
        self.calls: list[str] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call.startswith(self.failing or "nothing"):
            raise RuntimeError("out of memory")

    def before_step(self, batch: Any, *, asleep: bool, unread_tokens: int) -> None:
        self._note(f"before {'asleep' if asleep else 'awake'}")

    def sleep_through(self, batch: Any, result: Any, width: int) -> None:
        self._note(f"through {width}")

    def forget(self, requests: Any) -> None:
        self._note("forget")


class Online:
    """Records what it is asked, or fails at it."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.counters = OnlineCounters()
        self.calls: list[str] = []
        self.over = ""
        self.found: Verification | None = None
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

    def after_verify(self, found: Verification, stride: int) -> None:
        self.found = found
        self._note(f"verified {stride}")

    def close(self, why: str) -> None:
        self.failing = ""
        self.counters.state = self.over = why


def adopted(
    choice: StepChoice, stride: int = 1, collects: bool = False, version: int | None = None
) -> Any:
    """What all ranks have adopted."""
    return SimpleNamespace(
        take_in=lambda: None,
        choose=lambda _: choice,
        stride=lambda: stride,
        collects=lambda: collects,
        draft_version=lambda: version,
    )


def chosen(gamma: int, *, asleep: bool = False, drafter: int = 0) -> StepChoice:
    return StepChoice(drafter, gamma, asleep, 1, 0, Source.PLAN, 0)


def session(*, asleep: bool, failing: str = "", gamma: int = 0) -> Any:
    parts: dict[str, Any] = {
        "policy": SimpleNamespace(run=lambda _: None),
        "ranks": adopted(chosen(gamma, asleep=asleep)),
        "sleep": Sleep(failing),
    }
    return EngineHooks(losses=Losses(), graph_states=GraphStates(), eager=EagerPasses(), **parts)


def learns(made: Any, learner: int = OWN, **parts: Any) -> None:
    """Gives these hooks a drafter that learns."""
    split = None if made.dual is None else made.dual.split
    made.learning = LearningSteps(
        ranks=made.ranks, losses=made.losses, learner=learner, split=split, **parts
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

    def __init__(self, made: Any) -> None:
        self.told: list[tuple[str, str]] = []
        made.losses = Losses(self)  # type: ignore[arg-type]
        if made.learning is not None:
            made.learning.losses = made.losses

    def lose(self, loss: LostCapability) -> None:
        self.told.append((Capability.Name(loss.capability), loss.reason))


def run_step(made: Any, mode: str = "decode") -> tuple[Any, bool]:
    """One forward with its draft-extend; gives the result and whether the drafter worked."""
    worked: list[bool] = []

    def forward(worker: Any, batch: Any, **_: Any) -> Any:
        result = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.zeros(4, 6)))
        if mode == "decode":
            made.around_draft_extend(lambda *_: worked.append(True), None, batch, result)
        return result

    return made.around_forward(forward, None, batch(mode)), bool(worked)


def test_a_step_that_sleeps_skips_the_draft_extend() -> None:
    made = session(asleep=True)
    result, worked = run_step(made)
    assert not worked
    assert result.speculation_launch.asleep
    assert made.sleep.calls == ["before asleep", "through 1"]


@pytest.mark.parametrize(("asleep", "gamma"), [(False, 0), (False, 3), (True, 3)])
def test_a_step_that_drafts_or_stays_awake_does_not_sleep(asleep: bool, gamma: int) -> None:
    made = session(asleep=asleep, gamma=gamma)
    result, worked = run_step(made)
    assert worked
    assert not result.speculation_launch.asleep
    assert made.sleep.calls == ["before awake"]


@pytest.mark.parametrize("failing", ["before", "through"])
def test_a_failure_to_sleep_keeps_the_drafter_awake_for_good(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = session(asleep=True, failing=failing)
    link = Link(made)
    with caplog.at_level(logging.ERROR):
        result, worked = run_step(made)
    assert worked
    assert not result.speculation_launch.asleep
    assert made.status()["sleep"] is None
    assert "stays awake" in caplog.text
    _, worked = run_step(made)
    assert worked
    assert link.told == [("CAPABILITY_SLEEP", "RuntimeError: out of memory")]


def test_a_prefill_is_no_step_but_wakes_its_requests() -> None:
    made = session(asleep=True)
    result, _ = run_step(made, "extend")
    assert made.sleep.calls == ["forget"]
    assert not hasattr(result, "speculation_launch")


def test_a_drafter_learns_from_every_step_awake_or_asleep() -> None:
    made = session(asleep=False, gamma=3)
    made.ranks = adopted(chosen(3), stride=5)
    online = Online()
    learns(made, online=online)
    result, _ = run_step(made)
    assert online.calls == ["step", "verified 5"]
    assert result.speculation_launch.update_status == online.update_status() != NO_UPDATE
    run_step(made, "extend")
    assert online.calls[2:] == ["prefill"]
    made.ranks = adopted(chosen(0, asleep=True), stride=5)
    run_step(made)
    assert online.calls[3:] == ["step", "verified 5"]


@pytest.mark.parametrize("failing", ["prefill", "step", "verified"])
def test_a_failure_to_learn_ends_the_learning_and_nothing_else(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = session(asleep=False, gamma=3)
    learns(made, online=Online(failing))
    link = Link(made)
    run_step(made, "extend")
    _, worked = run_step(made)
    assert worked
    assert made.status()["online"]["state"] == "RuntimeError: out of memory"
    assert "an online update of the drafter failed" in caplog.text
    _, worked = run_step(made)
    assert worked
    assert link.told == [("CAPABILITY_UPDATE_ONLINE", "RuntimeError: out of memory")]


class Dual:
    """Two drafters, of which each reads half of the columns."""

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden[:, :3], hidden[:, 3:] + 1

    def follow(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("learner", [OWN, SECOND])
@pytest.mark.parametrize(("drafter", "gamma"), [(OWN, 3), (SECOND, 3), (OWN, 0)])
def test_the_learner_sees_its_columns_and_whose_drafts_they_were(
    learner: int, drafter: int, gamma: int
) -> None:
    made = session(asleep=False, gamma=gamma)
    made.sleep, made.dual = None, Dual()
    made.ranks = adopted(chosen(gamma, drafter=drafter))
    online = Online()
    learns(made, learner, online=online)
    run_step(made)
    found = online.found
    assert found is not None
    assert torch.equal(found.features, torch.full((4, 3), float(learner)))
    assert found.by_learner == (drafter == learner or gamma == 0)


@pytest.mark.parametrize("learner", [OWN, SECOND])
def test_of_a_prompt_the_learners_columns_are_collected(learner: int) -> None:
    found: list[PromptPass] = []
    made = session(asleep=False)
    made.sleep, made.dual = None, Dual()
    made.ranks = adopted(chosen(3), 0, True)
    collector = SimpleNamespace(over="", after_prefill=found.append)
    learns(made, learner, collector=collector)
    prompts = SimpleNamespace(
        **vars(batch("extend")), input_ids=torch.arange(4), extend_lens=[4], prefix_lens=[0],
        chunked_req=None,
    )  # fmt: skip
    prompts.reqs = [SimpleNamespace(rid="one", multimodal_inputs=None)]

    def forward(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.zeros(4, 6)))

    made.around_forward(forward, None, prompts)
    (seen,) = found
    assert torch.equal(seen.features, torch.full((4, 3), float(learner)))


@pytest.mark.parametrize(("learner", "ends"), [(OWN, False), (SECOND, True)])
def test_what_learns_ends_with_its_drafter(learner: int, ends: bool) -> None:
    made = session(asleep=False, gamma=3)
    made.sleep, made.dual = None, Dual()
    made.block = SimpleNamespace(over="out of memory")
    learns(made, learner, online=Online())
    link = Link(made)
    for _ in range(2):
        run_step(made)
    learning = [("CAPABILITY_UPDATE_ONLINE", "out of memory")] if ends else []
    assert link.told == [("CAPABILITY_DRAFTER", "out of memory"), *learning]


def test_a_trainer_that_ends_by_itself_is_reported() -> None:
    made = session(asleep=False, gamma=3)
    online = Online()
    learns(made, online=online)
    link = Link(made)
    run_step(made)
    assert link.told == []
    online.over = "the trainer has ended with status -9"
    run_step(made)
    run_step(made)
    assert link.told == [("CAPABILITY_UPDATE_ONLINE", "the trainer has ended with status -9")]
    (status,) = made.status()["lost"]
    assert (status["capability"], status["reason"]) == link.told[0]


def test_an_idle_forward_passes_through() -> None:
    made = session(asleep=True)
    run_step(made, "idle")
    assert made.sleep.calls == []


def test_a_failure_to_report_stops_reports_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("nobody thought of this")

    made = session(asleep=False, gamma=3)
    made.tap = SimpleNamespace(settle=fail)
    link = Link(made)
    result, _ = run_step(made)
    assert made.status()["reporting"]
    with caplog.at_level(logging.ERROR):
        tokens = made.around_resolve(lambda *_: [[1, 2]], None, result, batch())
        made.after_working_in(None, None, batch(), result)
    assert tokens == [[1, 2]]
    assert not made.status()["reporting"]
    assert "no longer reported" in caplog.text
    assert link.told == [("CAPABILITY_REPORT", "ValueError: nobody thought of this")]
    assert made.around_resolve(lambda *_: [[3]], None, result, batch()) == [[3]]


def test_a_dflash_drafter_that_has_failed_is_reported_once() -> None:
    made = session(asleep=False, gamma=3)
    made.block = SimpleNamespace(over="")
    link = Link(made)
    run_step(made)
    assert link.told == []
    made.block.over = "MemoryError: no room"
    for mode in ("extend", "decode"):
        run_step(made, mode)
    assert link.told == [("CAPABILITY_DRAFTER", "MemoryError: no room")]


def test_results_of_other_forwards_are_not_reported() -> None:
    made = session(asleep=False)
    made.tap = SimpleNamespace(settle=pytest.fail)
    assert made.around_resolve(lambda *_: [[1]], None, SimpleNamespace(), batch()) == [[1]]


def test_context_lengths_that_only_the_requests_know_are_those_before_the_step() -> None:
    made = session(asleep=False, gamma=3)
    seen: list[int] = []
    made.tap = SimpleNamespace(settle=lambda launch, *_: seen.append(launch.kv_tokens))
    result, _ = run_step(made)
    result.speculation_launch.kv_tokens = None
    request = SimpleNamespace(
        kv=SimpleNamespace(kv_committed_len=8), finished_reason=None, is_retracted=False
    )
    decoding = SimpleNamespace(reqs=[request])
    made.around_resolve(lambda *_: [[1]], None, result, decoding)
    made.after_working_in(None, None, decoding, result)
    assert seen == [7]


class Signals:
    """Records whether it is to collect, or fails at it."""

    def __init__(self, *, failing: bool = False) -> None:
        self.failing = failing
        self.collecting: list[bool] = []
        self.found: list[Verification] = []
        self.why = "ready"
        self.over = ""

    def after_verify(self, found: Verification, *, collecting: bool) -> None:
        self.collecting.append(collecting)
        self.found.append(found)
        if self.failing:
            raise RuntimeError("out of memory")

    def status(self) -> dict[str, Any]:
        return {"state": self.why}

    def give_up(self, why: str) -> None:
        self.failing, self.why, self.over = False, why, why


@pytest.mark.parametrize("asleep", [True, False])
def test_what_every_step_has_verified_is_offered_for_collection(asleep: bool) -> None:
    made = session(asleep=asleep, gamma=0)
    collector = Signals()
    for collects in (True, False):
        made.ranks = adopted(chosen(0, asleep=asleep), 0, collects)
        learns(made, collector=collector)
        run_step(made)
    assert collector.collecting == [True, False]


def test_a_failure_to_collect_ends_the_collecting_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = session(asleep=False, gamma=3)
    made.ranks = adopted(chosen(3), 0, True)
    learns(made, collector=Signals(failing=True))
    link = Link(made)
    _, worked = run_step(made)
    assert worked
    assert made.status()["signals"] == {"state": "RuntimeError: out of memory"}
    assert "training signals are no longer collected" in caplog.text
    assert link.told == [("CAPABILITY_COLLECT", "RuntimeError: out of memory")]


def test_versions_that_cannot_be_served_any_more_are_reported() -> None:
    class Deployment:
        counters = SimpleNamespace(version=3, learnt_from=None)

        def before_step(self, wanted: int) -> bool:
            raise RuntimeError("out of memory")

        def stop(self, why: str) -> None:
            assert why == "RuntimeError: out of memory"

    made = session(asleep=False, gamma=3)
    made.ranks = adopted(chosen(3), version=4)
    learns(made, deployment=Deployment())
    link = Link(made)
    for _ in range(2):
        result, _ = run_step(made)
        assert result.speculation_launch.update_status.version == 3
    assert link.told == [("CAPABILITY_TAKE_VERSIONS", "RuntimeError: out of memory")]


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
    """From the columns it reads itself; and it is told whose drafts were verified."""
    made = session(asleep=False, gamma=3)
    made.dual, collector = Second(drafts=drafts), Signals()
    made.ranks = adopted(chosen(3, drafter=drafter), 0, True)
    learns(made, collector=collector)

    def forward(_: Any, found: Any, **__: Any) -> Any:
        output = SimpleNamespace(hidden_states=torch.arange(24.0).view(4, 6))
        result = SimpleNamespace(logits_output=output)
        made.around_draft(lambda *_: "the own chain", None, found)
        made.around_draft_extend(lambda *_: None, None, found, result)
        return result

    made.around_forward(forward, None, batch())
    (found,) = collector.found
    assert found.by_learner is by_learner
    assert torch.equal(found.features, torch.arange(24.0).view(4, 6)[:, :4])
