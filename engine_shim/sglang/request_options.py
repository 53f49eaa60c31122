"""Reads two options of each request: whether drafting is forbidden, and the request's class.

A client forbids drafting for a request in SGLang's `custom_params`, which the OpenAI-compatible API
passes on:

    {"custom_params": {"speculation": false}}

Requests are divided into classes so that the sidecar can estimate the acceptance of each class.
The name of the class is all that a report contains about a request.  The setting
SPECULATION_CLASSES lists the traits by which requests are divided:

    grammar      the kind of grammar in use: JSON schema, tool call, any other one
    temperature  greedy, below 0.7, above
    prompt       a keyed hash of the first tokens, where a system prompt stands
    adapter      the name of the LoRA adapter in use
    label        what the client sends: {"custom_params": {"speculation_class": "invoices"}}

The scheduler sees a prompt as token ids.  Only the chat template, in another process of the server,
knows where the system part ends, so the hash covers a fixed number of first tokens.  A hash becomes
a class when a second request begins with the same tokens.  A unique beginning would describe a
single request.
"""

from __future__ import annotations

import hmac
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine_shim.common.errors import PluginError
from engine_shim.common.row_groups import SPECULATION_PARAMETER
from engine_shim.sglang.api.transfer import to_device

# Attributes of SGLang's request that hold its options.
_UNDRAFTED_ATTRIBUTE: Final = "speculation_undrafted"
_LABEL_ATTRIBUTE: Final = "speculation_label"

# The key of `custom_params`.
CLASS_PARAMETER: Final = "speculation_class"
# The most classes that are counted separately; requests of further classes count as OTHER.
MAX_LABELS: Final = 32
# A class that has not occurred in this number of requests can be replaced by another one.
UNUSED_AFTER_REQUESTS: Final = 1000
OTHER_LABEL: Final = "other"
# Characters that the contract allows for a label, and the parts of them that a client's label and
# an adapter's name may take.
_MAX_LABEL_CHARACTERS: Final = 64
_MAX_CLIENT_LABEL_CHARACTERS: Final = 40
_MAX_ADAPTER_CHARACTERS: Final = 20
# The most beginnings seen once that are remembered; a new one replaces the oldest.
_MAX_SEEN_ONCE: Final = 1024
# Hexadecimal digits of a hash: too few to identify a prompt, enough to separate a few classes.
_HASH_DIGITS: Final = 8
MIN_KEY_BYTES: Final = 16

_log = logging.getLogger(__name__)


class RequestOptions:
    """Keeps the options of the requests of one engine.

    classes: name the class of each request.
    filler_token: the token that replaces the drafts of rows that must not be drafted for; it is
    accepted only if the target chooses the same token.  is_decode_server: requests come from
    another server, which has read their prompts.  has_any: whether any request has set an option or
    has a class.
    """

    def __init__(
        self, classes: RequestClasses, filler_token: int, *, is_decode_server: bool = False
    ) -> None:
        self._classes = classes
        self._filler_token = filler_token
        # Until a request sets an option or has a class, steps skip this part.
        self.has_any = self._has_undrafted = self._has_labels = False
        self.is_decode_server = is_decode_server

    def before_prefill(self, requests: Sequence[Any]) -> None:
        """Reads the options of a prefill's requests."""
        for request in requests:
            if not hasattr(request, _LABEL_ATTRIBUTE):
                self._read(request)

    def _read(self, request: Any) -> None:
        undrafted = read_custom_params(request).get(SPECULATION_PARAMETER) is False
        label = self._classes.label(request)
        setattr(request, _UNDRAFTED_ATTRIBUTE, undrafted)
        setattr(request, _LABEL_ATTRIBUTE, label)
        self._has_undrafted |= undrafted
        self._has_labels |= bool(label)
        self.has_any |= undrafted or bool(label)

    def undrafted_and_labels(self, requests: Sequence[Any]) -> tuple[list[int], list[str]]:
        """Returns the rows that must not be drafted for, and the class of each row.

        The class is "" for a row without one; the list is empty if no request has a class.
        """
        if self.is_decode_server:
            self.before_prefill(requests)
        undrafted_rows: list[int] = []
        labels: list[str] = []
        if self._has_undrafted:
            undrafted_rows = [
                row for row, r in enumerate(requests) if getattr(r, _UNDRAFTED_ATTRIBUTE, False)
            ]
        if self._has_labels:
            # A row without drafts has no acceptance to count for its class.
            undrafted_set = set(undrafted_rows)
            labels = [
                "" if row in undrafted_set else getattr(request, _LABEL_ATTRIBUTE, "")
                for row, request in enumerate(requests)
            ]
        return undrafted_rows, labels

    def withhold_drafts(self, verify: Any, rows: Sequence[int]) -> None:
        """Replaces the drafts of these rows by the filler token in a verification."""
        draft_tokens = verify.draft_token.view(verify.retrieve_next_token.shape)
        draft_tokens[:, 1:].index_fill_(0, to_device(rows, draft_tokens.device), self._filler_token)


def read_key(path: str) -> bytes:
    """Returns the key in a file, without surrounding white space; b"" if the path is empty.

    Raises PluginError if the file cannot be read, or if the key is too short.
    """
    if not path:
        return b""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise PluginError(f"SPECULATION_CLASS_KEY_FILE: {path}: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise PluginError(
            f"SPECULATION_CLASS_KEY_FILE: {path} has {len(key)} bytes, at least {MIN_KEY_BYTES} "
            "are needed (openssl rand -hex 32)"
        )
    return key


