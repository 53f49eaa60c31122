"""Generates load of a given batch size: distinct prompts of a given length, in one request."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.profiling.engine_http import EngineHttp, EngineLimits, Generation
from controller.profiling.errors import ProfilingUsageError

# Words of the random text for prompts, if the user gives no text.
_WORDS = 4000
# Token ids that every vocabulary has, for an engine without a tokenizer.
_COMMON_IDS = range(16, 256)
# Share of the KV pool that a load may fill; the engine reserves room for drafts in the rest.
_POOL_SHARE = 0.8
# Tokens of a sequence that the engine reserves, for example for drafts.
_RESERVED_TOKENS = 64
# A load with fewer new tokens would end before it is measured.
_NEW_TOKENS_MIN = 48


class Prompts:
    """Makes prompts from one text's tokens.  `ids`: at least one.

    Each prompt begins with two random tokens, so that a prefix cache has almost no hits.
    """

    def __init__(self, ids: Sequence[int], seed: int = 0) -> None:
        self._ids = list(ids)
        self._random = random.Random(seed)

    @classmethod
    async def from_engine_tokenizer(cls, engine: EngineHttp, text: str = "") -> "Prompts":
        """Tokenizes the text with the engine.  Raises ProfilingUsageError if that is impossible."""
        ids = await engine.tokenize(text or random_text())
        if not ids and text:
            raise ProfilingUsageError(
                "the prompt file cannot be used: the engine runs without a tokenizer, or the file "
                "is empty"
            )
        return cls(ids or list(_COMMON_IDS))

    def make_prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Returns `count` prompts of `tokens` ids each."""
        return [self._make_prompt(tokens) for _ in range(count)]

    def _make_prompt(self, tokens: int) -> list[int]:
        start = self._random.randrange(len(self._ids))
        ids = self._random.choices(self._ids, k=min(2, tokens))
        while len(ids) < tokens:
            ids += self._ids[start : start + tokens - len(ids)]
            start = 0
        return ids


def random_text(seed: int = 0) -> str:
    """Returns random ASCII words."""
    rng = random.Random(seed)
    letters = string.ascii_lowercase
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(_WORDS))


@dataclass(eq=False, repr=False)
class LoadSource:
    """Starts loads on one engine.  `replicas`: data-parallel ranks that share a request's prompts.

    `new_tokens`: most tokens that a load generates per sequence.
    """

    engine: EngineHttp
    limits: EngineLimits
    prompts: Prompts
    new_tokens: int
    replicas: int = 1
    _started: int = field(default=0, init=False)

    def new_tokens_for(self, batch_size: int, prompt_tokens: int) -> int:
        """Returns the new tokens per sequence of a load; 0 if it does not fit into the engine."""
        sequence_tokens_max = min(
            self.limits.sequence_tokens - _RESERVED_TOKENS,
            int(_POOL_SHARE * self.limits.pool_tokens / batch_size),
        )
        new_tokens_max = min(self.new_tokens, sequence_tokens_max - prompt_tokens)
        return new_tokens_max if new_tokens_max >= min(_NEW_TOKENS_MIN, self.new_tokens) else 0

    def start(self, batch_size: int, prompt_tokens: int) -> Generation:
        """Starts a request that makes a decode batch of this size, which must fit."""
        self._started += 1
        count = batch_size * self.replicas
        ids = [f"controller-profile-{id(self):x}-{self._started}-{i:05}" for i in range(count)]
        new_tokens = self.new_tokens_for(batch_size, prompt_tokens)
        return self.engine.generate(
            self.prompts.make_prompts(count, prompt_tokens), ids, new_tokens
        )
