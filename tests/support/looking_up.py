"""Prompt lookup, worked out without any tensor, and requests as the plugin meets them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from engine_shim.sglang.drafters.lookup import LEAST_MATCH, LONGEST_MATCH


@dataclass
class Request:
    """The parts of SGLang's `Req` that a lookup reads."""

    rid: str
    row: int
    tokens: Sequence[int]
    output_ids: list[int] = field(default_factory=list)

    @property
    def kv(self) -> SimpleNamespace:
        return SimpleNamespace(req_pool_idx=self.row)

    @property
    def origin_input_ids(self) -> Sequence[int]:
        return self.tokens

    def get_fill_ids(self) -> Sequence[int]:
        return self.tokens


def looked_up(known: Sequence[int], gamma: int) -> tuple[int, list[int]]:
    """The length of the longest match, and gamma drafts; (0, []) without a match."""
    newest = len(known) - 1
    for length in range(LONGEST_MATCH, LEAST_MATCH - 1, -1):
        suffix = known[newest + 1 - length :]
        for end in range(newest - 1, length - 2, -1):
            if list(known[end + 1 - length : end + 1]) == list(suffix):
                return length, [known[end + 1 + k % (newest - end)] for k in range(gamma)]
    return 0, []
