"""Settings that change while a sidecar serves, and its last plan, as a recording has them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from controller.core.step_report import RowGroup, StepReport
from controller.recording.counterfactual import Counterfactual, CounterfactualChange
from controller.recording.html_page import MissingPlotsError, new_figure
from controller.recording.incident_report import render_incident_report
from controller.recording.recording import SegmentReader, find_recording
from controller.recording.replay import replay
from controller.recording.window import Window
from tests.support.recorded_events import EventfulEngine, engine, recorder, segments


def changed_midway(directory: Path) -> None:
    """Steps, other constants, steps, another segment, steps, the last plan."""
    with recorder(directory) as live_recorder:
        running = engine(live_recorder)
        core = running.core
        training = core.updates.training
        assert training is not None
        running.run(60)
        core.use_settings(
            replace(core._settings, switch_margin=0.2), replace(training.settings, margin=0.02)
        )
        running.run(60)
        core._event_log.is_opening_due = True
        running.run(60)
        core.make_last_plan(30.0)


def test_a_later_segment_begins_with_what_holds_then(tmp_path: Path):
    changed_midway(tmp_path)
    first, second = (SegmentReader(path).opening for path in segments(tmp_path))
    assert (first.planner.switch_margin, second.planner.switch_margin) == (0.01, 0.2)
    assert (first.training.margin, second.training.margin) == (0.05, 0.02)
    verdict = replay(find_recording(tmp_path))
    assert (verdict.first, verdict.gaps, verdict.states) == (None, [], 1)
    # By itself as well, as if the first had been lost.
    assert replay(find_recording(segments(tmp_path)[1])).is_same


def test_what_would_have_been_keeps_its_own_constants(tmp_path: Path):
    changed_midway(tmp_path)
    what_if = Counterfactual(CounterfactualChange({"probe_share": 0.0}))
    replay(find_recording(tmp_path), [what_if])
    other = what_if._changed_core
    assert other is not None
    assert (other._settings.probe_share, other._settings.switch_margin) == (0.0, 0.2)


def test_a_ticket_says_both(tmp_path: Path):
    changed_midway(tmp_path)
    window = Window()
    replay(find_recording(tmp_path), [window])
    assert "settings read again: switch_margin = 0.2" in [text for _, text in window.input_log]
    assert "the sidecar is stopping" in window.plans[-1].detail


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPlotsError, match=r"pip install 'speculation-controller\[plots\]'"):
        new_figure(1.0, 1.0)


def test_rows_that_had_ended_made_no_tokens(tmp_path: Path):
    """Of four sequences one has ended, two have accepted a draft, and one has accepted two."""

    def run(running: EventfulEngine) -> None:
        live, ended = RowGroup("eagle3", 2, (0, 2, 1)), RowGroup("eagle3", 0, (1,), ended=True)
        for step in range(1, 11):
            running.core.observe(
                StepReport(
                    step, 4, 2000, "eagle3", 2, (1, 2, 1), 0.5, groups=(live, ended),
                    plan_epoch=running.plan.epoch,
                )
            )  # fmt: skip

    with recorder(tmp_path) as live_recorder:
        run(engine(live_recorder))
    window, what_if = Window(), Counterfactual(CounterfactualChange({"probe_share": 0.0}))
    verdict = replay(find_recording(tmp_path), [window, what_if])
    assert list(window.steps.decoded) == [3] * 10
    assert list(window.steps.tokens) == [7] * 10
    assert what_if.comparison.observed_tokens == 70
    page = render_incident_report(window, verdict)
    assert "<td>14.0</td>" in page.replace(" class=n", "")
    assert "<td>2.33</td>" in page.replace(" class=n", "")
