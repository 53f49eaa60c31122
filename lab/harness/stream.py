"""A stream of requests, in phases.

A phase is a closed loop: `concurrency` clients, each sending its next request when the last one is
answered; the next phase begins when the last answer is in.  So the batch also shrinks at the end
of each burst, as it does in life.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One prompt (token ids) and how many tokens to decode, whatever they are."""

    index: int
    domain: str
    prompt: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class StreamPhase:
    """Requests played by `concurrency` clients."""

    name: str
    domain: str
    concurrency: int
    requests: tuple[StreamRequest, ...]

    @property
    def new_tokens(self) -> int:
        """Tokens that the phase decodes."""
        return sum(request.new_tokens for request in self.requests)


def with_new_tokens(
    stream: Sequence[StreamPhase], change: Callable[[int], int]
) -> tuple[StreamPhase, ...]:
    """The same phases and prompts with answers of other lengths."""
    return tuple(
        replace(
            phase,
            requests=tuple(replace(r, new_tokens=change(r.new_tokens)) for r in phase.requests),
        )
        for phase in stream
    )
