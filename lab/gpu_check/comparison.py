"""Compares the tokens of engines with plain decoding's, of the same prompts.

Decoding is greedy, so in float32 a token may only differ where plain decoding itself is nearly
undecided: matrix products of other shapes round differently.
"""

import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts
from lab.gpu_check.small_engines import MAX_BATCH
from lab.harness.load_generator import Answer, StreamPhase, StreamRequest

# Below this difference of the two best logprobs, a differing token is rounding.
NEAR_TIE = 1e-3
ROUNDING, WRONG = "rounding", "WRONG"
_PROMPT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Difference:
    """A token that plain decoding did not choose.

    prompt, position: counted from 0, position in the answer.  gap: of plain decoding's two best
    logprobs there.  arm: that ran, as far as it can be told.
    """

    engine: str
    prompt: int
    position: int
    expected: int
    found: int
    gap: float
    verdict: str
    arm: str

    def sentence(self) -> str:
        """Describes it for people."""
        return (
            f"{self.engine}: prompt {self.prompt}, position {self.position}: expected token "
            f"{self.expected}, found {self.found} ({self.verdict}, plain decoding's two best "
            f"logprobs differ by {self.gap:.1e}), arm {self.arm}"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the fields, and the sentence."""
        return asdict(self) | {"sentence": self.sentence()}


def build_stream(prompts_per_domain: int, new_tokens: int) -> tuple[StreamPhase, ...]:
    """Builds held-out prompts: one domain's alone, then all in batches that grow and shrink."""
    prompts = [
        (domain, tuple(prompt))
        for domain in DOMAINS
        for prompt in held_out_prompts(domain, prompts_per_domain, _PROMPT_TOKENS, 1)
    ]
    # Unequal lengths move the batch size.
    requests = [
        StreamRequest(index, domain, prompt, new_tokens - index % 4 * (new_tokens // 8))
        for index, (domain, prompt) in enumerate(prompts)
    ]
    alone, crowd = requests[:prompts_per_domain], requests[prompts_per_domain:]
    return (
        StreamPhase("one at a time", 1, tuple(alone)),
        StreamPhase("in batches", MAX_BATCH, tuple(crowd)),
    )


def differences(
    engine: str,
    expected: Sequence[Answer],
    found: Sequence[Answer],
    top_two: Callable[[Sequence[int]], Mapping[int, float]],
    arm: str = "",
) -> list[Difference]:
    """Compares answers of the same requests; lists the first difference of each.

    top_two: plain decoding's two best tokens after a context, with their logprobs.
    """
    differing = []
    for right, ours in zip(expected, found, strict=True):
        if right.tokens == ours.tokens:
            continue
        pairs = zip(right.tokens, ours.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:  # one answer is shorter than the other
            at = min(len(right.tokens), len(ours.tokens))
            one, other, gap, tied = _at(right.tokens, at), _at(ours.tokens, at), 0.0, False
        else:
            one, other = right.tokens[at], ours.tokens[at]
            best = top_two([*right.request.prompt, *right.tokens[:at]])
            high, low = max(best.values()), min(best.values())
            gap = high - low
            tied = gap < NEAR_TIE and {one, other} == set(best)
        verdict = ROUNDING if tied else WRONG
        differing.append(Difference(engine, right.request.index, at, one, other, gap, verdict, arm))
    return differing


def top_two(url: str, context: Sequence[int]) -> dict[int, float]:
    """Asks the engine at `url` for its two best next tokens and their logprobs."""
    body = {
        "input_ids": list(context),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    request = urllib.request.Request(  # noqa: S310  # our own engine
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        said = json.load(answer)
    return {entry[1]: float(entry[0]) for entry in said["meta_info"]["output_top_logprobs"][0]}


def wrong_sentences(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the sentences of the differences that are wrong tokens.

    found: as in a result file.
    """
    return [one["sentence"] for one in found if one["verdict"] == WRONG]


def _at(tokens: Sequence[int], index: int) -> int:
    return tokens[index] if index < len(tokens) else -1
