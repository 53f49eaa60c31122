"""Acceptance drawn from curves: P(position k accepted | k-1 were), independently step by step.

It also parses acceptance on a command line, either a curve or a recorded bank:

    geometric:0.7    positions:0.8,0.7,0.6    survival:0.779,0.583    FILE    mtp=... ; dflash=...
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import MAX_GAMMA
from simulator.acceptance_trace import AcceptanceTrace
from simulator.errors import InvalidInputError
from simulator.sources import DrawnAcceptance, DrawnSource
from simulator.text_files import parse_finite, quote_value
from simulator.workload import AcceptanceSource

_DRAFTER_PATTERN = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*=(.*)", re.DOTALL)
_CURVE_PATTERN = re.compile(r"\s*(geometric|positions|survival)\s*:(.*)", re.DOTALL)


class CurveSource(DrawnSource):
    """Draws acceptance from curves: drafter -> conditional acceptance a_1, a_2, ..."""

    name: str
    curves: Mapping[str, Sequence[float]]

    @property
    def drafters(self) -> tuple[str, ...]:
        """Returns the drafters that have a curve."""
        return tuple(self.curves)

    def require_curves(self) -> None:
        """Raises InvalidInputError for invalid curves and means; see `IndependentCurves`."""
        if not self.curves:
            raise InvalidInputError(self.name, 0, "no drafter is named")
        for drafter, curve in self.curves.items():
            require_curve(f"{self.name}, {drafter or 'a drafter without name'}", curve)
        require_mean_tokens(self.name, self.output_tokens_mean, self.context_tokens_mean)


@dataclass(frozen=True, slots=True)
class IndependentCurves(CurveSource):
    """Draws acceptance from curves.  curves: drafter -> conditional acceptance a_1, a_2, ...

    At every output position of a request a chain of drafts is drawn that ends at its first
    rejection; positions deeper than the curve reject.  Requests without given lengths have
    lognormal lengths (sigma 0.5, at least 8 tokens) with these means.

    Raises InvalidInputError: no drafter, no position, more positions than a draft can have, a value
    outside [0, 1], a mean below 1.
    """

    name: str
    curves: Mapping[str, Sequence[float]]
    output_tokens_mean: float = 256.0
    context_tokens_mean: float = 384.0

    def __post_init__(self) -> None:
        self.require_curves()

    def draw_acceptance(
        self, rng: np.random.Generator, output_tokens: NDArray[np.int64]
    ) -> DrawnAcceptance:
        """Draws every drafter independently."""
        positions = int(output_tokens.sum())
        return {drafter: self.draw(drafter, rng, positions) for drafter in self.curves}, None

    def draw(self, drafter: str, rng: np.random.Generator, positions: int) -> NDArray[np.uint8]:
        """Returns [positions] accepted drafts: the number of k with u < s_k."""
        rising = np.cumprod(np.array(self.curves[drafter], dtype=np.float64))[::-1]
        below = np.searchsorted(rising, rng.random(positions), side="right")
        return (len(rising) - below).astype(np.uint8)


def geometric_curve(alpha: float) -> list[float]:
    """Returns the curve a_k = alpha, for every position that a draft can have."""
    return [alpha] * MAX_GAMMA


def conditional_curve(survival: Sequence[float]) -> list[float]:
    """Returns a_k = s_k / s_(k-1), s_0 = 1; 0 after a position that is never reached.

    Raises InvalidInputError for a survival curve that rises or is not in [0, 1].
    """
    require_curve("survival", survival)
    curve = []
    previous = 1.0
    for k, s in enumerate(survival, 1):
        if s > previous:
            raise InvalidInputError(
                "survival",
                0,
                f"position {k}: {s} is more than {previous}, and survival cannot rise",
            )
        curve.append(s / previous if previous > 0 else 0.0)
        previous = s
    return curve


def require_mean_tokens(location: str, *means: float) -> None:
    """Raises InvalidInputError for a mean outside [1, 1e9] tokens."""
    for mean in means:
        if not 1 <= mean <= 1e9:
            raise InvalidInputError(location, 0, f"a mean of {mean} tokens must be in [1, 1e9]")


def require_curve(location: str, values: Sequence[float]) -> None:
    """Raises InvalidInputError for no position, too many, or a value outside [0, 1]."""
    if not 1 <= len(values) <= MAX_GAMMA:
        raise InvalidInputError(
            location, 0, f"{len(values)} positions are given, 1 to {MAX_GAMMA} are needed"
        )
    for k, value in enumerate(values, 1):
        if not 0 <= value <= 1:
            raise InvalidInputError(
                location, 0, f"position {k}: {quote_value(value)} must be in [0, 1]"
            )


def parse_acceptance(text: str, drafters: Sequence[str] = ("mtp",)) -> AcceptanceSource:
    """Parses a curve for every drafter, or a recorded bank; semicolons separate the parts.

    `geometric:A` (a_k = A), `positions:A1,A2,...` (conditional acceptance) and
    `survival:S1,S2,...` are curves: of the drafter named before an equals sign, or of all
    `drafters`.  Anything else is a file: SpecDecode-Bench JSONL, several of which are mixed, or
    CSVs of rounds (`.csv`), one a drafter.

    Raises InvalidInputError: an empty text, a value that is not a number in [0, 1], a drafter with
    two curves, curves and files in one text, a file that `AcceptanceTrace` refuses.
    """
    parts = [part for part in text.split(";") if part.strip()]
    if not parts:
        raise InvalidInputError("acceptance", 0, "nothing is named: try geometric:0.7, or a file")
    named_parts = [_split_drafter(part) for part in parts]
    kinds = [_CURVE_PATTERN.fullmatch(body) for _, body in named_parts]
    if not any(kinds):
        return _load_trace(named_parts, drafters)
    curves: dict[str, list[float]] = {}
    for (drafter, body), kind in zip(named_parts, kinds, strict=True):
        if kind is None:
            fault = f"{quote_value(body)} is not a curve, and files cannot be combined with curves"
            raise InvalidInputError("acceptance", 0, fault)
        curve = _parse_curve(body.strip(), kind[1], kind[2])
        for name in (drafter,) if drafter else drafters:
            if name in curves:
                raise InvalidInputError("acceptance", 0, f"drafter {name!r} has two curves")
            curves[name] = curve
    return IndependentCurves(" ".join(text.split()), curves)


def _split_drafter(part: str) -> tuple[str, str]:
    """Splits a part into (drafter or "", the curve or file)."""
    drafter_match = _DRAFTER_PATTERN.fullmatch(part)
    return (drafter_match[1], drafter_match[2]) if drafter_match else ("", part)


def _parse_curve(location: str, kind: str, values: str) -> list[float]:
    numbers = []
    for value in values.split(","):
        number = parse_finite(value.strip())
        if number is None or not 0 <= number <= 1:
            fault = f"{quote_value(value)} is not a probability, must be in [0, 1]"
            raise InvalidInputError(quote_value(location), 0, fault)
        numbers.append(number)
    if kind == "geometric" and len(numbers) > 1:
        raise InvalidInputError(quote_value(location), 0, "one number is needed")
    if kind == "geometric":
        return geometric_curve(numbers[0])
    return conditional_curve(numbers) if kind == "survival" else numbers


def _load_trace(named_parts: Sequence[tuple[str, str]], drafters: Sequence[str]) -> AcceptanceTrace:
    files = [(drafter, Path(body.strip())) for drafter, body in named_parts]
    rounds = [file.suffix.lower() == ".csv" for _, file in files]
    if all(rounds):
        if len(files) == 1 and not files[0][0] and len(drafters) == 1:
            return AcceptanceTrace.load_rounds({drafters[0]: files[0][1]})
        by_drafter = {drafter: file for drafter, file in files if drafter}
        if len(by_drafter) < len(files):
            fault = "the drafter of these rounds is missing: name each file once, DRAFTER=FILE"
            raise InvalidInputError(files[0][1], 0, fault)
        return AcceptanceTrace.load_rounds(by_drafter)
    for (drafter, file), is_rounds in zip(files, rounds, strict=True):
        if is_rounds:
            raise InvalidInputError(file, 0, "rounds (.csv) and requests cannot be mixed")
        if drafter:
            fault = f"names its drafters itself; leave {drafter}= out"
            raise InvalidInputError(file, 0, fault)
    return AcceptanceTrace.load([file for _, file in files])
