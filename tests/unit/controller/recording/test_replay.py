"""Deciding again: the same bit for bit from every kind of input, and what would be otherwise."""

import json
from dataclasses import replace
from inspect import get_annotations
from itertools import count
from pathlib import Path

import pytest

from controller.core.acceptance.warm_start import AcceptanceSnapshot
from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import Arm, Capability, Fingerprint, LostCapability
from controller.core.planning.overrides import Rule
from controller.core.settings import POLICIES, PlannerSettings
from controller.core.training.selective_training import TrainingResult
from controller.recording import recorder as recorder_module
from controller.recording import segments as ring_module
from controller.recording.counterfactual import Counterfactual, CounterfactualChange
from controller.recording.incident_report import render_incident_report
from controller.recording.recorded_controller import Event, EventLog
from controller.recording.recording import SegmentReader, find_recording
from controller.recording.replay import replay
from controller.recording.segments import MAGIC, RecordingError, pack_frame, read_blocks
from controller.recording.window import Window
from controller.wire.reports import report_from_proto
from speculation.v1 import engine_pb2, record_pb2
from tests.support.recorded_events import (
    EventfulEngine,
    engine,
    flush,
    full_spec,
    override,
    record,
    recorder,
    segments,
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
    core.warm_start_from([AcceptanceSnapshot("dflash", "chat <b>", (0.9,), (30.0,))], "elsewhere")
    running.run(20)
    core.force_arm(Arm("dflash", 2))
    running.run(10)
    core.force_arm(None)
    core.use_profile(profile())
    core.use_settings(
        replace(core._settings, switch_margin=0.2), replace(training.settings, margin=0.02)
    )
    running.run(20)
    training.is_trainer_connected = True
    assert training.record_stored_signals(10) == 1
    running.run(30, acceptance=0.2)
    training.finish_round(TrainingResult(1, 1, 0.3, 0.5, 0.4))
    running.run(30)
    training.is_trainer_connected = False
    running.clock.advance(3.0)
    assert core.next_plan() is not None
    core.row_for_batch(4)
    core.note(record_pb2.RECORD_NOTE_KIND_DROPPED, 7)
    assert core.record_lost_capabilities([replace(LOST, gammas=(5,))])
    running.run(1)
    assert core.record_lost_capabilities(
        [LOST, *(LostCapability(kind) for kind in Capability if kind is not DRAFTER)]
    )
    running.run(9)
    assert core.make_last_plan(30.0).lease_seconds == 30
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
            self.is_opening_due = next(puts) % 5 == 0

    monkeypatch.setattr(recorder_module, "EventLog", Impatient)
    with recorder(tmp_path) as live_recorder:
        running = engine(live_recorder, policy=policy)
        everything(running)
        again = engine(live_recorder, policy=policy, seed=1)
        again.run(100)
    verdict = replay(find_recording(tmp_path))
    assert verdict.first is None
    assert (verdict.is_same, verdict.gaps, verdict.strange) == (True, [], [])
    assert verdict.sessions == 2
    assert verdict.states == verdict.segments - 2 > 50
    assert verdict.reports == running.step + again.step
    # Every plan that came out was compared; the first one of a session is in its opening.
    assert verdict.plans == sum(one.core.current_plan().epoch - 1 for one in (running, again))


def rewritten(path: Path, change) -> None:
    """The segment with its records changed, its checksums right."""
    records = (record for _, block in read_blocks(path.read_bytes()) for record in block.records)
    kept = [record for number, record in enumerate(records) if change(number, record) != "gone"]
    path.write_bytes(MAGIC + pack_frame(kept))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    record(tmp_path)
    [path] = segments(tmp_path)
    return path


def number_of(path: Path, kind: str, at_least: int) -> int:
    """Of the first moment of this kind (a plan, where it decides) from there on."""
    for number, moment in enumerate(SegmentReader(path).events(), 1):
        plain = not moment.is_decision or moment.plan is not None
        if number >= at_least and moment.kind == kind and plain:
            return number
    raise AssertionError(kind)


def test_a_lost_drafter_stays_lost_where_the_recording_begins_later(tmp_path: Path):
    with recorder(tmp_path) as live_recorder:
        running = engine(live_recorder)
        running.run(60)
        assert running.core.record_lost_capabilities([LOST])
        running.run(60)
        running.core._event_log.is_opening_due = True
        running.run(200)
    first, *later = segments(tmp_path)
    assert later
    first.unlink()
    verdict = replay(find_recording(tmp_path))
    assert verdict.is_same
    assert verdict.reports > 150
    opening = SegmentReader(later[0]).opening
    assert opening.spec.lost == (LOST,)


def test_a_plan_that_was_not_decided_is_found_and_shown(recorded: Path):
    number = number_of(recorded, "decision", 50)

    def forge(index: int, record: record_pb2.Record) -> None:
        if index == number:
            record.decision.plan.rows[0].gamma = 4

    rewritten(recorded, forge)
    verdict = replay(find_recording(recorded))
    assert verdict.differences == 1
    assert verdict.first is not None
    assert (verdict.first.path, verdict.first.record) == (recorded, number)
    assert "B <= 1: recorded" in verdict.first.text
    assert "gamma: 4" in verdict.first.text


def of_object(value: record_pb2.StateObject, name: str) -> record_pb2.StateValue:
    """A variable of a recorded object."""
    return value.values[list(value.names).index(name)]


def test_a_plan_that_no_message_can_hold_cannot_be_decided_again(tmp_path: Path):
    with recorder(tmp_path) as live_recorder:
        engine(live_recorder).core.make_last_plan(30.0)
    [path] = segments(tmp_path)

    def forge(index: int, record: record_pb2.Record) -> None:
        if not index:
            plan = of_object(record.opening.state, "plan").object
            for row in of_object(plan, "rows").tuple.values:
                of_object(of_object(row.object, "arm").object, "drafter").integer = 3

    rewritten(path, forge)
    [(_, reason)] = replay(find_recording(path)).gaps
    assert reason.startswith("record 1 cannot be replayed: TypeError")


def test_a_report_that_cannot_be_of_its_engine_is_not_shown_in_part(recorded: Path):
    number = number_of(recorded, "report", 50)

    def forge(index: int, record: record_pb2.Record) -> None:
        if index == number:
            record.report.drafter = "another"

    rewritten(recorded, forge)
    window = Window()
    verdict = replay(find_recording(recorded), [window])
    assert "cannot be replayed" in verdict.gaps[0][1]
    assert "another" not in {arm.drafter for arm in window.arms}
    assert render_incident_report(window, verdict)


def test_a_plan_where_none_came_is_a_difference(recorded: Path):
    number = number_of(recorded, "decision", 50)

    def forge(index: int, record: record_pb2.Record) -> None:
        if index == number:
            record.decision.ClearField("plan")

    rewritten(recorded, forge)
    first = replay(find_recording(recorded)).first
    assert first is not None
    assert "recorded no new plan, now plan" in first.text


@pytest.mark.parametrize("what", ["report", "left out"])
def test_another_input_does_not_pass_for_the_recorded_one(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
):
    """The last bit of one step's seconds is enough to be found at the next opening."""
    monkeypatch.setattr(ring_module, "SEGMENT_BYTES_MIN", 5_000)
    with recorder(tmp_path, 160_000) as live_recorder:
        running = engine(live_recorder)
        for _ in range(4):
            running.run(60)
            flush(live_recorder)
    path = segments(tmp_path)[0]
    number = number_of(path, "report", 30)

    def forge(index: int, record: record_pb2.Record) -> str:
        if index == number and what == "left out":
            return "gone"
        if index == number:
            record.report.step_seconds *= 1 + 2**-50
        return "there"

    rewritten(path, forge)
    assert not replay(find_recording(tmp_path)).is_same


def test_a_state_that_is_another_one_is_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ring_module, "SEGMENT_BYTES_MIN", 5_000)
    with recorder(tmp_path, 160_000) as live_recorder:
        running = engine(live_recorder)
        for _ in range(4):
            running.run(60)
            flush(live_recorder)
    paths = segments(tmp_path)

    def forge(index: int, record: record_pb2.Record) -> None:
        if not index:
            state = record.opening.state
            state.values[list(state.names).index("plan_time")].number *= 1 + 2**-50

    rewritten(paths[1], forge)
    first = replay(find_recording(tmp_path)).first
    assert first is not None
    assert (first.path, first.record) == (paths[1], 0)
    assert "core.plan_time: recorded" in first.text


