"""Recorded acceptance, replayed position by position along the recorded outputs."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.core.acceptance.mixtures import MAX_MATCH_LENGTH, MIN_MATCH_LENGTH
from controller.core.engine_spec import MAX_GAMMA
from simulator.errors import InvalidInputError
from simulator.text_files import csv_rows, quote_value, text_lines
from simulator.workload import RequestPool

# Rounds do not name requests: this many consecutive rounds of a category form one request.
_ROUNDS_PER_REQUEST = 256
_ROUNDS_CONTEXT_TOKENS = 384


# A line holds one request.  At about 20 bytes per token this is enough for 800,000 tokens.
_MAX_JSON_LINE_BYTES = 16 << 20
_DRAFTER_KEY_PREFIX = "acc_"
_LENGTHS_KEY = "acc_len"
_PROMPT_KEY = "prompt_token_ids"
_OUTPUT_KEY = "generated_token_ids"
_MAX_TOKEN_ID = 1 << 31


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One recorded request.

    kind: its traffic: the file or the category that it comes from.
    accepted: drafter -> [positions or more] of uint8, drafts accepted if drafting started there.
    context_tokens: of its prompt.
    matches: [positions or more] of uint8, tokens of a lookup's match; None if unknown.
    """

    kind: str
    context_tokens: int
    accepted: Mapping[str, NDArray[np.uint8]]
    matches: NDArray[np.uint8] | None = None

    @property
    def positions(self) -> int:
        """Returns the number of output tokens that were recorded for every drafter."""
        return min(len(values) for values in self.accepted.values())


