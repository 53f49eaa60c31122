"""Deciding again: the same bit for bit from every kind of input, and what would be otherwise."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from controller.core.acceptance.warm_start import Belief
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Arm, Capability, Fingerprint, LostCapability
from controller.core.planning.overrides import Rule
from controller.core.settings import POLICIES
from controller.core.training.selective_training import TrainingResult
from controller.recording import recorder as recorder_module
from controller.recording import segments as ring_module
from controller.recording.counterfactual import Counterfactual, CounterfactualChange
from controller.recording.incident_report import render_ticket
from controller.recording.recorded_controller import Event, EventLog
from controller.recording.recording import RecordingPart, find
from controller.recording.replay import replay
from controller.recording.segments import MAGIC, RecordingError, blocks, frame
from controller.recording.window import Window
from controller.wire.reports import report_from_proto
from speculation.v1 import engine_pb2, record_pb2
from tests.support.recorded_events import (
    EventfulEngine,
    engine,
    full_spec,
    override,
    record,
    recorder,
    segments,
    written,
)

DRAFTER = Capability.DRAFTER
LOST = LostCapability(DRAFTER, "dflash", reason="MemoryError: no room", lost_at=1.5e9)


def profile(error: float = 1.0) -> Profile:
    spec = full_spec()
    cells = tuple(
        ProfileCell(d.name, g, b, (0.01 + 0.001 * g * (error if g else 1)) * (1 + b / 50), 0.0, 9)
        for d in spec.drafters
        for g in d.gammas
        for b in (1, 8, 32)
    )
    return Profile(
        spec.fingerprint, tuple(DrafterIdentity(d.name) for d in spec.drafters), 512.0, 0.0, cells
    )


def everything(running: EventfulEngine) -> None:
    """Whatever a sidecar does to a core, between steps."""
    core = running.core
    training = core.updates.training
    assert training is not None
    running.run(60)
    core.set_overrides([override("pin", Rule(gamma=2)), override("w", Rule(deny_updates=True))])
    running.run(20, batch_size=20)
    core.set_overrides([override("slow", Rule(tpot_max_seconds=0.1 / 7))])
    running.run(20, batch_size=20)
    core.set_overrides([])
    core.begin_from([Belief("dflash", "chat <b>", (0.9,), (30.0,))], "elsewhere")
    running.run(20)
    core.force(Arm("dflash", 2))
    running.run(10)
    core.force(None)
    core.use_profile(profile())
    core.use_settings(
        replace(core._settings, switch_margin=0.2), replace(training.settings, margin=0.02)
    )
    running.run(20)
    training.attended = True
    assert training.keep(10) == 1
    running.run(30, acceptance=0.2)
    training.trained(TrainingResult(1, 1, 0.3, 0.5, 0.4))
    running.run(30)
    training.attended = False
    running.clock.advance(3.0)
    assert core.next_plan() is not None
    core.decide(4)
    core.note(record_pb2.RECORD_NOTE_KIND_DROPPED, 7)
    assert core.lose([replace(LOST, gammas=(5,))])
    running.run(1)
    assert core.lose([LOST, *(LostCapability(kind) for kind in Capability if kind is not DRAFTER)])
    running.run(9)
    assert core.last_plan(30.0).lease_seconds == 30
    core.note(record_pb2.RECORD_NOTE_KIND_ENDED, text="it left")


@pytest.mark.parametrize("policy", POLICIES)
def test_all_that_happens_to_a_core_is_decided_the_same_again(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
):
    puts = count(1)

    class Impatient(EventLog):
        """Asks for an opening wherever it may come."""

        def put(self, event: Event) -> None:
            super().put(event)
            self.due = next(puts) % 5 == 0

    monkeypatch.setattr(recorder_module, "EventLog", Impatient)
    with recorder(tmp_path) as made:
        running = engine(made, policy=policy)
        everything(running)
        again = engine(made, policy=policy, seed=1)
        again.run(100)
    verdict = replay(find(tmp_path))
    assert verdict.first is None
    assert (verdict.is_same, verdict.gaps, verdict.strange) == (True, [], [])
    assert verdict.sessions == 2
    assert verdict.states == verdict.segments - 2 > 50
    assert verdict.reports == running.step + again.step
    # Every plan that came out was compared; the first one of a session is in its opening.
    assert verdict.plans == sum(one.core.current_plan().epoch - 1 for one in (running, again))


def rewritten(path: Path, change) -> None:
    """The segment with its records changed, its checksums right."""
    records = (record for _, block in blocks(path.read_bytes()) for record in block.records)
    kept = [record for number, record in enumerate(records) if change(number, record) != "gone"]
    path.write_bytes(MAGIC + frame(kept))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record(tmp_path)
    [path] = segments(tmp_path)
    return path


def number_of(path: Path, kind: str, at_least: int) -> int:
    """Of the first moment of this kind (a plan, where it decides) from there on."""
    for number, moment in enumerate(RecordingPart(path).moments(), 1):
        plain = not moment.is_decision or moment.plan is not None
        if number >= at_least and moment.kind == kind and plain:
            return number
    raise AssertionError(kind)


def test_a_lost_drafter_stays_lost_where_the_recording_begins_later(tmp_path: Path):
    with recorder(tmp_path) as made:
        running = engine(made)
        running.run(60)
        assert running.core.lose([LOST])
        running.run(60)
        running.core._event_log.due = True
        running.run(200)
    first, *later = segments(tmp_path)
    assert later
    first.unlink()
    verdict = replay(find(tmp_path))
    assert verdict.is_same
    assert verdict.reports > 150
    opening = RecordingPart(later[0]).opening
    assert opening.spec.lost == (LOST,)


def test_a_plan_that_was_not_decided_is_found_and_shown(recorded: Path):
    number = number_of(recorded, "decision", 50)

    def forge(at: int, record: record_pb2.Record) -> None:
        if at == number:
            record.decision.plan.rows[0].gamma = 4

    rewritten(recorded, forge)
    verdict = replay(find(recorded))
    assert verdict.differences == 1
    assert verdict.first is not None
    assert (verdict.first.path, verdict.first.record) == (recorded, number)
    assert "B <= 1: recorded" in verdict.first.text
    assert "gamma: 4" in verdict.first.text


def of_object(value: record_pb2.StateObject, name: str) -> record_pb2.StateValue:
    """A variable of a recorded object."""
    return value.values[list(value.names).index(name)]


def test_a_plan_that_no_message_can_hold_cannot_be_decided_again(tmp_path: Path):
    with recorder(tmp_path) as made:
        engine(made).core.last_plan(30.0)
    [path] = segments(tmp_path)

    def forge(at: int, record: record_pb2.Record) -> None:
        if not at:
            plan = of_object(record.opening.state, "plan").object
            for row in of_object(plan, "rows").tuple.values:
                of_object(of_object(row.object, "arm").object, "drafter").integer = 3

    rewritten(path, forge)
    [(_, why)] = replay(find(path)).gaps
    assert why.startswith("record 1 cannot be replayed: TypeError")


def test_a_report_that_cannot_be_of_its_engine_is_not_shown_in_part(recorded: Path):
    number = number_of(recorded, "report", 50)

    def forge(at: int, record: record_pb2.Record) -> None:
        if at == number:
            record.report.drafter = "another"

    rewritten(recorded, forge)
    window = Window()
    verdict = replay(find(recorded), [window])
    assert "cannot be replayed" in verdict.gaps[0][1]
    assert "another" not in {arm.drafter for arm in window.arms}
    assert render_ticket(window, verdict)


def test_a_plan_where_none_came_is_a_difference(recorded: Path):
    number = number_of(recorded, "decision", 50)

    def forge(at: int, record: record_pb2.Record) -> None:
        if at == number:
            record.decision.ClearField("plan")

    rewritten(recorded, forge)
    first = replay(find(recorded)).first
    assert first is not None
    assert "recorded no new plan, now plan" in first.text


@pytest.mark.parametrize("what", ["report", "left out"])
def test_another_input_does_not_pass_for_the_recorded_one(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
):
    """The last bit of one step's seconds is enough to be found at the next opening."""
    monkeypatch.setattr(ring_module, "SEGMENT_BYTES_MIN", 5_000)
    with recorder(tmp_path, 160_000) as made:
        running = engine(made)
        for _ in range(4):
            running.run(60)
            written(made)
    path = segments(tmp_path)[0]
    number = number_of(path, "report", 30)

    def forge(at: int, record: record_pb2.Record) -> str:
        if at == number and what == "left out":
            return "gone"
        if at == number:
            record.report.step_seconds *= 1 + 2**-50
        return "there"

    rewritten(path, forge)
    assert not replay(find(tmp_path)).is_same


