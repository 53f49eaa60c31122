"""Reads from requests whether they must not be drafted for, and which class they are of.

A client says both in SGLang's `custom_params`, which the OpenAI-compatible API hands on:

    {"custom_params": {"speculation": false, "speculation_class": "invoices"}}

Classes that the engine knows by itself are reported if the settings ask for them.  What a step
reports are counts by label, never what a request contains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engine_shim.sglang.api.transfer import to_device
from engine_shim.steering.row_groups import SPECULATION

# Key of `custom_params`, besides SPECULATION.
CLASS: Final = "speculation_class"
# Labels that are kept apart; those of later requests count as OTHER.
LABELS_MOST: Final = 32
OTHER: Final = "other"
_LABEL_CHARACTERS: Final = 40
# Where a request's wishes are kept on SGLang's request.
_UNDRAFTED: Final = "speculation_undrafted"
_LABEL: Final = "speculation_label"


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
    found = _params(request).get(CLASS)
    if not isinstance(found, str):
        return ""
    return "".join(c for c in found if c.isprintable())[:_LABEL_CHARACTERS]


# By the name in SPECULATION_CLASSES.
TRAITS: Final[Mapping[str, Callable[[Any], str]]] = {
    "grammar": _grammar,
    "temperature": _temperature,
    "label": _label,
}


def _params(request: Any) -> Mapping[str, Any]:
    found = request.sampling_params.custom_params
    return found if isinstance(found, Mapping) else {}


class RequestWishes:
    """Keeps what the requests of one engine ask for.

    traits: names of `TRAITS` by which requests are divided into classes; empty for no classes.
    filler: the token that rows get which must not be drafted for; it is accepted only where the
    target writes just that.  without_prefills: requests come from another server, which has read
    their prompts.  is_asked: whether any request has asked for anything so far.
    """

    def __init__(
        self, traits: Sequence[str], filler: int, *, without_prefills: bool = False
    ) -> None:
        self._traits = [TRAITS[name] for name in traits]
        self._filler = filler
        self._labels: set[str] = set()
        # Nothing is looked for before a request has asked for something.
        self.is_asked = self._has_undrafted = self._has_labels = False
        self.without_prefills = without_prefills

    def before_prefill(self, requests: Sequence[Any]) -> None:
        """Reads the wishes of a prefill's requests."""
        for request in requests:
            if not hasattr(request, _LABEL):
                self._read(request)

    def _read(self, request: Any) -> None:
        undrafted = _params(request).get(SPECULATION) is False
        label = " ".join(filter(None, (trait(request) for trait in self._traits)))
        if label and label not in self._labels:
            if len(self._labels) < LABELS_MOST:
                self._labels.add(label)
            else:
                label = OTHER
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
