"""Makes versions of what online updates have made of the drafter, while signals are collected.

A trainer's rounds begin from a version, and a version that fails goes back to one: weights that no
file holds could be neither.  So what was learnt is stored in the trainer's folder, on a thread, as
soon as updates rest and its acceptance has been judged.  The served weights stay as they are.

A trainer deletes old versions after each round, but there may be none: so each time that something
is stored, the engine does, too.
"""

from __future__ import annotations

import logging
import threading
from time import monotonic
from typing import TYPE_CHECKING, Final

import torch

from engine_shim.sglang.api.transfer import launched
from engine_shim.sglang.training.versions import Made, Versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_shim.sglang.learning.online_updates import OnlineUpdates

_RETRY_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


class LearntVersions:
    """Stores the weights that one engine has learnt.

    failing: why they could not be stored; "" while nothing has failed.
    """

    def __init__(self, versions: Versions) -> None:
        self.failing = ""
        self._versions = versions
        self._storing: _Storing | None = None
        self._retry_at = 0.0

    def before_step(self, online: OnlineUpdates, serving: int, needed: set[int]) -> int | None:
        """Runs as a decode step begins, while signals are collected.

        serving: the version from which was learnt.  needed: others that must not be deleted.
        Returns the version that the served weights are from now on, once they are stored; waits
        for nothing.
        """
        storing = self._storing
        if storing is None:
            if online.may_be_stored and monotonic() >= self._retry_at:
                weights = online.learnt_weights()
                self._storing = _Storing(self._versions, weights, serving, {serving, *needed})
            return None
        if not storing.is_done:
            return None
        self._storing = None
        if storing.version is None:
            self._retry_at = monotonic() + _RETRY_SECONDS
            if storing.why != self.failing:
                _log.error("what online updates have made cannot be stored: %s", storing.why)
            self.failing = storing.why
            return None
        self.failing = ""
        # Otherwise they have changed meanwhile, and are stored again.
        return storing.version if online.were_stored() else None


class _Storing:
    """Weights on their way to the disk.

    version: their number, None for why.  needed: versions that must not be deleted.
    """

    def __init__(
        self,
        versions: Versions,
        weights: Mapping[str, torch.Tensor],
        parent: int,
        needed: set[int],
    ) -> None:
        self.version: int | None = None
        self.why = ""
        self.weights = weights
        self._versions = versions
        self._needed = needed
        # A GPU has yet to make the copy.
        self._copied = launched(next(iter(weights.values())).device)
        self._made = Made(parent, 0.0, 0.0, 0.0, 0, 0.0)
        self._thread = threading.Thread(target=self._store, name="speculation-learnt", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """They have been stored, or cannot be."""
        return not self._thread.is_alive()

    def _store(self) -> None:
        try:
            # First, as the disk may be full.
            self._forget()
            if self._copied is not None:
                self._copied.synchronize()
            self.version = self._versions.publish(self.weights, self._made)
        except Exception as error:  # noqa: BLE001 - a full disk, say: the weights serve on
            self.why = f"{type(error).__name__}: {error}"

    def _forget(self) -> None:
        try:
            self._versions.forget(self._needed)
        except OSError as error:  # they are another user's, say
            _log.warning("old versions of the drafter cannot be deleted: %s", error)