def test_a_state_that_is_another_one_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ring_module, "SEGMENT_BYTES_MIN", 5_000)
    with recorder(tmp_path, 160_000) as made:
        running = engine(made)
        for _ in range(4):
            running.run(60)
            written(made)
    paths = segments(tmp_path)

    def forge(at: int, record: record_pb2.Record) -> None:
        if not at:
            state = record.opening.state
            state.values[list(state.names).index("plan_time")].number *= 1 + 2**-50

    rewritten(paths[1], forge)
    first = replay(find(tmp_path)).first
    assert first is not None
    assert (first.path, first.record) == (paths[1], 0)
    assert "core.plan_time: recorded" in first.text


def test_what_made_it_is_compared_with_what_decides_again(recorded: Path):
    def forge(at: int, record: record_pb2.Record) -> None:
        if not at:
            record.opening.versions["numpy"] = "1.0"

    rewritten(recorded, forge)
    [(name, there, _)] = replay(find(recorded)).strange
    assert (name, there) == ("numpy", "1.0")


def test_events_come_back_as_they_went(tmp_path: Path):
    with recorder(tmp_path) as made:
        everything(engine(made))
    [path] = segments(tmp_path)
    told = {moment.kind: moment.told for moment in RecordingPart(path).moments()}
    assert len(told) == 11
    assert told["force"] == (None,)
    assert told["profile"] == (profile(),)
    assert told["warm_start"] == ((Belief("dflash", "chat <b>", (0.9,), (30.0,)),), "elsewhere")
    assert told["loss"][0][0] == LOST
    assert told["parting"] == (30.0,)
    assert told["overrides"] == ((),)


