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
    actual: int
    gap: float
    verdict: str
    arm: str

    def sentence(self) -> str:
        """Describes it for people."""
        return (
            f"{self.engine}: prompt {self.prompt}, position {self.position}: expected token "
            f"{self.expected}, found {self.actual} ({self.verdict}, plain decoding's two best "
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
    single_requests, batched_requests = requests[:prompts_per_domain], requests[prompts_per_domain:]
    return (
        StreamPhase("one at a time", 1, tuple(single_requests)),
        StreamPhase("in batches", MAX_BATCH, tuple(batched_requests)),
    )


def find_differences(
    engine: str,
    expected: Sequence[Answer],
    answers: Sequence[Answer],
    top_two: Callable[[Sequence[int]], Mapping[int, float]],
    arm: str = "",
) -> list[Difference]:
    """Compares answers of the same requests; lists the first difference of each.

    top_two: plain decoding's two best tokens after a context, with their logprobs.
    """
    differing = []
    for expected_answer, answer in zip(expected, answers, strict=True):
        if expected_answer.tokens == answer.tokens:
            continue
        pairs = zip(expected_answer.tokens, answer.tokens, strict=False)
        position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if position is None:  # one answer is shorter than the other
            position = min(len(expected_answer.tokens), len(answer.tokens))
            expected_token, actual_token, gap, tied = (
                _token_at(expected_answer.tokens, position),
                _token_at(answer.tokens, position),
                0.0,
                False,
            )
        else:
            expected_token, actual_token = expected_answer.tokens[position], answer.tokens[position]
            best = top_two([*expected_answer.request.prompt, *expected_answer.tokens[:position]])
            high, low = max(best.values()), min(best.values())
            gap = high - low
            tied = gap < NEAR_TIE and {expected_token, actual_token} == set(best)
        verdict = ROUNDING if tied else WRONG
        differing.append(
            Difference(
                engine,
                expected_answer.request.index,
                position,
                expected_token,
                actual_token,
                gap,
                verdict,
                arm,
            )
        )
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
        reply = json.load(answer)
    return {entry[1]: float(entry[0]) for entry in reply["meta_info"]["output_top_logprobs"][0]}


def wrong_sentences(differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the sentences of the differences that are wrong tokens.

    differences: as in a result file.
    """
    return [difference["sentence"] for difference in differences if difference["verdict"] == WRONG]


def _token_at(tokens: Sequence[int], index: int) -> int:
    return tokens[index] if index < len(tokens) else -1