def test_what_made_it_is_compared_with_what_decides_again(recorded: Path):
    def forge(index: int, record: record_pb2.Record) -> None:
        if not index:
            record.opening.versions["numpy"] = "1.0"

    rewritten(recorded, forge)
    [(name, there, _)] = replay(find_recording(recorded)).strange
    assert (name, there) == ("numpy", "1.0")


def test_constants_that_an_older_recording_lacks_have_their_defaults(recorded: Path):
    def forge(index: int, record: record_pb2.Record) -> None:
        if not index:
            planner = json.loads(record.opening.planner_json)
            older = {name: planner[name] for name in get_annotations(PlannerSettings)}
            assert len(older) < len(planner)
            record.opening.planner_json = json.dumps(older)

    rewritten(recorded, forge)
    verdict = replay(find_recording(recorded))
    assert (verdict.first, verdict.is_same) == (None, True)


def test_events_come_back_as_they_went(tmp_path: Path):
    with recorder(tmp_path) as live_recorder:
        everything(engine(live_recorder))
    [path] = segments(tmp_path)
    payload_by_kind = {moment.kind: moment.arguments for moment in SegmentReader(path).events()}
    assert len(payload_by_kind) == 11
    assert payload_by_kind["force"] == (None,)
    assert payload_by_kind["profile"] == (profile(),)
    assert payload_by_kind["warm_start"] == (
        (AcceptanceSnapshot("dflash", "chat <b>", (0.9,), (30.0,)),),
        "elsewhere",
    )
    assert payload_by_kind["loss"][0][0] == LOST
    assert payload_by_kind["parting"] == (30.0,)
    assert payload_by_kind["overrides"] == ((),)


