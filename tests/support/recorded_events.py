"""Engines in virtual time whose cores are on tape, by a real recorder on a real directory."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.core.clock import VirtualClock
from controller.core.cost.profile import Profile
from controller.core.engine_spec import Arm, Capabilities, DrafterSpec, EngineSpec, Fingerprint
from controller.core.model_shapes import DrafterKind
from controller.core.plan import PlanRow, Probe
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import ClassCounts, StepFlags, StepReport
from controller.core.training.selective_training import TrainingSettings
from controller.recording.recorded_controller import RecordedController
from controller.recording.recorder import Recorder
from tests.support.accepted_counts import accepted_counts
from tests.support.virtual_engine import Acceptance, VirtualEngine

GAMMAS = (0, 1, 2, 3, 5)
TRAINING = TrainingSettings(initial=2, threshold=4, unit_drafts=32)


def full_spec(engine_id: str = "engine-0") -> EngineSpec:
    """An engine that can do everything: two drafters, sleep, updates, training."""
    return EngineSpec(
        engine_id,
        Fingerprint("target", engine="virtual"),
        (
            DrafterSpec("eagle3", DrafterKind.MTP, GAMMAS),
            DrafterSpec("dflash", DrafterKind.DFLASH, GAMMAS[1:], batch_limits=((5, 8),)),
        ),
        32,
        Capabilities(True, True, True, True, True, 1),
    )


def override(name: str, rule: Rule, reason: str = "because") -> Override:
    return Override(name, Scope(ScopeKind.FLEET), rule, "ann", reason)


class EventfulEngine(VirtualEngine):
    """Has classes, confidences, occasional updates and resets, and leaves out probes."""

    core: RecordedController

    def next_probe(self, row: PlanRow) -> Probe | None:
        return row.probe if row.probe and self.rng.random() < 0.5 else None

    def decode(self, arm: Arm, batch_size: int, acceptance: Acceptance) -> StepReport:
        rng = self.rng
        counts = tuple(accepted_counts(rng, batch_size, arm.gamma, acceptance))
        self.clock.advance(rng.uniform(0.008, 0.02))
        return self.report(
            arm, counts,
            kv_tokens=batch_size * rng.randint(400, 600),
            seconds=rng.lognormvariate(-4.3 + 0.05 * arm.gamma, 0.1),
            flags=StepFlags(
                after_gap=rng.random() < 0.02, unsteered=rng.random() < 0.02,
                updating=rng.random() < 0.1, drafter_reset=rng.random() < 0.01,
            ),
            classes=(ClassCounts("chat <b>", counts),) if rng.random() < 0.3 else (),
            confidences=(0.6,) * arm.gamma if rng.random() < 0.3 else (),
            update_seconds=0.01 if rng.random() < 0.05 else 0.0,
        )  # fmt: skip


@contextmanager
def recorder(
    directory: Path,
    limit_bytes: int = 50_000_000,
    end_of: Callable[[str], float | None] = lambda _: None,
) -> Iterator[Recorder]:
    event_recorder = Recorder(directory, limit_bytes, end_of)
    event_recorder.open()
    try:
        yield event_recorder
    finally:
        event_recorder.close()


def engine(
    event_recorder: Recorder,
    spec: EngineSpec | None = None,
    profile: Profile | None = None,
    seed: int = 0,
    **planner: Any,
) -> EventfulEngine:
    clock = VirtualClock(1000.0)
    core = event_recorder.create_core(
        spec or full_spec(), PlannerSettings(**planner), profile, clock, TRAINING
    )
    return EventfulEngine(core, clock, rng=random.Random(seed))


def flush(event_recorder: Recorder) -> None:
    """Writes all that was put, here and now: for a recorder whose own rounds are far apart."""
    event_recorder._write_queued()


def record(directory: Path, steps: int = 300, seed: int = 0, **planner: Any) -> None:
    """A plain recording of one engine."""
    with recorder(directory) as event_recorder:
        engine(event_recorder, seed=seed, **planner).run(steps)


def segments(directory: Path) -> Sequence[Path]:
    return sorted(directory.glob("*.record"))
