"""An engine at the other end of the real link: its agent is a process, its steps are made up."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source, StepChoice
from engine_shim.link.settings import LinkSettings
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.support.step_reports import send, step_report

# A step takes this long at least, so that plans come between steps.
_STEP_SECONDS = 0.001


class LinkedEngine:
    """Runs the plan's arm; counts are drawn from one acceptance.  choice: of the last step."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.step = 0
        self.choice: StepChoice | None = None
        self._rng = random.Random(0)

    def wait_for_a_plan(self) -> None:
        """Until the sidecar steers."""
        eventually(
            lambda: self.link.choose(4).source is Source.PLAN or None,
            description="steered by a plan",
        )

    def run(self, steps: int, batch_size: int = 4, acceptance: float = 0.8) -> None:
        """Runs `steps` decode steps."""
        for _ in range(steps):
            self.choice = choice = self.link.choose(batch_size)
            counts = [0] * (choice.gamma + 1)
            for _ in range(batch_size):
                accepted = 0
                while accepted < choice.gamma and self._rng.random() < acceptance:
                    accepted += 1
                counts[accepted] += 1
            self.step += 1
            seconds = 0.01 * (1 + 0.08 * choice.gamma) * self._rng.lognormvariate(0, 0.05)
            report = step_report(
                self.step, counts, choice, kv_tokens=batch_size * 512, step_seconds=seconds
            )
            send(self.link, report)
            time.sleep(_STEP_SECONDS)


@contextmanager
def linked_engine(
    address: str,
    engine_id: str = "engine-1",
    grace_seconds: float = 10.0,
    agent_nice: int = 19,
) -> Iterator[LinkedEngine]:
    settings = LinkSettings(sidecar=address, grace_seconds=grace_seconds, agent_nice=agent_nice)
    link = EngineLink.start(engine_spec(engine_id), settings, startup_gamma=1)
    try:
        engine = LinkedEngine(link)
        engine.wait_for_a_plan()
        yield engine
    finally:
        link.close()
