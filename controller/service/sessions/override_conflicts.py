"""Decides what a repeated or conflicting request to set an override means."""

import time
from enum import Enum

from controller.core.errors import SpeculationError
from controller.core.planning.overrides import Override
from controller.service.net.errors import (
    NoOverrideError,
    OverrideChangedError,
    OverrideExistsError,
)
from controller.store.interface import Entry
from controller.wire.overrides import to_body

# Two requests with the same id and content ask for the same time to live if it differs by less.
_SAME_LIFETIME_SECONDS = 1.0


class OverrideOutcome(Enum):
    """Names the effect of a request to set an override.

    REPEATED: the same request was answered before, and nothing changes.  END_MOVED: the same
    override is in force, and lasts as long as this request says from now on.
    """

    SET = "set"
    REPEATED = "repeated"
    END_MOVED = "end moved"


def revision_of(etag: str) -> int:
    """Returns the revision that an etag stands for.  Raises OverrideChangedError."""
    number = etag.partition("-")[0]
    if etag and not number.isdecimal():
        raise OverrideChangedError(f"etag {etag[:40]!r} is not an etag: send it as it was given")
    return int(number[:18]) if etag else 0


def judge(
    found: Entry | None, override: Override, seconds: float | None, etag: str
) -> tuple[OverrideOutcome, Entry]:
    """Returns the outcome of a request whose etag is not the stored entry's, and that entry.

    Raises OverrideExistsError, OverrideChangedError, NoOverrideError.
    """
    if etag or found is None or found.ended or found.body != to_body(override):
        raise conflict_of(override.override_id, etag, found)
    lasted = _lifetime(found)
    if lasted is None or seconds is None:
        same = lasted is seconds
    else:
        same = abs(lasted - seconds) < _SAME_LIFETIME_SECONDS
    return OverrideOutcome.REPEATED if same else OverrideOutcome.END_MOVED, found


def _lifetime(entry: Entry) -> float | None:
    """Returns the seconds that it was given when it was written; None without an end."""
    left = entry.remaining_seconds
    return None if left is None else left + time.time() - entry.created_at


def conflict_of(override_id: str, etag: str, found: Entry | None) -> SpeculationError:
    """Returns the error for a request that does not fit what the store has."""
    if found is None:
        return NoOverrideError(
            f"override {override_id!r} is not there (any more)", resource=override_id
        )
    if found.ended:
        return OverrideExistsError(
            f"override {override_id!r} was {found.ended} before: its id is not taken again, so "
            "that a repeated request cannot bring it back; choose another id",
            resource=override_id,
        )
    if not etag:
        return OverrideExistsError(
            f"override {override_id!r} exists with other content (etag {found.etag}): to replace "
            "it, send that etag (`--etag` of the command)",
            resource=override_id,
            facts={"etag": found.etag},
        )
    return OverrideChangedError(
        f"override {override_id!r} has changed: its etag is {found.etag}; look at it again",
        resource=override_id,
        facts={"etag": found.etag},
    )
