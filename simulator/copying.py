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

from controller.core.acceptance.mixtures import MAX_MATCH_LENGTH, MIN_MATCH_LENGTH
from controller.core.engine_spec import MAX_GAMMA
from simulator.curves import require_mean_tokens
from simulator.errors import InvalidInputError, require_within
from simulator.sources import DrawnAcceptance, DrawnSource

_MIN_PROBABILITY = 1e-3
_MAX_SPAN_TOKENS = 1e6
# A chance match is one token longer with this probability.
_LONGER_MATCH_PROBABILITY = 0.3


@dataclass(frozen=True, slots=True)
class CopyingSource(DrawnSource):
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

    def draw_acceptance(
        self, rng: np.random.Generator, output_tokens: NDArray[np.int64]
    ) -> DrawnAcceptance:
        """Draws the spans, the tokens that are easy for the model, and the lookup's matches."""
        ends = np.cumsum(output_tokens)
        positions = int(output_tokens.sum())
        is_last = np.zeros(positions, dtype=bool)
        is_last[ends[output_tokens > 0] - 1] = True
        is_copied = self._draw_copied(rng, output_tokens)
        level = self.easy_spread * rng.standard_normal(len(output_tokens))
        easy = _shift_log_odds(self.easy, level).repeat(output_tokens)
        easy_copied = _shift_log_odds(self.easy_copied, level).repeat(output_tokens)
        is_easy = rng.random(positions) < np.where(is_copied, easy_copied, easy)
        is_faithful = is_copied & (rng.random(positions) < self.faithful)
        chance_match_length, chance_accepted = self._draw_chance_matches(rng, positions)
        match_length = _run_lengths_before(is_faithful, is_last)
        has_copy_match = match_length >= MIN_MATCH_LENGTH
        accepted = np.where(
            has_copy_match, _run_lengths_from(is_faithful, is_last), chance_accepted
        )
        return {
            self.model: _clip_lengths(_run_lengths_from(is_easy, is_last), MAX_GAMMA),
            self.lookup: _clip_lengths(accepted, MAX_GAMMA),
        }, _clip_lengths(
            np.where(has_copy_match, match_length, chance_match_length), MAX_MATCH_LENGTH
        )

    def _draw_copied(
        self, rng: np.random.Generator, output_tokens: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Returns [positions], whether a token is in a copied span."""
        share = _shift_log_odds(
            self.copied, self.copied_spread * rng.standard_normal(len(output_tokens))
        )
        request_spans = [
            _alternate_spans(rng, tokens, float(s), self.copied_tokens)
            for tokens, s in zip(output_tokens.tolist(), share, strict=True)
        ]
        return np.concatenate(request_spans) if request_spans else np.zeros(0, dtype=bool)

    def _draw_chance_matches(
        self, rng: np.random.Generator, positions: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns [positions] lengths of chance matches (0: none), and their accepted drafts."""
        has_match = rng.random(positions) < self.chance
        longer = rng.geometric(1 - _LONGER_MATCH_PROBABILITY, positions) - 1
        accepted = rng.geometric(max(1 - self.chance_accepted, _MIN_PROBABILITY), positions) - 1
        return np.where(has_match, MIN_MATCH_LENGTH + longer, 0), np.where(has_match, accepted, 0)


def _shift_log_odds(share: float, shift: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [requests] shares with shifted log-odds; 0 and 1 are unchanged."""
    if share in {0.0, 1.0}:
        return np.full(len(shift), share)
    shifted: NDArray[np.float64] = 1 / (1 + (1 - share) / share * np.exp(-shift))
    return shifted


def _alternate_spans(
    rng: np.random.Generator, tokens: int, share: float, copied_tokens: float
) -> NDArray[np.bool_]:
    """Returns [tokens], whether each is copied; the output begins within the first span."""
    if not _MIN_PROBABILITY < share < 1 - _MIN_PROBABILITY:
        return np.full(tokens, share > 0.5)
    means: Sequence[float] = (copied_tokens * (1 - share) / share, copied_tokens)
    means = [min(max(mean, 1.0), _MAX_SPAN_TOKENS) for mean in means]
    is_copied = bool(rng.random() < share)
    spans: list[NDArray[np.bool_]] = []
    tokens_left = tokens
    while tokens_left > 0:
        span = min(tokens_left, int(rng.geometric(1 / means[is_copied])))
        spans.append(np.full(span, is_copied))
        tokens_left -= span
        is_copied = not is_copied
    return np.concatenate(spans) if spans else np.zeros(0, dtype=bool)


def _run_lengths_from(values: NDArray[np.bool_], is_last: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Counts [positions] true values in a row from each position on, within its request."""
    positions = np.arange(len(values))
    # The position after the run: that of the first false value, or after the request's end.
    end = np.where(values, np.where(is_last, positions + 1, len(values)), positions)
    run_lengths: NDArray[np.int64] = np.minimum.accumulate(end[::-1])[::-1] - positions
    return run_lengths


def _run_lengths_before(values: NDArray[np.bool_], is_last: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Counts [positions] true values in a row before each position, within its request."""
    positions = np.arange(len(values))
    broken = np.concatenate(([True], ~values[:-1] | is_last[:-1]))[: len(values)]
    run_lengths: NDArray[np.int64] = positions - np.maximum.accumulate(
        np.where(broken, positions, 0)
    )
    return run_lengths


def _clip_lengths(values: NDArray[np.int64], maximum: int) -> NDArray[np.uint8]:
    return np.minimum(values, maximum).astype(np.uint8)
