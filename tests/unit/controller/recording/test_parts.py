"""Small parts that only show from outside when two things come together."""

from collections import deque
from types import SimpleNamespace

import pytest

from controller.core.acceptance.estimator import AcceptanceCurve
from controller.core.engine_spec import Arm
from controller.core.plan import Probe
from controller.core.step_report import StepReport
from controller.recording.counterfactual import _is_unseen, _with_own_probe
from controller.recording.html_page import inline_svg, new_figure, time_text
from controller.recording.incident_report import plot_label
from controller.recording.recorded_controller import EventLog, Queue
from speculation.v1 import record_pb2


def note() -> record_pb2.Record:
    opened = record_pb2.RecordNote(kind=record_pb2.RECORD_NOTE_KIND_STREAM_OPENED)
    return record_pb2.Record(note=opened)


def test_a_broken_tape_takes_nothing_before_an_opening_even_where_there_is_room():
    queue: Queue = deque()
    event_log = EventLog("engine-0", 1, queue, lambda _: None, lambda: 0.0)
    event_log.open(note)
    event_log.put(note)
    event_log.drop_event()
    event_log.put(note)
    assert len(queue) == 2
    assert event_log.lost_events == 2
    assert event_log.can_open
    event_log.open(note)
    event_log.put(note)
    assert len(queue) == 4


@pytest.mark.parametrize(("running", "known"), [(None, 0), (2, 7), (3, 0)])
def test_a_recorded_step_is_the_other_cores_probe_only_if_it_ran_that_arm(running, known):
    report = StepReport(1, 1, 1, "mtp", 2, (0, 0, 1), 0.01, probe_id=99)
    probe = None if running is None else (0, Probe(7, Arm("mtp", running), 2))
    core = SimpleNamespace(explorer=SimpleNamespace(running_probe=probe))
    assert _with_own_probe(report, core).probe_id == known  # type: ignore[arg-type]


def test_the_deepest_position_says_whether_an_arm_was_seen():
    curves = {"mtp": AcceptanceCurve([0.5] * 3, [100.0, 8.0, 2.0], [0.0] * 4, [4.0] * 3)}
    core = SimpleNamespace(
        decision=SimpleNamespace(values=SimpleNamespace(traffic=SimpleNamespace(last_batch=curves)))
    )
    unseen_flags = [_is_unseen(Arm("mtp", gamma), core) for gamma in range(4)]  # type: ignore[arg-type]
    assert unseen_flags == [False, False, False, True]


@pytest.mark.parametrize("name", ["$\\frac{$", "_hidden", "日本\x07", "a$b$c"])
def test_any_name_can_stand_in_a_plot(name):
    figure = new_figure(3, 2)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], label=plot_label(name))
    axes.legend()
    text = inline_svg(figure, name)
    assert "legend_1" in text
    assert "<text" in text


def test_times_that_cannot_be_are_no_error():
    assert time_text(0) == "1970-01-01 00:00:00.000Z"
    assert time_text(float("nan")) == time_text(1e300) == "-"