def test_a_report_is_kept_as_the_message_that_it_came_in(tmp_path: Path):
    """But for the plan that the core took it to follow, and for what is not known here."""
    message = engine_pb2.StepReport(
        step=1, batch_size=4, kv_tokens=2000, drafter="eagle3", accepted_counts=[4],
        step_seconds=0.01, plan_epoch=7, probe_id=9, flags=engine_pb2.StepFlags(),
    )  # fmt: skip
    # With a field that this version does not know: number 100, two bytes of text.
    sent = engine_pb2.StepReport.FromString(message.SerializeToString() + b"\xa2\x06\x02hi")
    with recorder(tmp_path) as made:
        report = replace(report_from_proto(sent), plan_epoch=0, probe_id=0)
        engine(made).core.observe(report, sent)
    [path] = segments(tmp_path)
    [moment] = RecordingPart(path).moments()
    message.plan_epoch = message.probe_id = 0
    assert moment.record.report.SerializeToString() == message.SerializeToString()
    assert moment.told == (report,)
    assert replay(find(tmp_path)).is_same


def test_a_change_of_nothing_changes_nothing(tmp_path: Path):
    with recorder(tmp_path) as made:
        everything(engine(made, profile=profile()))
    what_if = Counterfactual(CounterfactualChange({"confidence_z": 1.28}))
    verdict = replay(find(tmp_path), [what_if])
    found = what_if.found
    assert verdict.is_same
    assert found.steps + found.measured == verdict.reports
    assert found.measured == 10
    assert found.differing == 0
    assert found.recorded_rate > 0


