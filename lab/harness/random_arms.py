"""Moves an engine from arm to arm at random, to show that no change alters a token."""

import random
from collections.abc import Sequence

from lab.harness.background_thread import BackgroundThread
from lab.harness.sidecar import Pin

_POLL_SECONDS = 0.005


class RandomArms(BackgroundThread):
    """Moves a pin to an arm drawn with a seed, as soon as a step since the last move is seen."""

    def __init__(self, pin: Pin, arms: Sequence[tuple[str, int]], seed: int) -> None:
        super().__init__("random-arms")
        self._pin = pin
        self._arms = arms
        self._rng = random.Random(seed)

    def _run(self) -> None:
        seen_reports = -1
        while not self._stop.wait(_POLL_SECONDS):
            if len(self._pin.reports) != seen_reports:
                seen_reports = len(self._pin.reports)
                drafter, gamma = self._rng.choice(self._arms)
                self._pin.move(gamma, drafter)
