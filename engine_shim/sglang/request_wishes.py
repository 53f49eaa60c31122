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
from engine_shim.common.row_groups import SPECULATION
from engine_shim.sglang.api.transfer import to_device

# Attributes of SGLang's request that hold its options.
_UNDRAFTED: Final = "speculation_undrafted"
_LABEL: Final = "speculation_label"

# The key of `custom_params`.
CLASS: Final = "speculation_class"
# The most classes that are counted separately; requests of further classes count as OTHER.
LABELS_MOST: Final = 32
# A class that has not occurred in so many requests can be replaced by another one.
UNUSED_REQUESTS: Final = 1000
OTHER: Final = "other"
# Characters that the contract allows for a label, and the parts of them that a client's label and
# an adapter's name may take.
_CHARACTERS: Final = 64
_LABEL_CHARACTERS: Final = 40
_ADAPTER_CHARACTERS: Final = 20
# The most beginnings seen once that are remembered; a new one replaces the oldest.
_ONCE_MOST: Final = 1024
# Hexadecimal digits of a hash: too few to identify a prompt, enough to separate a few classes.
_DIGITS: Final = 8
KEY_BYTES_LEAST: Final = 16

_log = logging.getLogger(__name__)


class RequestWishes:
    """Keeps the options of the requests of one engine.

    classes: name the class of each request.
    filler: the token that replaces the drafts of rows that must not be drafted for; it is accepted
    only if the target chooses the same token.  without_prefills: requests come from another server,
    which has read their prompts.  is_asked: whether any request has set an option or has a class.
    """

    def __init__(
        self, classes: RequestClasses, filler: int, *, without_prefills: bool = False
    ) -> None:
        self._classes = classes
        self._filler = filler
        # Until a request sets an option or has a class, steps skip this part.
        self.is_asked = self._has_undrafted = self._has_labels = False
        self.without_prefills = without_prefills

    def before_prefill(self, requests: Sequence[Any]) -> None:
        """Reads the options of a prefill's requests."""
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

        The class is "" for a row without one; the list is empty if no request has a class.
        """
        if self.without_prefills:
            self.before_prefill(requests)
        undrafted: list[int] = []
        labels: list[str] = []
        if self._has_undrafted:
            undrafted = [row for row, r in enumerate(requests) if getattr(r, _UNDRAFTED, False)]
        if self._has_labels:
            # A row without drafts has no acceptance to count for its class.
            left = set(undrafted)
            labels = [
                "" if row in left else getattr(request, _LABEL, "")
                for row, request in enumerate(requests)
            ]
        return undrafted, labels

    def withhold(self, verify: Any, rows: Sequence[int]) -> None:
        """Replaces the drafts of these rows by the filler token in a verification."""
        canvas = verify.draft_token.view(verify.retrieve_next_token.shape)
        canvas[:, 1:].index_fill_(0, to_device(rows, canvas.device), self._filler)


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
    if len(key) < KEY_BYTES_LEAST:
        raise PluginError(
            f"SPECULATION_CLASS_KEY_FILE: {path} has {len(key)} bytes, at least {KEY_BYTES_LEAST} "
            "are needed (openssl rand -hex 32)"
        )
    return key


def params_of(request: Any) -> Mapping[str, Any]:
    """Returns the `custom_params` of a request; empty if they are not a mapping."""
    found = request.sampling_params.custom_params
    return found if isinstance(found, Mapping) else {}


class _Places:
    """Keeps up to `most` names; a new one replaces the one that was not used for longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests = 0
        # The request that used each name last, the longest unused name first.
        self._used_at: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._used_at

    def take(self, name: str) -> bool:
        """Counts a request with this name; returns False if other names use all places."""
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
        """Names the class of a request, "" for none.  Must be called once for each request."""
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
        """Returns the operator's name of a request's adapter; only the end of a long name."""
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
