"""Recorded acceptance, replayed sequentially: position by position of what was really generated."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.simulation.acceptance_trace_files import RecordedRequest, read_requests, read_rounds
from controller.simulation.errors import InvalidInputError
from controller.simulation.workload import RequestPool

# Rounds tell nothing of requests: so many of one category, in a row, are made into one.
_ROUNDS_A_REQUEST = 256
_CONTEXT_OF_ROUNDS = 384


@dataclass(frozen=True, slots=True)
class AcceptanceTrace:
    """Provides recorded acceptance: recorded requests, each replayed from its first position on.

    The order of the requests is drawn; every one is served once before any is served again.
    Labels of the requests become the classes of the pool.  Raises InvalidInputError for no request.
    """

    name: str
    recorded: tuple[RecordedRequest, ...]

    def __post_init__(self) -> None:
        if not self.recorded:
            raise InvalidInputError(self.name, 0, "there is no request in the bank")

    @classmethod
    def load(cls, paths: Sequence[str | Path], *, labelled: bool = True) -> "AcceptanceTrace":
        """SpecDecode-Bench JSONL files, mixed as they are; see `bank_files.read_requests`.

        labelled: requests are labelled by the stem of their file; else all alike.

        Raises InvalidInputError for what the reader refuses, for no file, and for files that do not
        record the same drafters.
        """
        if not paths:
            raise InvalidInputError("bank", 0, "no file is named")
        files = [Path(path) for path in paths]
        recorded: list[RecordedRequest] = []
        for file in files:
            mine = read_requests(file, file.stem if labelled else "")
            if recorded and recorded[0].accepted.keys() != mine[0].accepted.keys():
                raise InvalidInputError(
                    file, 0,
                    f"drafters {sorted(mine[0].accepted)} are recorded, "
                    f"{sorted(recorded[0].accepted)} in {files[0]}",
                )  # fmt: skip
            recorded += mine
        return cls(_name(files), tuple(recorded))

    @classmethod
    def load_rounds(
        cls, paths: Mapping[str, str | Path], *, labelled: bool = True
    ) -> "AcceptanceTrace":
        """Drafter -> CSV of rounds; see `bank_files.read_rounds`.

        Rounds of a category, in the order of the file, are cut into requests of 256 positions (the
        last one takes what is left over).  A step at any position meets the round of that position,
        so that rounds which fall within an accepted draft are passed over.  Several drafters are
        paired category by category, as far as the shorter record goes.

        labelled: requests are labelled by category; else all alike.

        Raises InvalidInputError for what the reader refuses, for no file, and for a category that
        one of the files lacks.
        """
        if not paths:
            raise InvalidInputError("bank", 0, "no file is named")
        files = {drafter: Path(path) for drafter, path in paths.items()}
        rounds = {drafter: read_rounds(file) for drafter, file in files.items()}
        categories = dict.fromkeys(itertools.chain.from_iterable(rounds.values()))
        recorded: list[RecordedRequest] = []
        for category in categories:
            for drafter, mine in rounds.items():
                if category not in mine:
                    raise InvalidInputError(files[drafter], 0, f"there is no round of {category!r}")
            together = {drafter: mine[category] for drafter, mine in rounds.items()}
            recorded += _cut(category if labelled else "", together)
        return cls(_name(list(files.values())), tuple(recorded))

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that were recorded."""
        return tuple(self.recorded[0].accepted)

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """Draws a pool, as `AcceptanceSource.pool` does.  Own lengths are the recorded ones."""
        chosen = [self.recorded[i] for i in itertools.islice(_orders(rng, self.recorded), requests)]
        if output_tokens is None:
            output_tokens = np.array([r.positions for r in chosen], dtype=np.int64)
        if context_tokens is None:
            context_tokens = np.array([r.context_tokens for r in chosen], dtype=np.int64)
        names = tuple(dict.fromkeys(r.label for r in self.recorded))
        served = list(zip(chosen, output_tokens.tolist(), strict=True))
        return RequestPool(
            context_tokens,
            output_tokens,
            np.cumsum(output_tokens) - output_tokens,
            np.array([names.index(r.label) for r in chosen], dtype=np.int64),
            {
                # np.resize goes on from the beginning where the record ends.
                drafter: np.concatenate(
                    [np.resize(r.accepted[drafter][: r.positions], n) for r, n in served]
                )
                for drafter in self.drafters
            },
            names,
        )


def _orders(rng: np.random.Generator, recorded: Sequence[RecordedRequest]) -> Iterator[int]:
    while True:
        yield from rng.permutation(len(recorded)).tolist()


def _cut(label: str, rounds: Mapping[str, NDArray[np.uint8]]) -> Iterator[RecordedRequest]:
    whole = RecordedRequest(label, _CONTEXT_OF_ROUNDS, rounds)
    pieces = max(1, whole.positions // _ROUNDS_A_REQUEST)
    for piece in range(pieces):
        start = piece * _ROUNDS_A_REQUEST
        end = whole.positions if piece == pieces - 1 else start + _ROUNDS_A_REQUEST
        yield replace(whole, accepted={d: values[start:end] for d, values in rounds.items()})


def _name(files: Sequence[Path]) -> str:
    return "+".join(dict.fromkeys(file.stem for file in files))