def test_a_report_is_kept_as_the_message_that_it_came_in(tmp_path: Path):
    """But for the plan that the core took it to follow, and for what is not known here."""
    message = engine_pb2.StepReport(
        step=1, batch_size=4, kv_tokens=2000, drafter="eagle3", accepted_counts=[4],
        step_seconds=0.01, plan_epoch=7, probe_id=9, flags=engine_pb2.StepFlags(),
    )  # fmt: skip
    # With a field that this version does not know: number 100, two bytes of text.
    sent = engine_pb2.StepReport.FromString(message.SerializeToString() + b"\xa2\x06\x02hi")
    with recorder(tmp_path) as live_recorder:
        report = replace(report_from_proto(sent), plan_epoch=0, probe_id=0)
        engine(live_recorder).core.observe(report, sent)
    [path] = segments(tmp_path)
    [moment] = SegmentReader(path).events()
    message.plan_epoch = message.probe_id = 0
    assert moment.record.report.SerializeToString() == message.SerializeToString()
    assert moment.arguments == (report,)
    assert replay(find_recording(tmp_path)).is_same


def test_a_change_of_nothing_changes_nothing(tmp_path: Path):
    with recorder(tmp_path) as live_recorder:
        everything(engine(live_recorder, profile=profile()))
    what_if = Counterfactual(CounterfactualChange({"confidence_z": 1.28}))
    verdict = replay(find_recording(tmp_path), [what_if])
    comparison = what_if.comparison
    assert verdict.is_same
    assert comparison.steps + comparison.measured == verdict.reports
    assert comparison.measured == 10
    assert comparison.differing == 0
    assert comparison.recorded_rate > 0


