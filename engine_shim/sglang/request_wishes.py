"""Reads from requests whether they must not be drafted for, and which class they are of.

A client says that a request must not be drafted for in SGLang's `custom_params`, which the
OpenAI-compatible API hands on:

    {"custom_params": {"speculation": false}}

Requests are divided into classes so that the sidecar can estimate the acceptance of each.  What a
class is called is all that a report says of a request.  By which traits requests are divided is a
setting (SPECULATION_CLASSES):

    grammar      the kind of grammar in use: JSON schema, tool call, any other one
    temperature  greedy, below 0.7, above
    prompt       a keyed hash of the first tokens, where a system prompt stands
    adapter      the name of the LoRA adapter in use
    label        what the client sends: {"custom_params": {"speculation_class": "invoices"}}

The scheduler sees a prompt as token ids.  Where its system part ends, only the chat template in the
server's other process knows, so the hash is of a fixed number of first tokens.  It is a class only
once a second request begins alike: a beginning that is unique says something of one request.
"""

from __future__ import annotations

import hmac
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine_shim.common.errors import PluginError
from engine_shim.common.row_groups import SPECULATION
from engine_shim.sglang.api.transfer import to_device

# Where a request's wishes are kept on SGLang's request.
_UNDRAFTED: Final = "speculation_undrafted"
_LABEL: Final = "speculation_label"

# The key of `custom_params`.
CLASS: Final = "speculation_class"
# Classes that are kept apart; requests of further ones count as OTHER.
LABELS_MOST: Final = 32
# Requests without a class after which another one takes its place.
UNUSED_REQUESTS: Final = 1000
OTHER: Final = "other"
# What the contract allows a label, and what a client's own and an adapter's name may have of it.
_CHARACTERS: Final = 64
_LABEL_CHARACTERS: Final = 40
_ADAPTER_CHARACTERS: Final = 20
# Beginnings that have come once; the oldest is forgotten for a new one.
_ONCE_MOST: Final = 1024
# Hexadecimal digits of a hash: too few to tell a prompt by, enough for a few classes.
_DIGITS: Final = 8
KEY_BYTES_LEAST: Final = 16

_log = logging.getLogger(__name__)


class RequestWishes:
    """Keeps what the requests of one engine ask for.

    classes: name the class of each request.
    filler: the token that rows get which must not be drafted for; it is accepted only where the
    target writes just that.  without_prefills: requests come from another server, which has read
    their prompts.  is_asked: whether any request has asked for anything so far.
    """

    def __init__(
        self, classes: RequestClasses, filler: int, *, without_prefills: bool = False
    ) -> None:
        self._classes = classes
        self._filler = filler
        # Nothing is looked for before a request has asked for something.
        self.is_asked = self._has_undrafted = self._has_labels = False
        self.without_prefills = without_prefills

    def before_prefill(self, requests: Sequence[Any]) -> None:
        """Reads the wishes of a prefill's requests."""
        for request in requests:
            if not hasattr(request, _LABEL):
                self._read(request)

    def _read(self, request: Any) -> None:
        undrafted = params_of(request).get(SPECULATION) is False
        label = self._classes.label(request)
        setattr(request, _UNDRAFTED, undrafted)
        setattr(request, _LABEL, label)
        self._has_undrafted |= undrafted
        self._has_labels |= bool(label)
        self.is_asked |= undrafted or bool(label)

    def of(self, requests: Sequence[Any]) -> tuple[list[int], list[str]]:
        """Returns the rows that must not be drafted for, and the class of each row.

        A class is "" for a row without one; the list is empty where no request has one.
        """
        if self.without_prefills:
            self.before_prefill(requests)
        undrafted: list[int] = []
        labels: list[str] = []
        if self._has_undrafted:
            undrafted = [row for row, r in enumerate(requests) if getattr(r, _UNDRAFTED, False)]
        if self._has_labels:
            # A row without drafts says nothing of its class.
            left = set(undrafted)
            labels = [
                "" if row in left else getattr(request, _LABEL, "")
                for row, request in enumerate(requests)
            ]
        return undrafted, labels

    def withhold(self, verify: Any, rows: Sequence[int]) -> None:
        """Takes the drafts of these rows out of a verification."""
        canvas = verify.draft_token.view(verify.retrieve_next_token.shape)
        canvas[:, 1:].index_fill_(0, to_device(rows, canvas.device), self._filler)


def read_key(path: str) -> bytes:
    """Returns the key in a file, without white space around it; b"" for no path.

    Raises PluginError for a file that cannot be read, and for a key that could be guessed.
    """
    if not path:
        return b""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise PluginError(f"SPECULATION_CLASS_KEY_FILE: {path}: {error.strerror}") from error
    if len(key) < KEY_BYTES_LEAST:
        raise PluginError(
            f"SPECULATION_CLASS_KEY_FILE: {path} has {len(key)} bytes, at least {KEY_BYTES_LEAST} "
            "are needed (openssl rand -hex 32)"
        )
    return key


