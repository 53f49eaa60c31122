"""Collects signals of four domains on the real engine, for what the lab shows of TIDE."""

import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from engine_shim.sglang.training.signals import Signal, load, signal_paths
from engine_shim.sglang.training.students import DraftStudent
from engine_shim.sglang.training.versions import FOLDER, Versions
from lab.cpu_engine.engine_command import MODELS
from lab.cpu_engine.models.prompts import DOMAINS
from lab.harness.errors import HarnessError
from lab.harness.sidecar import decoded_rows
from lab.learning.engines_at_work import Lab, LabSetting, running
from trainer.adapt import split

# The draft length of all of the paper's experiments.
GAMMA: Final = 3
# Every so many-th signal is for evaluation.
_HELD_OUT: Final = 4
_DRAFT: Final = "draft-code"
_TRIES: Final = 40
_PAUSE_SECONDS: Final = 0.5
_WARM_UP_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class DomainServed:
    """Holds what the engine served of a domain, at gamma = 3.

    train, held: its signals.  counts: sequences that accepted exactly k drafts in a step.
    """

    train: tuple[Signal, ...]
    held: tuple[Signal, ...]
    counts: tuple[int, ...]

    @property
    def conditional(self) -> tuple[float, ...]:
        """Computes a_1, a_2, ...: the share of each draft position that was accepted."""
        reached = [sum(self.counts[k:]) for k in range(len(self.counts))]
        return tuple(after / max(before, 1) for before, after in pairwise(reached))

    @property
    def acceptance_length(self) -> float:
        """Computes the tokens of a verification."""
        return 1 + sum(k * count for k, count in enumerate(self.counts)) / sum(self.counts)


@dataclass(frozen=True, slots=True)
class Collected:
    """Holds the domains by name, and the drafter that served them all."""

    domains: dict[str, DomainServed]
    drafter: DraftStudent


@cache
def collected(setting: LabSetting, seed: int) -> Collected:
    """Serves every domain with a drafter of code, collecting; once for all parts of a run.

    Raises HarnessError.
    """
    name = f"tide-{seed}"
    folder = setting.scratch / f"{name}-signals"
    variables = {"SPECULATION_SIGNALS_FOLDER": str(folder)}
    domains = DOMAINS[-2:] if setting.quick else DOMAINS
    with running(setting, name, MODELS / _DRAFT, (0, 1, GAMMA), variables) as lab:
        served = {domain: _served(setting, lab, folder, domain, seed) for domain in domains}
    return Collected(served, Versions(folder / FOLDER).student(0))


def _served(setting: LabSetting, lab: Lab, folder: Path, domain: str, seed: int) -> DomainServed:
    count, tokens = (4, 64) if setting.quick else (12, 128)
    before = set(signal_paths(folder))
    with lab.regime("collect"), lab.pinned(GAMMA) as pin:
        # So that the engine has the plan before the prompts come.
        lab.generate(domain, 1, _WARM_UP_TOKENS, 9000 + seed)
        first = len(pin.reports_since(0, _WARM_UP_TOKENS - 1))
        played = lab.generate(domain, count, tokens, 100 * seed)
        # The prompts' steps make the first tokens, and no report.  The last steps may make more
        # tokens than are asked for, so that a few of them may be missing.
        decoded = sum(len(answer) - 1 for answer in played.tokens)
        came = pin.reports_since(first, decoded)
        reports = [report for report in came if report.gamma == GAMMA]
    for _ in range(_TRIES):
        # The end of the regime reaches the engine in a step.
        lab.generate(domain, 1, 4, 9500 + seed)
        paths = sorted(set(signal_paths(folder)) - before)
        if len(paths) >= count:
            break
        time.sleep(_PAUSE_SECONDS)
    else:
        raise HarnessError(f"{len(paths)} of {count} signals of {domain} came")
    train, held = split([load(path) for path in paths], _HELD_OUT)
    counts = [0] * (GAMMA + 1)
    for report in reports:
        for accepted, sequences in enumerate(report.accepted_counts):
            counts[accepted] += sequences
        counts[0] -= sum(report.accepted_counts) - decoded_rows(report)
    return DomainServed(tuple(train), tuple(held), tuple(counts))
