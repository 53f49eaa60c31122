"""What a target's sampled tokens have to be distributed like, and whether some are.

The law is computed from the checkpoint in plain torch and numpy, without anything of the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lab.cpu_engine.models.targets import load_target
from tests.support.engine import TARGET

Row: TypeAlias = npt.NDArray[np.float64]
Answer: TypeAlias = tuple[int, ...]
Law: TypeAlias = Mapping[Answer, float]

# A cell of the test stands for at least this number of expected answers; rarer ones share one.
MIN_EXPECTED = 5.0


@dataclass(frozen=True)
class Sampling:
    """How a request asks for its tokens."""

    temperature: float
    top_k: int
    top_p: float = 1.0

    def restrict(self, logits: Row) -> Row:
        """Probabilities [vocabulary]: top_k of all, then top_p of those, scaled to sum to 1."""
        weights = np.exp((logits - logits.max()) / self.temperature)
        probs = weights / weights.sum()
        order = np.argsort(-probs)
        probs[order[self.top_k :]] = 0
        probs /= probs.sum()
        cumulative = np.cumsum(probs[order]) - probs[order]
        probs[order[cumulative >= self.top_p]] = 0
        restricted: Row = probs / probs.sum()
        return restricted


Verification: TypeAlias = Callable[[Row], Row]


def exact(probs: Row) -> Row:
    """A verification that keeps the distribution, whatever was drafted."""
    return probs


def always_accept(probs: Row) -> Row:
    """A wrong one: a drafted token, here the likeliest, is always accepted."""
    wrong = np.zeros_like(probs)
    wrong[probs.argmax()] = 1
    return wrong


def redraw_from_all(probs: Row) -> Row:
    """A wrong one: what was rejected, here the likeliest, may be drawn again."""
    draft = probs.argmax()
    wrong: Row = probs * (1 - probs[draft])
    wrong[draft] += probs[draft]
    return wrong


def law_of_answers(
    prompt: Sequence[int],
    length: int,
    sampling: Sampling,
    verification: Verification = exact,
    drafted: float = 1.0,
) -> Law:
    """The probability of every answer of a length.

    verification: what happens to the target's probabilities where a token was drafted, which is a
    share `drafted` of all but the first one: that is the prefill's.
    """
    target = load_target(TARGET)
    law: dict[Answer, float] = {(): 1.0}
    for place in range(length):
        rows = torch.tensor([[*prompt, *answer] for answer in law])
        with torch.no_grad():
            logits, _ = target.logits_and_features(rows, ())
        longer: dict[Answer, float] = {}
        for (answer, probability), row in zip(
            law.items(), logits[:, -1].double().numpy(), strict=True
        ):
            probs = sampling.restrict(row)
            if place:
                probs = (1 - drafted) * probs + drafted * verification(probs)
            for token in np.flatnonzero(probs):
                longer[*answer, int(token)] = probability * float(probs[token])
        law = longer
    return law


def p_value(answers: Counter[Answer], law: Law) -> float:
    """How likely answers at least as far from the law are, by the G-test; 0 for impossible ones."""
    if set(answers) - set(law):
        return 0.0
    cells = list(law)
    counts = np.array([[answers[cell] for cell in cells]], dtype=np.float64)
    return float(p_values(counts, np.array([law[cell] for cell in cells]))[0])


def power(wrong: Law, law: Law, count: int, alpha: float, trials: int = 2000) -> float:
    """The share of trials whose p-value is below alpha, each of `count` answers of a wrong law."""
    cells = list(law)
    probs = np.array([wrong.get(cell, 0.0) for cell in cells])
    counts = np.random.default_rng(0).multinomial(count, probs / probs.sum(), size=trials)
    trial_p_values = p_values(counts.astype(np.float64), np.array([law[cell] for cell in cells]))
    return float((trial_p_values < alpha).mean())


def p_values(counts: Row, probs: Row) -> Row:
    """Of each row of counts [rows, cells]; probs: [cells]."""
    expected = probs * counts[0].sum()
    rare = expected < MIN_EXPECTED
    observed = np.column_stack([counts[:, ~rare], counts[:, rare].sum(1)])
    expected_cells = np.append(expected[~rare], expected[rare].sum())
    if not rare.any():
        observed, expected_cells = observed[:, :-1], expected_cells[:-1]
    terms = observed * np.log(np.where(observed > 0, observed, 1.0) / expected_cells)
    freedom = torch.tensor((len(expected_cells) - 1) / 2, dtype=torch.float64)
    tail_probabilities: Row = torch.special.gammaincc(freedom, torch.tensor(terms.sum(1))).numpy()
    return tail_probabilities