@dataclass(frozen=True, slots=True)
class AcceptanceTrace:
    """Provides recorded acceptance: recorded requests, each replayed from its first position.

    The order of the requests is drawn; all are served once before any is served again.
    labelled: the engine reports their kinds as classes, as if clients set them; otherwise it
    reports no class, like a shim.  Raises InvalidInputError if there is no request.
    """

    name: str
    recorded: tuple[RecordedRequest, ...]
    labelled: bool = False

    def __post_init__(self) -> None:
        if not self.recorded:
            raise InvalidInputError(self.name, 0, "there is no request in the bank")

    @classmethod
    def load(cls, paths: Sequence[str | Path], *, labelled: bool = False) -> "AcceptanceTrace":
        """Reads and concatenates SpecDecode-Bench JSONL files; see `read_requests`.

        The kind of a request is the stem of its file.

        Raises InvalidInputError for the errors of `read_requests`, for no file, and for files with
        different drafters.
        """
        if not paths:
            raise InvalidInputError("bank", 0, "no file is named")
        files = [Path(path) for path in paths]
        recorded: list[RecordedRequest] = []
        for file in files:
            file_requests = read_requests(file, file.stem)
            if recorded and recorded[0].accepted.keys() != file_requests[0].accepted.keys():
                raise InvalidInputError(
                    file, 0,
                    f"drafters {sorted(file_requests[0].accepted)} are recorded, "
                    f"{sorted(recorded[0].accepted)} in {files[0]}",
                )  # fmt: skip
            recorded += file_requests
        return cls(_joined_stems(files), tuple(recorded), labelled)

    @classmethod
    def load_rounds(
        cls, paths: Mapping[str, str | Path], *, labelled: bool = False
    ) -> "AcceptanceTrace":
        """Reads CSVs of rounds, drafter -> file; see `read_rounds`.

        Rounds of a category, in the order of the file, are cut into requests of 256 positions (the
        last request takes the remainder).  A step at a position uses the round of that position, so
        rounds within an accepted draft are skipped.  Several drafters are paired by category, up to
        the length of the shorter record.  The kind of a request is its category.

        Raises InvalidInputError for the errors of `read_rounds`, for no file, and for a category
        that is missing in one of the files.
        """
        if not paths:
            raise InvalidInputError("bank", 0, "no file is named")
        files = {drafter: Path(path) for drafter, path in paths.items()}
        rounds = {drafter: read_rounds(file) for drafter, file in files.items()}
        categories = dict.fromkeys(itertools.chain.from_iterable(rounds.values()))
        recorded: list[RecordedRequest] = []
        for category in categories:
            for drafter, drafter_rounds in rounds.items():
                if category not in drafter_rounds:
                    raise InvalidInputError(files[drafter], 0, f"there is no round of {category!r}")
            category_rounds = {
                drafter: drafter_rounds[category] for drafter, drafter_rounds in rounds.items()
            }
            recorded += _split_rounds(category, category_rounds)
        return cls(_joined_stems(files.values()), tuple(recorded), labelled)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Returns the recorded drafters."""
        return tuple(self.recorded[0].accepted)

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """Draws a pool, as `AcceptanceSource.pool` does.  Default lengths are the recorded ones."""
        permutations = (rng.permutation(len(self.recorded)).tolist() for _ in itertools.count())
        drawn_order = itertools.islice(itertools.chain.from_iterable(permutations), requests)
        chosen = [self.recorded[i] for i in drawn_order]
        if output_tokens is None:
            output_tokens = np.array([r.positions for r in chosen], dtype=np.int64)
        if context_tokens is None:
            context_tokens = np.array([r.context_tokens for r in chosen], dtype=np.int64)
        names = tuple(dict.fromkeys(r.kind for r in self.recorded))
        kinds = np.array([names.index(r.kind) for r in chosen], dtype=np.int64)
        served = list(zip(chosen, output_tokens.tolist(), strict=True))
        return RequestPool(
            context_tokens,
            output_tokens,
            np.cumsum(output_tokens) - output_tokens,
            kinds if self.labelled else np.zeros_like(kinds),
            {
                # np.resize repeats the record from its beginning.
                drafter: np.concatenate(
                    [np.resize(r.accepted[drafter][: r.positions], n) for r, n in served]
                )
                for drafter in self.drafters
            },
            names if self.labelled else ("",),
            kinds,
            _served_matches(served),
        )


def _served_matches(served: Sequence[tuple[RecordedRequest, int]]) -> NDArray[np.uint8] | None:
    """Returns the [positions] match lengths of served (request, tokens); None if unknown."""
    parts = [
        np.resize(request.matches[: request.positions], tokens)
        for request, tokens in served
        if request.matches is not None
    ]
    return np.concatenate(parts) if len(parts) == len(served) > 0 else None


def _split_rounds(kind: str, rounds: Mapping[str, NDArray[np.uint8]]) -> Iterator[RecordedRequest]:
    full_request = RecordedRequest(kind, _ROUNDS_CONTEXT_TOKENS, rounds)
    pieces = max(1, full_request.positions // _ROUNDS_PER_REQUEST)
    for piece in range(pieces):
        start = piece * _ROUNDS_PER_REQUEST
        end = full_request.positions if piece == pieces - 1 else start + _ROUNDS_PER_REQUEST
        yield replace(full_request, accepted={d: values[start:end] for d, values in rounds.items()})


def _joined_stems(files: Iterable[Path]) -> str:
    return "+".join(dict.fromkeys(file.stem for file in files))


def read_requests(path: Path, kind: str) -> list[RecordedRequest]:
    """Reads SpecDecode-Bench JSONL (arXiv 2601.11580): one request per line, all of this kind.

    Every key `acc_NAME` is a drafter.  Its `acc_len` lists, for every output position, the tokens
    that a step there gains: the accepted drafts and the bonus token, so 1 means no accepted draft.
    If the lists of a request differ in length, the positions that all drafters have are used.
    `prompt_token_ids` is the context.  `generated_token_ids`, the output from the first position
    on, gives together with the prompt the matches of a prompt lookup.

    Raises InvalidInputError with the line: not JSON, a missing key, an empty list, an invalid
    token, an output shorter than the positions, a length that is not an integer in
    [1, MAX_GAMMA + 1], or other drafters than in the first line; and for a file without a request.
    """
    requests: list[RecordedRequest] = []
    for line, text in text_lines(path, _MAX_JSON_LINE_BYTES):
        if text.strip():
            recorded = _parse_request(path, line, text, kind)
            if requests and recorded.accepted.keys() != requests[0].accepted.keys():
                drafters, first_drafters = sorted(recorded.accepted), sorted(requests[0].accepted)
                fault = f"drafters {drafters} are recorded, {first_drafters} in the first line"
                raise InvalidInputError(path, line, fault)
            requests.append(recorded)
    if not requests:
        raise InvalidInputError(path, 0, "there is no request in the file")
    return requests


def _parse_request(path: Path, line: int, text: str, kind: str) -> RecordedRequest:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(path, line, f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInputError(path, line, f"an object is needed, not {type(body).__name__}")
    prompt = body.get(_PROMPT_KEY)
    if not isinstance(prompt, list):
        raise InvalidInputError(
            path, line, f"a list {_PROMPT_KEY!r} is needed, not {quote_value(prompt)}"
        )
    names = [
        key for key in body if key.startswith(_DRAFTER_KEY_PREFIX) and key != _DRAFTER_KEY_PREFIX
    ]
    if not names:
        raise InvalidInputError(path, line, f"no key {_DRAFTER_KEY_PREFIX}NAME names a drafter")
    accepted = {
        name.removeprefix(_DRAFTER_KEY_PREFIX): _parse_accepted(path, line, name, body[name])
        for name in names
    }
    request = RecordedRequest(kind, len(prompt), accepted)
    if (output := body.get(_OUTPUT_KEY)) is None:
        return request
    if not isinstance(output, list) or len(output) < request.positions:
        fault = f"{_OUTPUT_KEY!r} is not a list of {request.positions} tokens or more"
        raise InvalidInputError(path, line, fault)
    tokens = [*prompt, *output]
    for token in tokens:
        if type(token) is not int or not 0 <= token < _MAX_TOKEN_ID:
            raise InvalidInputError(path, line, f"{quote_value(token)} is not a token")
    return replace(request, matches=match_lengths(np.array(tokens, dtype=np.int64), len(prompt)))


def _parse_accepted(path: Path, line: int, name: str, value: object) -> NDArray[np.uint8]:
    lengths = value.get(_LENGTHS_KEY) if isinstance(value, dict) else None
    key_path = f"{name}.{_LENGTHS_KEY}"
    if not isinstance(lengths, list):
        raise InvalidInputError(
            path, line, f"a list {key_path} is needed, not {quote_value(lengths)}"
        )
    if not lengths:
        raise InvalidInputError(path, line, f"{key_path} is empty")
    for position, length in enumerate(lengths):
        if type(length) is not int:
            fault = f"{key_path}[{position}] is {quote_value(length)}, not an integer"
            raise InvalidInputError(path, line, fault)
        if not 1 <= length <= MAX_GAMMA + 1:
            fault = (
                f"{key_path}[{position}] is {quote_value(length)}, must be in [1, {MAX_GAMMA + 1}]"
            )
            raise InvalidInputError(path, line, fault)
    return (np.array(lengths, dtype=np.int64) - 1).astype(np.uint8)


def read_rounds(path: Path) -> dict[str, NDArray[np.uint8]]:
    """Reads a CSV with header `commits,category,...`; returns category -> [rounds] of uint8.

    As in inference-lab, `commits` counts the drafts that were accepted when the full depth was
    drafted, without the bonus token: a draft cut to gamma accepts min(commits, gamma).  Further
    columns (a0, a1, ...: confidences) are ignored.

    Raises InvalidInputError with the line: a missing column, a wrong number of fields, commits that
    is not an integer in [0, MAX_GAMMA]; and for a file without a round.
    """
    rounds: dict[str, list[int]] = {}
    for row in csv_rows(path, ("commits", "category"), allow_other_columns=True):
        rounds.setdefault(row.fields["category"], []).append(row.integer("commits", 0, MAX_GAMMA))
    return {category: np.array(values, dtype=np.uint8) for category, values in rounds.items()}


def match_lengths(tokens: NDArray[np.int64], prompt_length: int) -> NDArray[np.uint8]:
    """Returns [outputs] lengths of the longest repeated suffix, 2 to 5 tokens; 0 for none.

    tokens: prompt and output.  prompt_length: length of the prompt.  Entry p is the match of a
    lookup when the prompt and p tokens of the output are known.
    """
    count = len(tokens)
    lengths = np.zeros(count, dtype=np.uint8)
    # Equal numbers for equal sequences of k tokens, by their first token.
    sequence_ids = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    for k in range(2, min(MAX_MATCH_LENGTH, count) + 1):
        pairs = sequence_ids[:-1] * count + np.unique(tokens[k - 1 :], return_inverse=True)[1]
        _, first_positions, sequence_ids = np.unique(pairs, return_index=True, return_inverse=True)
        repeated = first_positions[sequence_ids] < np.arange(len(sequence_ids))
        if k >= MIN_MATCH_LENGTH:
            # A sequence that begins at i is the suffix when i + k tokens are known.
            match_ends = np.flatnonzero(repeated) + k
            lengths[match_ends[match_ends < count]] = k
    return lengths[prompt_length:]
