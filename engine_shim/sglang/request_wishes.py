"""Reads from requests whether they must not be drafted for, and which class they are of.

A client says that a request must not be drafted for in SGLang's `custom_params`, which the
OpenAI-compatible API hands on:

    {"custom_params": {"speculation": false}}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from engine_shim.common.row_groups import SPECULATION
from engine_shim.sglang.api.transfer import to_device
from engine_shim.sglang.request_classes import RequestClasses, params_of

# Where a request's wishes are kept on SGLang's request.
_UNDRAFTED: Final = "speculation_undrafted"
_LABEL: Final = "speculation_label"


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
