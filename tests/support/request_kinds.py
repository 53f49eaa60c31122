"""Requests of every kind whose answers do not change with speculation, and how they compare."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lab.cpu_engine.models.prompts import DOMAINS, held_out_prompts

PROMPTS = [
    prompt
    for domain in DOMAINS
    for prompt in held_out_prompts(domain, count=1, length_tokens=40, seed=41)
]
LONG = [
    prompt
    for domain in DOMAINS
    for prompt in held_out_prompts(domain, count=1, length_tokens=301, seed=42)
]
GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "id": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "id", "tags"],
    "additionalProperties": False,
}
PENALTIES = {
    name: {"input_ids": PROMPTS, "sampling_params": GREEDY | {name: 1.3}}
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
}
Body = Mapping[str, Any]
Answers = Sequence[Mapping[str, Any]]
# Of float32 log probabilities, between passes of different widths.
LOGPROB_TOLERANCE = 1e-4


def request_kinds(answers: Answers) -> dict[str, Body]:
    """Requests by the name of their kind; answers: plain decoding's to `PROMPTS`, greedy."""
    texts = [answer["text"] for answer in answers]
    # Where they occur first, a draft may well reach past them.
    stops = [text[len(text) // 2 :][:3] for text in texts]
    ends = [answer["output_ids"][30] for answer in answers]

    def ask(prompts: Sequence[Sequence[int]] = PROMPTS, **parameters: Any) -> dict[str, Any]:
        return {"input_ids": prompts, "sampling_params": GREEDY | parameters}

    def each(name: str, values: Sequence[Any], **parameters: Any) -> dict[str, Any]:
        parts = [GREEDY | parameters | {name: value} for value in values]
        return {"input_ids": PROMPTS, "sampling_params": parts}

    return {
        "greedy": ask(),
        "logprobs": ask()
        | {
            "return_logprob": True,
            "top_logprobs_num": 3,
            "logprob_start_len": 0,
            "token_ids_logprob": [5, 600],
        },
        "logit bias": ask(logit_bias={"10": 4.0, str(ends[0]): -100.0}),
        "JSON schema": ask(json_schema=json.dumps(SCHEMA), ignore_eos=False, max_new_tokens=90),
        "regular expression": ask(regex="(ab|c|[0-9]{3})+x", ignore_eos=False),
        "EBNF": ask(ebnf='root ::= ("yes" | "no " | [0-9])+', ignore_eos=False),
        "stop strings": each("stop", [[stop] for stop in stops]),
        "stop tokens": each("stop_token_ids", [[end] for end in ends], ignore_eos=False),
        "n": ask(n=3),
        "short": each("max_new_tokens", [1, 2, 3, 5]),
        "chunked prefill": ask(LONG),
        "prefix cache": ask(
            [
                [*prompt, *answer["output_ids"][:29], *PROMPTS[0][:9]]
                for prompt, answer in zip(PROMPTS, answers, strict=True)
            ]
        ),
    }


def check_same(actual: Answers, expected: Answers) -> None:
    """The same tokens, text, ends and ranking; log probabilities within `LOGPROB_TOLERANCE`."""
    for actual_answer, expected_answer in zip(actual, expected, strict=True):
        assert actual_answer["output_ids"] == expected_answer["output_ids"]
        assert actual_answer["text"] == expected_answer["text"]
        meta, plain = actual_answer["meta_info"], expected_answer["meta_info"]
        assert meta["finish_reason"] == plain["finish_reason"]
        names = {name for name in plain if name.endswith("_logprobs")}
        assert names == {name for name in meta if name.endswith("_logprobs")}
        for name in names:
            assert _flat(meta[name]) == pytest.approx(_flat(plain[name]), abs=LOGPROB_TOLERANCE)


def _flat(nested: Any) -> list[float]:
    """Log probabilities and token ids in order; -1 where SGLang gives none."""
    if isinstance(nested, list):
        return [value for part in nested for value in _flat(part)]
    return [-1.0 if nested is None else float(nested)]