def test_another_rule_would_have_done_other_things(tmp_path: Path):
    with recorder(tmp_path) as made:
        engine(made, profile=profile()).run(300, acceptance=0.9)
    what_if = Counterfactual(CounterfactualChange({"policy": "tide", "tide_gamma": 2}))
    assert replay(find(tmp_path), [what_if]).is_same
    found = what_if.found
    assert found.differing_share > 0.5
    assert {stretch.other.gamma for stretch in found.stretches} <= {0, 2}
    assert sum(stretch.steps for stretch in found.stretches) == found.differing
    longest = max(found.stretches, key=lambda stretch: stretch.steps)
    assert longest.gain < 0
    assert found.gain < 0
    assert found.gain == pytest.approx(found.other_rate / found.recorded_rate - 1)


def test_what_nobody_saw_is_counted_as_unseen(tmp_path: Path):
    with recorder(tmp_path) as made:
        running = engine(made, profile=profile(), probe_share=0)
        running.core.set_overrides([override("low", Rule(gamma=1, drafter="eagle3"))])
        running.run(300, acceptance=0.9)
    what_if = Counterfactual(CounterfactualChange({"policy": "tide", "tide_gamma": 5}))
    replay(find(tmp_path), [what_if])
    # The first step ran before the override, which holds for the other rule too.
    assert what_if.found.differing <= 1
    with recorder(tmp_path / "free") as made:
        running = engine(made, profile=profile(), policy="tide", tide_gamma=1)
        running.run(200, acceptance=0.9)
    what_if = Counterfactual(CounterfactualChange({"tide_gamma": 5}))
    replay(find(tmp_path / "free"), [what_if])
    assert what_if.found.differing > 150
    assert what_if.found.unseen > 0


def test_another_profile_makes_another_choice(tmp_path: Path):
    with recorder(tmp_path) as made:
        engine(made, profile=profile()).run(200, acceptance=0.6)
    what_if = Counterfactual(CounterfactualChange(profile=profile(error=30.0)))
    replay(find(tmp_path), [what_if])
    shorter = [s.other.gamma < s.recorded.gamma for s in what_if.found.stretches if s.steps > 20]
    assert shorter
    assert all(shorter)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (CounterfactualChange({"policy": "best"}), "policy must be one of"),
        (CounterfactualChange({"speed": 1}), "speed"),
        (
            CounterfactualChange(profile=replace(profile(), fingerprint=Fingerprint("other"))),
            "target_model",
        ),
    ],
)
def test_a_change_that_cannot_be_is_refused(
    recorded: Path, change: CounterfactualChange, text: str
):
    with pytest.raises(RecordingError, match=text):
        replay(find(recorded), [Counterfactual(change)])


def test_which_engine_has_to_be_said(tmp_path: Path):
    for name in ("one", "two"):
        with recorder(tmp_path) as made:
            engine(made, full_spec(name)).run(5)
    with pytest.raises(RecordingError, match="several engines: name one of one, two"):
        find(tmp_path)
    assert replay(find(tmp_path, "two")).engine_id == "two"
    with pytest.raises(
        RecordingError, match="has no recording of engine 'three', only of one, two"
    ):
        find(tmp_path, "three")
    [path, _] = segments(tmp_path)
    with pytest.raises(RecordingError, match="is a recording of engine one, not of two"):
        find(path, "two")
    with pytest.raises(RecordingError, match="cannot be read"):
        find(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordingError, match="contains no recording"):
        find(tmp_path / "empty")


def test_notes_change_nothing(recorded: Path):
    before = replay(find(recorded))
    note = record_pb2.RecordNote(kind=record_pb2.RECORD_NOTE_KIND_REJECTED, count=1, text="x")
    rewritten(recorded, lambda at, record: record.note.CopyFrom(note) if at == 30 else None)
    after = replay(find(recorded))
    assert after.segments == before.segments
