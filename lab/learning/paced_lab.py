"""A sidecar and one engine whose passes and updates have the prices of a GPU.

Nothing waits for these prices (see `Pace.held`): they are added up, and the engine reports them.
So the figures do not depend on how quick this machine is, or on what else runs on it.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lab.cpu_engine.engine_command import SHALLOW
from lab.cpu_engine.pace.pacer import VARIABLE, Pace
from lab.cpu_engine.pace.step_log import LoggedStep, read_log
from lab.cpu_engine.pace.update_costs import UpdateCosts
from lab.harness.errors import HarnessError
from lab.learning.engines_at_work import Lab, LabSetting, Played, running
from lab.paced.run import dilated_planner

TABLE = "h100-llama3.1-8b"
# Seconds of this machine that a second of the model takes, about: the sidecar's own times are
# stretched by it.
_DILATION = 4.0
_LOG_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class StreamPlay:
    """The passes of some requests, and their answers.  All seconds are the model's."""

    steps: tuple[LoggedStep, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))

    @property
    def seconds(self) -> float:
        """Seconds of all passes, prefills included."""
        return sum(step.seconds for step in self.steps)

    @property
    def halves(self) -> tuple[tuple[int, float], tuple[int, float]]:
        """Tokens and seconds of the passes up to half of the tokens, and of the others."""
        gained = [step.tokens if step.is_decode else 0 for step in self.steps]
        reached = list(accumulate(gained))
        cut = bisect_left(reached, sum(gained) / 2) + 1
        return self._part(gained, 0, cut), self._part(gained, cut, len(gained))

    def _part(self, gained: Sequence[int], begin: int, end: int) -> tuple[int, float]:
        return sum(gained[begin:end]), sum(step.seconds for step in self.steps[begin:end])

    @property
    def acceptance_length(self) -> float:
        """Tokens of a sequence in a step that drafts; 1 without any."""
        drafted = [step for step in self.steps if step.gamma > 0]
        rows = sum(step.batch_size for step in drafted)
        return 1 + sum(step.accepted for step in drafted) / rows if rows else 1.0

    @property
    def updates(self) -> int:
        """Updates that landed in these passes."""
        return self.steps[-1].updates - self.steps[0].updates if self.steps else 0


class PacedLab:
    """A running engine under a sidecar; `lab` steers it."""

    def __init__(self, lab: Lab, log: Path) -> None:
        self.lab = lab
        self._log = log

    def play(self, domain: str, count: int, new_tokens: int, seed: int) -> StreamPlay:
        """Sends `count` requests at once and decodes them greedily.  Raises HarnessError.

        Nothing is held, so the machine decides how many passes go by before a request arrives.
        Many more than the engine runs at once wait in its queue from the first passes on: then
        the batch is full on every machine until the last ones.
        """
        begin = read_log(self._log).end
        played: Played = self.lab.generate(domain, count, new_tokens, seed)
        deadline = time.monotonic() + _LOG_SECONDS
        # The engine writes as soon as it is idle.
        while len((part := read_log(self._log, begin)).requests) < count:
            if time.monotonic() > deadline:
                raise HarnessError(f"{self._log}: {len(part.requests)} of {count} requests")
            time.sleep(0.02)
        return StreamPlay(part.steps, played.tokens)


@contextmanager
def paced(
    setting: LabSetting,
    name: str,
    draft: str,
    gammas: Sequence[int],
    updates: UpdateCosts,
    batch_max: int,
    engine: Mapping[str, str] | None = None,
    sidecar: Mapping[str, str] | None = None,
) -> Iterator[PacedLab]:
    """Starts both, with online updates; ends them with the context.  Raises HarnessError.

    draft: the drafter, of the shallow set: what a step costs is imposed, and its target is quick.
    updates: their price.  engine, sidecar: further variables.
    """
    log = setting.scratch / f"{name}.jsonl"
    pace = Pace(
        TABLE,
        1.0,
        log=str(log),
        gammas=tuple(gammas),
        max_batch_size=batch_max,
        updates=updates,
        held=False,
    )
    variables = {VARIABLE: pace.as_json(), "SPECULATION_ONLINE_UPDATES": "1", **(engine or {})}
    planner = {**dilated_planner(_DILATION), **(sidecar or {})}
    own = SHALLOW / draft
    with running(
        setting, name, own, gammas, variables, planner, batch_max=batch_max, models=SHALLOW
    ) as lab:
        yield PacedLab(lab, log)
