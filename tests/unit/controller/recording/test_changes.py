"""Settings that change while a sidecar serves, and its last plan, as a recording has them."""

from dataclasses import replace
from pathlib import Path

from controller.recording.counterfactual import Counterfactual, CounterfactualChange
from controller.recording.recording import RecordingPart, find
from controller.recording.replay import replay
from controller.recording.window import Window
from tests.support.recorded_events import engine, recorder, segments


def changed_midway(directory: Path) -> None:
    """Steps, other constants, steps, another segment, steps, the last plan."""
    with recorder(directory) as made:
        running = engine(made)
        core = running.core
        training = core.updates.training
        assert training is not None
        running.run(60)
        core.use_settings(
            replace(core._settings, switch_margin=0.2), replace(training.settings, margin=0.02)
        )
        running.run(60)
        core._event_log.due = True
        running.run(60)
        core.last_plan(30.0)


def test_a_later_segment_begins_with_what_holds_then(tmp_path: Path):
    changed_midway(tmp_path)
    first, second = (RecordingPart(path).opening for path in segments(tmp_path))
    assert (first.planner.switch_margin, second.planner.switch_margin) == (0.01, 0.2)
    assert (first.training.margin, second.training.margin) == (0.05, 0.02)
    verdict = replay(find(tmp_path))
    assert (verdict.first, verdict.gaps, verdict.states) == (None, [], 1)
    # By itself as well, as if the first had been lost.
    assert replay(find(segments(tmp_path)[1])).is_same


def test_what_would_have_been_keeps_its_own_constants(tmp_path: Path):
    changed_midway(tmp_path)
    what_if = Counterfactual(CounterfactualChange({"probe_share": 0.0}))
    replay(find(tmp_path), [what_if])
    other = what_if._other
    assert other is not None
    assert (other._settings.probe_share, other._settings.switch_margin) == (0.0, 0.2)


def test_a_ticket_says_both(tmp_path: Path):
    changed_midway(tmp_path)
    window = Window()
    replay(find(tmp_path), [window])
    assert "settings read again: switch_margin = 0.2" in [text for _, text in window.inputs]
    assert "the sidecar is stopping" in window.plans[-1].detail
