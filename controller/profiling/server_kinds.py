"""Names what the HTTP APIs of SGLang and of vLLM both have, as each of them calls it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from controller.profiling.errors import EngineUnreachableError

# Tokens of a sequence, where an engine does not say how many it takes.
_FALLBACK_CONTEXT: Final = 2048
# Tokens, more than any engine holds: a larger number is no limit of an engine.
_TOKENS_MAX: Final = 2**48


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Tokens that one sequence, and all sequences together, may hold."""

    sequence_tokens: int
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class ServerKind:
    """Names the paths of one kind of server.

    ready: answers 200 once the engine can generate.  abort: ends a request; "" where there is no
    such path, and an engine notices that its client has hung up.
    """

    name: str
    ready: str
    tokenize: str
    generate: str
    abort: str


SGLANG: Final = ServerKind(
    "SGLang", "/health_generate", "/v1/tokenize", "/generate", "/abort_request"
)
VLLM: Final = ServerKind("vLLM", "/health", "/tokenize", "/v1/completions", "")


def load_body(
    kind: ServerKind, prompts: Sequence[Sequence[int]], ids: Sequence[str], new_tokens: int
) -> dict[str, Any]:
    """Makes one request of several prompts; greedy, and never ended by a stop token."""
    if kind is VLLM:
        return {
            "prompt": [list(prompt) for prompt in prompts],
            "request_id": ids[0],
            "temperature": 0,
            "max_tokens": new_tokens,
            "ignore_eos": True,
        }
    return {
        "input_ids": [list(prompt) for prompt in prompts],
        "rid": list(ids),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        },
    }


def sglang_limits(said: dict[str, Any]) -> EngineLimits:
    """Reads the limits from `/server_info`; cautious where it does not say."""
    pool = _positive(said.get("max_total_num_tokens"))
    longest = _positive(said.get("max_req_input_len")) or _FALLBACK_CONTEXT
    return EngineLimits(longest, pool or longest)


def vllm_limits(models: Any, metrics: str) -> EngineLimits:
    """Reads the limits from `/v1/models` and `/metrics`; cautious where they do not say.

    Raises EngineUnreachableError if there is no model.
    """
    found = models.get("data") if isinstance(models, dict) else None
    if not (isinstance(found, list) and found and isinstance(found[0], dict)):
        raise EngineUnreachableError("/v1/models names no model")
    longest = _positive(found[0].get("max_model_len")) or _FALLBACK_CONTEXT
    pool = _label(metrics, "kv_cache_size_tokens") or (
        _label(metrics, "num_gpu_blocks") * _label(metrics, "block_size")
    )
    return EngineLimits(longest, pool or longest)


def _label(metrics: str, name: str) -> int:
    """A number that a label of `vllm:cache_config_info` has; 0 if it is not there."""
    line = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    found = re.search(rf'(?:^|,){name}="(\d{{1,12}})"', line.group(1)) if line else None
    return int(found.group(1)) if found else 0


def _positive(value: object) -> int:
    return value if isinstance(value, int) and 0 < value <= _TOKENS_MAX else 0
