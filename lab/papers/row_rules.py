"""Compares rules that choose a drafter for each row, on recorded requests replayed one by one.

Every rule but the last knows what a step shows and nothing else: a proposal that agrees with all
tokens of the step, and is longer, counts as what was seen of it or as what was expected, whichever
is more.

    average          running averages of both drafters' accepted tokens, of the request
    table            the mean of the lookup's by match length, and of EAGLE's, over all requests
    table, ratios    the same times the request's two running ratios: the rule of `MixtureRule`
    hindsight        the better of the two proposals, known beforehand: nothing can do better
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from controller.core.acceptance.mixtures import LEAST_MATCH, LONGEST_MATCH
from simulator.acceptance_trace import AcceptanceTrace, RecordedRequest
from simulator.errors import InvalidInputError

GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10)
_WEIGHT = 0.1
# What a running average begins with, tokens.
_EAGLE_FIRST, _LOOKUP_FIRST = 1.0, 0.3
_CONTEXT_TOKENS = 500


@dataclass(slots=True)
class Means:
    """Holds what all requests so far have shown: sums and counts, of EAGLE and by match length."""

    eagle: list[float]
    lookup: list[list[float]]

    @classmethod
    def fresh(cls) -> "Means":
        """Returns means that count as a few steps each."""
        return cls([4.0, 4.0], [[0.5 * length, 4.0] for length in range(LONGEST_MATCH + 1)])


Step = Callable[[int, int, int, int], int]
"""Takes what EAGLE and the lookup would have had accepted, the match length and gamma."""


def _seen(would: int, accepted: int, gamma: int, expected: float) -> float:
    """Returns what counts as seen of a proposal in a step that accepted so many drafts."""
    if would <= accepted or accepted + 1 >= gamma:
        return would
    return max(accepted + 1, expected)


def _average(_: Means) -> Step:
    average = [_EAGLE_FIRST, _LOOKUP_FIRST]

    def step(eagle: int, lookup: int, __: int, gamma: int) -> int:
        accepted = lookup if average[1] > average[0] else eagle
        for side, would in enumerate((eagle, lookup)):
            value = _seen(would, accepted, gamma, average[side])
            average[side] += _WEIGHT * (value - average[side])
        return accepted

    return step


def _table(means: Means, weight: float) -> Step:
    ratios = [1.0, 1.0]

    def step(eagle: int, lookup: int, match: int, gamma: int) -> int:
        tables = (means.eagle, means.lookup[min(match, LONGEST_MATCH)])
        expected = [total / count for total, count in tables]
        finds = match >= LEAST_MATCH
        accepted = eagle
        if finds and ratios[1] * expected[1] > ratios[0] * expected[0]:
            accepted = lookup
        for side, would in enumerate((eagle, lookup) if finds else (eagle,)):
            value = _seen(would, accepted, gamma, ratios[side] * expected[side])
            ratios[side] += weight * (value / max(expected[side], 1e-3) - ratios[side])
            tables[side][0] += value
            tables[side][1] += 1
        return accepted

    return step


RULES: Mapping[str, Callable[[Means], Step]] = {
    "EAGLE": lambda _: lambda eagle, *__: eagle,
    "lookup": lambda _: lambda __, lookup, *___: lookup,
    "average": _average,
    "table": lambda means: _table(means, 0.0),
    "table, ratios": lambda means: _table(means, _WEIGHT),
    "hindsight": lambda _: lambda eagle, lookup, *__: max(eagle, lookup),
}


def tokens_a_step(requests: Sequence[RecordedRequest], gamma: int, rule: str) -> float:
    """Returns the mean tokens of a step when each request is replayed alone."""
    means, tokens, steps = Means.fresh(), 0, 0
    for request in requests:
        eagle = np.minimum(request.accepted["eagle"], gamma).tolist()
        lookup = np.minimum(request.accepted["ngram"], gamma).tolist()
        assert request.matches is not None
        match = request.matches.tolist()
        step, at = RULES[rule](means), 0
        while at < request.positions:
            gained = step(eagle[at], lookup[at], match[at], gamma) + 1
            tokens, steps, at = tokens + gained, steps + 1, at + gained
    return tokens / steps


def step_milliseconds(batch_size: int, gamma: int, *, drafts: bool) -> float:
    """Returns the step costs of `lab.papers.rows`, at a context of 500 tokens."""
    verified = 7.086 + 0.021 * batch_size * (gamma + 1)
    drafting = 0.5 + 0.45 * gamma if drafts else 0.0
    return verified + 3.93e-5 * batch_size * _CONTEXT_TOKENS + drafting


def compare(files: Sequence[Path], batch_sizes: Sequence[int]) -> Table:
    """Returns the rate of each rule at its best draft length over that of the best single arm.

    Raises InvalidInputError: files without `ngram`, `eagle` or the tokens that matches follow from.
    """
    found = Table(title="Rates over that of the best single arm", title_justify="left")
    found.add_column("trace")
    for column in ("B", *RULES):
        found.add_column(column, justify="right")
    for file in files:
        requests = AcceptanceTrace.load([file]).recorded
        for request in requests:
            if request.matches is None or not {"eagle", "ngram"} <= request.accepted.keys():
                raise InvalidInputError(file, 0, "eagle, ngram and all tokens must be recorded")
        gained = {
            (rule, gamma): tokens_a_step(requests, gamma, rule)
            for rule in RULES
            for gamma in GAMMAS
        }
        for batch_size in batch_sizes:
            rates = {
                rule: max(
                    gained[rule, gamma]
                    / step_milliseconds(batch_size, gamma, drafts=rule != "lookup")
                    for gamma in GAMMAS
                )
                for rule in RULES
            }
            off = 1 / step_milliseconds(batch_size, 0, drafts=False)
            best = max(rates["EAGLE"], rates["lookup"], off)
            cells = [f"{rate / best:.3f}" for rate in rates.values()]
            found.add_row(file.stem, str(batch_size), *cells)
    return found