def read_custom_params(request: Any) -> Mapping[str, Any]:
    """Returns the `custom_params` of a request; empty if they are not a mapping."""
    custom_params = request.sampling_params.custom_params
    return custom_params if isinstance(custom_params, Mapping) else {}


class _LabelSlots:
    """Keeps up to `most` names; a new one replaces the one that was not used for longest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._request_count = 0
        # The request that used each name last, the longest unused name first.
        self._last_request: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._last_request

    def try_take(self, name: str) -> bool:
        """Counts a request with this name; returns False if other names use all places."""
        self._request_count += 1
        if name in self._last_request:
            del self._last_request[name]
        elif len(self._last_request) >= self._capacity:
            oldest_name = next(iter(self._last_request))
            if self._request_count - self._last_request[oldest_name] < UNUSED_AFTER_REQUESTS:
                return False
            del self._last_request[oldest_name]
        self._last_request[name] = self._request_count
        return True


class RequestClasses:
    """Names the class of each request of one engine.

    traits: the traits that divide requests; empty for no classes.  key, prompt_tokens: key of the
    hash of a prompt's first tokens, and how many tokens it covers.  adapters: SGLang's `LoRARef` of
    each adapter, by its id.
    """

    def __init__(
        self,
        traits: Iterable[str],
        *,
        key: bytes = b"",
        prompt_tokens: int = 1,
        adapters: Mapping[str, Any] | None = None,
    ) -> None:
        # Short traits come first, because a label that is too long is cut at its end.
        trait_functions: Mapping[str, Callable[[Any], str]] = {
            "grammar": _grammar_trait,
            "temperature": _temperature_trait,
            "prompt": self._prompt_trait,
            "adapter": self._adapter_trait,
            "label": _label_trait,
        }
        requested_traits = set(traits)
        if unknown := requested_traits - trait_functions.keys():
            raise ValueError(f"unknown traits: {', '.join(sorted(unknown))}")
        self._traits = [
            trait for name, trait in trait_functions.items() if name in requested_traits
        ]
        self._key, self._prompt_tokens = key, prompt_tokens
        self._adapters = {} if adapters is None else adapters
        self._labels = _LabelSlots(MAX_LABELS)
        # Digests of beginnings, in the order in which they came.
        self._seen_once: dict[str, None] = {}
        self._repeated = _LabelSlots(MAX_LABELS)

    def label(self, request: Any) -> str:
        """Names the class of a request, "" for none.  Must be called once for each request."""
        try:
            joined_traits = " ".join(filter(None, (trait(request) for trait in self._traits)))
        except Exception:  # noqa: BLE001 - telemetry must not end an engine
            self._traits = []
            _log.exception("requests are no longer divided into classes")
            return ""
        label = joined_traits[:_MAX_LABEL_CHARACTERS].rstrip()
        return label if not label or self._labels.try_take(label) else OTHER_LABEL

    def _prompt_trait(self, request: Any) -> str:
        """Names the beginning of a prompt, if an earlier one began with the same tokens."""
        first_tokens = request.origin_input_ids[: self._prompt_tokens]
        if len(first_tokens) < self._prompt_tokens:
            return ""
        digest = hmac.digest(self._key, array("q", first_tokens).tobytes(), "sha256").hex()[
            :_HASH_DIGITS
        ]
        if digest in self._repeated or digest in self._seen_once:
            self._seen_once.pop(digest, None)
            return digest if self._repeated.try_take(digest) else ""
        if len(self._seen_once) >= _MAX_SEEN_ONCE:
            del self._seen_once[next(iter(self._seen_once))]
        self._seen_once[digest] = None
        return ""

    def _adapter_trait(self, request: Any) -> str:
        """Returns the operator's name of a request's adapter; only the end of a long name."""
        lora_id = request.lora_id
        if lora_id is None:
            return ""
        name = getattr(self._adapters.get(lora_id), "lora_name", None) or lora_id
        return "".join(c if c.isascii() and c.isprintable() else "_" for c in name)[
            -_MAX_ADAPTER_CHARACTERS:
        ]


def _grammar_trait(request: Any) -> str:
    """Names the kind of grammar that constrains a request."""
    sampling_params = request.sampling_params
    kinds = {"json": sampling_params.json_schema, "tool": sampling_params.structural_tag}
    kind_name = next((kind for kind, value in kinds.items() if value), "")
    return kind_name or ("grammar" if sampling_params.regex or sampling_params.ebnf else "")


def _temperature_trait(request: Any) -> str:
    """Names the band of a request's temperature."""
    # SGLang serves temperature 0 as top_k 1.
    if request.sampling_params.top_k == 1:
        return "greedy"
    return "cool" if request.sampling_params.temperature < 0.7 else "warm"


def _label_trait(request: Any) -> str:
    """Returns the label that a client has sent."""
    client_label = read_custom_params(request).get(CLASS_PARAMETER)
    if not isinstance(client_label, str):
        return ""
    return "".join(c for c in client_label if c.isprintable())[:_MAX_CLIENT_LABEL_CHARACTERS]
