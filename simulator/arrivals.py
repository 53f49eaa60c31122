"""Reads arrivals and lengths of requests from recorded traffic, or draws the times."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.errors import InvalidInputError
from simulator.reading import Row, csv_rows, finite, shown

_TIME, _CONTEXT, _OUTPUT = "timestamp", "contexttokens", "generatedtokens"
_TOKENS_MAX = 10_000_000
_SECONDS_MAX = 1e12


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests in the order in which they come.

    arrival_seconds: [requests] of float64, ascending, from 0.  context_tokens, output_tokens:
    [requests] of int64.
    """

    arrival_seconds: NDArray[np.float64]
    context_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


def read_arrivals(path: str | Path, limit: int | None = None, speed: float = 1.0) -> Arrivals:
    """Reads a CSV with TIMESTAMP, ContextTokens, GeneratedTokens, as Azure's LLM traces have.

    Column names in any case and order, further columns are left out.  TIMESTAMP: ISO 8601 (a blank
    for the T, more than six decimals and a time zone are all right) or seconds as a number, the
    same in all rows.  limit: only the first so many requests are read.  speed: 2 makes the requests
    come twice as fast.

    Raises InvalidInputError with the line: a column, field or number that is missing, a time that
    is invalid or lies before the one above it, an output below 1; and for a file without a request.
    """
    if limit is not None and limit < 1:
        raise InvalidInputError(path, 0, f"a limit of {limit} leaves no request")
    if not (math.isfinite(speed) and speed > 0):
        raise InvalidInputError(path, 0, f"a speed of {speed} is out of range, 1 is as recorded")
    times: list[float | datetime] = []
    seconds: list[float] = []
    contexts: list[int] = []
    outputs: list[int] = []
    rows = csv_rows(Path(path), (_TIME, _CONTEXT, _OUTPUT), others=True)
    for row in itertools.islice(rows, limit):
        times.append(_time(row))
        seconds.append(_since(row, times[0], times[-1]))
        if len(seconds) > 1 and seconds[-1] < seconds[-2]:
            raise row.fault(f"{_TIME} {shown(row.text(_TIME))} lies before that of the row above")
        contexts.append(row.whole(_CONTEXT, 0, _TOKENS_MAX))
        outputs.append(row.whole(_OUTPUT, 1, _TOKENS_MAX))
    return Arrivals(
        np.array(seconds, dtype=np.float64) / speed,
        np.array(contexts, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
    )


def poisson_seconds(
    rng: np.random.Generator, rates: Sequence[tuple[int, float]]
) -> NDArray[np.float64]:
    """[requests] arrival times of a Poisson process, ascending, in seconds from its beginning.

    rates: (seconds, requests per second) one after the other.
    """
    per_second = np.repeat([rate for _, rate in rates], [seconds for seconds, _ in rates])
    counts = rng.poisson(per_second)
    return np.sort(np.repeat(np.arange(len(counts)), counts) + rng.random(counts.sum()))


def _time(row: Row) -> float | datetime:
    text = row.text(_TIME)
    seconds = finite(text)
    if seconds is None:
        try:
            return datetime.fromisoformat(text)
        except ValueError as error:
            raise row.fault(
                f"{_TIME} {shown(text)} is neither a time nor a number of seconds"
            ) from error
    if abs(seconds) > _SECONDS_MAX:
        raise row.fault(f"{_TIME} {shown(text)} is not a number of seconds")
    return seconds


def _since(row: Row, first: float | datetime, now: float | datetime) -> float:
    if isinstance(first, float) and isinstance(now, float):
        return now - first
    if isinstance(first, datetime) and isinstance(now, datetime):
        if (first.tzinfo is None) == (now.tzinfo is None):
            return (now - first).total_seconds()
        raise row.fault(f"{_TIME}: some rows name a time zone and some do not")
    raise row.fault(f"{_TIME}: some rows are numbers of seconds and some are dates")
