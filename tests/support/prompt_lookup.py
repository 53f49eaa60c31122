"""Prompt lookup, worked out without any tensor, and requests as the plugin meets them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from engine_shim.sglang.drafters.lookup import MAX_MATCH_TOKENS, MIN_MATCH_TOKENS


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


def look_up(tokens: Sequence[int], gamma: int) -> tuple[int, list[int]]:
    """The length of the longest match, and gamma drafts; (0, []) without a match."""
    newest = len(tokens) - 1
    for length in range(MAX_MATCH_TOKENS, MIN_MATCH_TOKENS - 1, -1):
        suffix = tokens[newest + 1 - length :]
        for end in range(newest - 1, length - 2, -1):
            if list(tokens[end + 1 - length : end + 1]) == list(suffix):
                return length, [tokens[end + 1 + k % (newest - end)] for k in range(gamma)]
    return 0, []
