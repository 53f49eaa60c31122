"""Acceptance of requests that copy from their prompt: code that is edited, texts that are quoted.

Copied and written spans of geometric lengths alternate.  Whether a token is easy for the drafting
model does not depend on the step, so its drafts from p on are accepted up to the first hard token.
A lookup finds the copied text after two tokens of the copy, and proposes the text that follows.
Its proposal is accepted to the end of the span, or to a token that differs from the copied text;
after that token the lookup has to find the text again.

    copied    c c c c c x c c c c c . . . . . .    x: differs, .: written
    match     0 0 2 3 4 5 0 0 2 3 4 5 0 0 0 0 0    where it is 0, a short match by chance may be
    accepted  0 0 3 2 1 0 0 0 3 2 1 0 0 0 0 0 0
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.mixtures import LEAST_MATCH, LONGEST_MATCH
from controller.core.engine_spec import MAX_GAMMA
from simulator.curves import require_mean_tokens
from simulator.errors import InvalidInputError, require_within
from simulator.sources import Drawn, DrawnSource

_NEVER = 1e-3
_SPAN_MOST = 1e6
# A chance match is one token longer with this probability.
_LONGER = 0.3


@dataclass(frozen=True, slots=True)
class Copying(DrawnSource):
    """Draws such requests for a drafting model and a lookup, given by name.

    copied: copied share of the output, for the median request; copied_spread: standard deviation of
    its log-odds over requests.  copied_tokens: mean length of a copied span.
    faithful: probability that a token of a span equals the copied text.
    easy, easy_copied: probability that the model's draft of a token is accepted, in written and in
    copied text, for the median request; easy_spread: as copied_spread.
    chance: probability that the lookup finds a match elsewhere; chance_accepted: probability that a
    token of that match is accepted.

    The defaults resemble recorded code editing.  Raises InvalidInputError for values out of range.
    """

    name: str
    model: str = "eagle"
    lookup: str = "ngram"
    copied: float = 0.4
    copied_spread: float = 2.0
    copied_tokens: float = 30.0
    faithful: float = 0.97
    easy: float = 0.66
    easy_copied: float = 0.76
    easy_spread: float = 0.4
    chance: float = 0.3
    chance_accepted: float = 0.4
    output_tokens_mean: float = 256.0
    context_tokens_mean: float = 384.0

    def __post_init__(self) -> None:
        if self.model == self.lookup:
            raise InvalidInputError(self.name, 0, f"{self.model!r} is the model and the lookup")
        shares = ("copied", "faithful", "easy", "easy_copied", "chance", "chance_accepted")
        require_within(self, 0, 1, *shares)
        require_within(self, 0, 20, "copied_spread", "easy_spread")
        means = (self.copied_tokens, self.output_tokens_mean, self.context_tokens_mean)
        require_mean_tokens(self.name, *means)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Returns the names of the model and of the lookup."""
        return (self.model, self.lookup)

    def drawn(self, rng: np.random.Generator, output_tokens: NDArray[np.int64]) -> Drawn:
        """Draws the spans, the tokens that are easy for the model, and the lookup's matches."""
        ends = np.cumsum(output_tokens)
        positions = int(output_tokens.sum())
        is_last = np.zeros(positions, dtype=bool)
        is_last[ends[output_tokens > 0] - 1] = True
        is_copied = self._spans(rng, output_tokens)
        level = self.easy_spread * rng.standard_normal(len(output_tokens))
        easy = _shifted(self.easy, level).repeat(output_tokens)
        easy_copied = _shifted(self.easy_copied, level).repeat(output_tokens)
        is_easy = rng.random(positions) < np.where(is_copied, easy_copied, easy)
        follows = is_copied & (rng.random(positions) < self.faithful)
        matched, proposed = self._chance(rng, positions)
        behind = _run_before(follows, is_last)
        found = behind >= LEAST_MATCH
        accepted = np.where(found, _run_from(follows, is_last), proposed)
        return {
            self.model: _as_lengths(_run_from(is_easy, is_last), MAX_GAMMA),
            self.lookup: _as_lengths(accepted, MAX_GAMMA),
        }, _as_lengths(np.where(found, behind, matched), LONGEST_MATCH)

    def _spans(
        self, rng: np.random.Generator, output_tokens: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Returns [positions], whether a token is in a copied span."""
        share = _shifted(self.copied, self.copied_spread * rng.standard_normal(len(output_tokens)))
        whole = [
            _alternating(rng, tokens, float(s), self.copied_tokens)
            for tokens, s in zip(output_tokens.tolist(), share, strict=True)
        ]
        return np.concatenate(whole) if whole else np.zeros(0, dtype=bool)

    def _chance(
        self, rng: np.random.Generator, positions: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns [positions] lengths of chance matches (0: none), and their accepted drafts."""
        has_match = rng.random(positions) < self.chance
        longer = rng.geometric(1 - _LONGER, positions) - 1
        accepted = rng.geometric(max(1 - self.chance_accepted, _NEVER), positions) - 1
        return np.where(has_match, LEAST_MATCH + longer, 0), np.where(has_match, accepted, 0)


def _shifted(share: float, shift: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [requests] shares with shifted log-odds; 0 and 1 are unchanged."""
    if share in {0.0, 1.0}:
        return np.full(len(shift), share)
    found: NDArray[np.float64] = 1 / (1 + (1 - share) / share * np.exp(-shift))
    return found


def _alternating(
    rng: np.random.Generator, tokens: int, share: float, copied_tokens: float
) -> NDArray[np.bool_]:
    """Returns [tokens], whether each is copied; the output begins within the first span."""
    if not _NEVER < share < 1 - _NEVER:
        return np.full(tokens, share > 0.5)
    means: Sequence[float] = (copied_tokens * (1 - share) / share, copied_tokens)
    means = [min(max(mean, 1.0), _SPAN_MOST) for mean in means]
    is_copied = bool(rng.random() < share)
    spans: list[NDArray[np.bool_]] = []
    left = tokens
    while left > 0:
        span = min(left, int(rng.geometric(1 / means[is_copied])))
        spans.append(np.full(span, is_copied))
        left -= span
        is_copied = not is_copied
    return np.concatenate(spans) if spans else np.zeros(0, dtype=bool)


def _run_from(values: NDArray[np.bool_], is_last: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Counts [positions] true values in a row from each position on, within its request."""
    at = np.arange(len(values))
    # The position after the run: that of the first false value, or after the request's end.
    end = np.where(values, np.where(is_last, at + 1, len(values)), at)
    found: NDArray[np.int64] = np.minimum.accumulate(end[::-1])[::-1] - at
    return found


def _run_before(values: NDArray[np.bool_], is_last: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Counts [positions] true values in a row before each position, within its request."""
    at = np.arange(len(values))
    broken = np.concatenate(([True], ~values[:-1] | is_last[:-1]))[: len(values)]
    found: NDArray[np.int64] = at - np.maximum.accumulate(np.where(broken, at, 0))
    return found


def _as_lengths(values: NDArray[np.int64], most: int) -> NDArray[np.uint8]:
    return np.minimum(values, most).astype(np.uint8)
