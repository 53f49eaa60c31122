"""Files of recorded acceptance, read into sequences of accepted drafts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import MAX_GAMMA
from controller.simulation.errors import InvalidInputError
from controller.simulation.reading import csv_rows, shown, text_lines

# A line holds a request.  About 20 bytes a token: this is room for 800,000 of them.
_JSON_LINE_BYTES_MAX = 16 << 20
_PREFIX = "acc_"
_LENGTHS = "acc_len"
_PROMPT = "prompt_token_ids"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One recorded request.

    accepted: drafter -> [positions or more] of uint8, drafts accepted if drafting started there.
    context_tokens: of its prompt.
    """

    label: str
    context_tokens: int
    accepted: Mapping[str, NDArray[np.uint8]]

    @property
    def positions(self) -> int:
        """Output tokens that were recorded of every drafter."""
        return min(len(values) for values in self.accepted.values())


def read_requests(path: Path, label: str) -> list[RecordedRequest]:
    """SpecDecode-Bench JSONL (arXiv 2601.11580): one request a line.

    Every key `acc_NAME` is a drafter; its `acc_len` lists, for every output position, the tokens
    that a step there gains: the accepted drafts and the bonus token, so that 1 is nothing accepted.
    Where the lists of a request differ in length, the positions that all drafters have count.
    `prompt_token_ids` is the context.

    Raises InvalidInputError with the line: not JSON, a key that is missing, a list that is empty,
    a length that is no whole number or leaves 1..MAX_GAMMA + 1, drafters other than the first
    line's; and for a file without a request.
    """
    found: list[RecordedRequest] = []
    for line, text in text_lines(path, _JSON_LINE_BYTES_MAX):
        if text.strip():
            recorded = _request(path, line, text, label)
            if found and recorded.accepted.keys() != found[0].accepted.keys():
                drafters, first = sorted(recorded.accepted), sorted(found[0].accepted)
                fault = f"drafters {drafters} are recorded, {first} in the first line"
                raise InvalidInputError(path, line, fault)
            found.append(recorded)
    if not found:
        raise InvalidInputError(path, 0, "there is no request in the file")
    return found


def _request(path: Path, line: int, text: str, label: str) -> RecordedRequest:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(path, line, f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInputError(path, line, f"an object is needed, not {type(body).__name__}")
    prompt = body.get(_PROMPT)
    if not isinstance(prompt, list):
        raise InvalidInputError(path, line, f"a list {_PROMPT!r} is needed, not {shown(prompt)}")
    names = [key for key in body if key.startswith(_PREFIX) and key != _PREFIX]
    if not names:
        raise InvalidInputError(path, line, f"no key {_PREFIX}NAME names a drafter")
    accepted = {
        name.removeprefix(_PREFIX): _accepted(path, line, name, body[name]) for name in names
    }
    return RecordedRequest(label, len(prompt), accepted)


def _accepted(path: Path, line: int, name: str, value: object) -> NDArray[np.uint8]:
    lengths = value.get(_LENGTHS) if isinstance(value, dict) else None
    where = f"{name}.{_LENGTHS}"
    if not isinstance(lengths, list):
        raise InvalidInputError(path, line, f"a list {where} is needed, not {shown(lengths)}")
    if not lengths:
        raise InvalidInputError(path, line, f"{where} is empty")
    for position, length in enumerate(lengths):
        if type(length) is not int:
            fault = f"{where}[{position}] is {shown(length)}, no whole number"
            raise InvalidInputError(path, line, fault)
        if not 1 <= length <= MAX_GAMMA + 1:
            fault = f"{where}[{position}] is {shown(length)}, which leaves 1..{MAX_GAMMA + 1}"
            raise InvalidInputError(path, line, fault)
    return (np.array(lengths, dtype=np.int64) - 1).astype(np.uint8)


def read_rounds(path: Path) -> dict[str, NDArray[np.uint8]]:
    """Category -> [rounds] of uint8, accepted drafts: a CSV with header `commits,category,...`.

    As inference-lab writes and reads it, `commits` counts the drafts that were accepted when the
    full depth was drafted, the bonus token excluded: a draft cut to gamma accepts
    min(commits, gamma).  The further columns (a0, a1, ...: confidences) are left out.

    Raises InvalidInputError with the line: no such columns, a field count that does not fit,
    commits that is no whole number or leaves 0..MAX_GAMMA; and for a file without a round.
    """
    rounds: dict[str, list[int]] = {}
    for row in csv_rows(path, ("commits", "category"), others=True):
        rounds.setdefault(row.fields["category"], []).append(row.whole("commits", 0, MAX_GAMMA))
    return {category: np.array(values, dtype=np.uint8) for category, values in rounds.items()}