def params_of(request: Any) -> Mapping[str, Any]:
    """Returns the `custom_params` of a request, empty for what is no mapping."""
    found = request.sampling_params.custom_params
    return found if isinstance(found, Mapping) else {}


class _Places:
    """Gives places to so many names; the longest unused one makes room for a new one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests = 0
        # The request that used each name last, the longest unused name first.
        self._used_at: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._used_at

    def take(self, name: str) -> bool:
        """Counts a request that has this name; False if all places are in use by others."""
        self._requests += 1
        if name in self._used_at:
            del self._used_at[name]
        elif len(self._used_at) >= self._most:
            unused = next(iter(self._used_at))
            if self._requests - self._used_at[unused] < UNUSED_REQUESTS:
                return False
            del self._used_at[unused]
        self._used_at[name] = self._requests
        return True


class RequestClasses:
    """Names the class of each request of one engine.

    traits: by which requests are divided; empty for no classes.  key, prompt_tokens: of the hash of
    a prompt's first tokens.  adapters: SGLang's `LoRARef` of each adapter, by its id.
    """

    def __init__(
        self,
        traits: Iterable[str],
        *,
        key: bytes = b"",
        prompt_tokens: int = 1,
        adapters: Mapping[str, Any] | None = None,
    ) -> None:
        # Short ones first: what is too long for a label is cut at its end.
        known: Mapping[str, Callable[[Any], str]] = {
            "grammar": _grammar,
            "temperature": _temperature,
            "prompt": self._prompt,
            "adapter": self._adapter,
            "label": _label,
        }
        asked = set(traits)
        if unknown := asked - known.keys():
            raise ValueError(f"unknown traits: {', '.join(sorted(unknown))}")
        self._traits = [trait for name, trait in known.items() if name in asked]
        self._key, self._prompt_tokens = key, prompt_tokens
        self._adapters = {} if adapters is None else adapters
        self._labels = _Places(LABELS_MOST)
        # Digests of beginnings, in the order in which they came.
        self._once: dict[str, None] = {}
        self._repeated = _Places(LABELS_MOST)

    def label(self, request: Any) -> str:
        """Names the class of a request, "" for none.  Once for each request."""
        try:
            named = " ".join(filter(None, (trait(request) for trait in self._traits)))
        except Exception:  # noqa: BLE001 - telemetry must not end an engine
            self._traits = []
            _log.exception("requests are no longer divided into classes")
            return ""
        label = named[:_CHARACTERS].rstrip()
        return label if not label or self._labels.take(label) else OTHER

    def _prompt(self, request: Any) -> str:
        """Names the beginning of a prompt, if an earlier one began with the same tokens."""
        first = request.origin_input_ids[: self._prompt_tokens]
        if len(first) < self._prompt_tokens:
            return ""
        digest = hmac.digest(self._key, array("q", first).tobytes(), "sha256").hex()[:_DIGITS]
        if digest in self._repeated or digest in self._once:
            self._once.pop(digest, None)
            return digest if self._repeated.take(digest) else ""
        if len(self._once) >= _ONCE_MOST:
            del self._once[next(iter(self._once))]
        self._once[digest] = None
        return ""

    def _adapter(self, request: Any) -> str:
        """Names a request's adapter as the operator does, by the end of a long name."""
        found = request.lora_id
        if found is None:
            return ""
        name = getattr(self._adapters.get(found), "lora_name", None) or found
        return "".join(c if c.isascii() and c.isprintable() else "_" for c in name)[
            -_ADAPTER_CHARACTERS:
        ]


def _grammar(request: Any) -> str:
    """Names the kind of grammar that constrains a request."""
    found = request.sampling_params
    kinds = {"json": found.json_schema, "tool": found.structural_tag}
    named = next((kind for kind, value in kinds.items() if value), "")
    return named or ("grammar" if found.regex or found.ebnf else "")


def _temperature(request: Any) -> str:
    """Names the band of a request's temperature."""
    # SGLang serves temperature 0 as top_k 1.
    if request.sampling_params.top_k == 1:
        return "greedy"
    return "cool" if request.sampling_params.temperature < 0.7 else "warm"


def _label(request: Any) -> str:
    """Returns the label that a client has sent."""
    found = params_of(request).get(CLASS)
    if not isinstance(found, str):
        return ""
    return "".join(c for c in found if c.isprintable())[:_LABEL_CHARACTERS]
