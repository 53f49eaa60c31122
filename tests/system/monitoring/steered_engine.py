"""An engine of this test's own on a real link: it runs the plan's arm, on a made-up machine."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine_shim.link.engine_link import EngineLink
from engine_shim.link.plan_follower import Source
from engine_shim.link.settings import LinkSettings
from tests.support.eventually import eventually
from tests.support.link_messages import engine_spec
from tests.support.step_reports import send, step_report

ENGINE = "engine-1"
BATCH_SIZE = 4
SAFE_GAMMA = 1
ACCEPTANCE = 0.8
# Plenty for a busy machine.
PATIENCE_SECONDS = 60.0


def step_seconds(gamma: int) -> float:
    return 0.01 * (1 + 0.1 * gamma)


class SteeredEngine:
    """steps, seconds, drafts, drafted, accepted, delivered, unsteered: of what was reported.

    sequences_by_length: drafts, by how many of their tokens were accepted.  refused: reports that
    the socket had no room for; they were counted as dropped, and sent again.
    """

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.steps = self.drafts = self.drafted = self.accepted = self.delivered = 0
        self.unsteered = self.refused = 0
        self.by_length: Counter[int] = Counter()
        self.seconds = 0.0
        self.gamma = -1
        self._random = random.Random(1)

    def run(self, steps: int, *, unsteered: bool = False) -> None:
        """Steps as the plan says."""
        for _ in range(steps):
            self._step(unsteered=unsteered)

    def run_until(self, condition: Callable[[], object], what: str) -> None:
        """Steps on until it holds."""

        def stepped() -> bool:
            self.run(20)
            return bool(condition())

        eventually(stepped, timeout_seconds=PATIENCE_SECONDS, description=what)

    def _step(self, *, unsteered: bool) -> None:
        choice = self.link.choose(BATCH_SIZE)
        gamma = choice.gamma
        counts = [0] * (gamma + 1)
        for _ in range(BATCH_SIZE):
            accepted = 0
            while accepted < gamma and self._random.random() < ACCEPTANCE:
                accepted += 1
            counts[accepted] += 1
        step, seconds = self.steps + 1, step_seconds(gamma)
        delivered = BATCH_SIZE + sum(k * sequences for k, sequences in enumerate(counts))

        def sent() -> bool:
            report = step_report(
                step,
                counts,
                choice,
                kv_tokens=4096,
                step_seconds=seconds,
                delivered_tokens=delivered,
            )
            if unsteered:
                report.flags.unsteered = True
            taken = send(self.link, report)
            self.refused += not taken
            return taken

        eventually(sent, timeout_seconds=PATIENCE_SECONDS, description="room for a report")
        self.steps, self.gamma = step, gamma
        self.seconds += seconds
        if gamma:
            self.drafts += BATCH_SIZE
            self.drafted += BATCH_SIZE * gamma
            self.by_length.update(dict(enumerate(counts)))
        self.delivered += delivered
        self.accepted += sum(k * sequences for k, sequences in enumerate(counts))
        self.unsteered += unsteered


@contextmanager
def steered_engine(address: str) -> Iterator[SteeredEngine]:
    """With an open stream, and a plan."""
    settings = LinkSettings(sidecar=address, report_buffer=65_536)
    link = EngineLink.start(engine_spec(ENGINE), settings, SAFE_GAMMA)
    try:
        eventually(
            lambda: link.choose(BATCH_SIZE).source is Source.PLAN,
            timeout_seconds=PATIENCE_SECONDS,
            description="steered by a plan",
        )
        yield SteeredEngine(link)
    finally:
        link.close()