def test_another_rule_would_have_done_other_things(tmp_path: Path):
    with recorder(tmp_path) as live_recorder:
        engine(live_recorder, profile=profile()).run(300, acceptance=0.9)
    what_if = Counterfactual(CounterfactualChange({"policy": "tide", "tide_gamma": 2}))
    assert replay(find_recording(tmp_path), [what_if]).is_same
    comparison = what_if.comparison
    assert comparison.differing_share > 0.5
    assert {stretch.other.gamma for stretch in comparison.stretches} <= {0, 2}
    assert sum(stretch.steps for stretch in comparison.stretches) == comparison.differing
    longest = max(comparison.stretches, key=lambda stretch: stretch.steps)
    assert longest.gain < 0
    assert comparison.gain < 0
    assert comparison.gain == pytest.approx(comparison.other_rate / comparison.recorded_rate - 1)


def test_what_nobody_saw_is_counted_as_unseen(tmp_path: Path):
    with recorder(tmp_path) as live_recorder:
        running = engine(live_recorder, profile=profile(), probe_share=0)
        running.core.set_overrides([override("low", Rule(gamma=1, drafter="eagle3"))])
        running.run(300, acceptance=0.9)
    what_if = Counterfactual(CounterfactualChange({"policy": "tide", "tide_gamma": 5}))
    replay(find_recording(tmp_path), [what_if])
    # The first step ran before the override, which holds for the other rule too.
    assert what_if.comparison.differing <= 1
    with recorder(tmp_path / "free") as live_recorder:
        running = engine(live_recorder, profile=profile(), policy="tide", tide_gamma=1)
        running.run(200, acceptance=0.9)
    what_if = Counterfactual(CounterfactualChange({"tide_gamma": 5}))
    replay(find_recording(tmp_path / "free"), [what_if])
    assert what_if.comparison.differing > 150
    assert what_if.comparison.unseen > 0


def test_another_profile_makes_another_choice(tmp_path: Path):
    with recorder(tmp_path) as live_recorder:
        engine(live_recorder, profile=profile()).run(200, acceptance=0.6)
    what_if = Counterfactual(CounterfactualChange(profile=profile(error=30.0)))
    replay(find_recording(tmp_path), [what_if])
    shorter = [
        s.other.gamma < s.recorded.gamma for s in what_if.comparison.stretches if s.steps > 20
    ]
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
        replay(find_recording(recorded), [Counterfactual(change)])


def test_which_engine_has_to_be_said(tmp_path: Path):
    for name in ("one", "two"):
        with recorder(tmp_path) as live_recorder:
            engine(live_recorder, full_spec(name)).run(5)
    with pytest.raises(RecordingError, match="several engines: name one of one, two"):
        find_recording(tmp_path)
    assert replay(find_recording(tmp_path, "two")).engine_id == "two"
    with pytest.raises(
        RecordingError, match="has no recording of engine 'three', only of one, two"
    ):
        find_recording(tmp_path, "three")
    [path, _] = segments(tmp_path)
    with pytest.raises(RecordingError, match="is a recording of engine one, not of two"):
        find_recording(path, "two")
    with pytest.raises(RecordingError, match="cannot be read"):
        find_recording(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordingError, match="contains no recording"):
        find_recording(tmp_path / "empty")


def test_notes_change_nothing(recorded: Path):
    before = replay(find_recording(recorded))
    note = record_pb2.RecordNote(kind=record_pb2.RECORD_NOTE_KIND_REJECTED, count=1, text="x")
    rewritten(recorded, lambda index, record: record.note.CopyFrom(note) if index == 30 else None)
    after = replay(find_recording(recorded))
    assert after.segments == before.segments
