"""Versions of the drafter that a trainer has made, put into service between two steps.

    before_step     the version that the plan names is read on a thread; once it is there, its
                    values are copied into the serving drafter, in place

No request is stopped or flushed, and nothing waits for the disk.  A version that cannot be used is
reported, and the current one keeps serving; it is tried again later, since files may come late.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

from engine_shim.sglang.learning.learnt_versions import LearntVersions
from engine_shim.sglang.learning.weights import DrafterWeights
from engine_shim.training.versions import FOLDER as VERSIONS_FOLDER
from engine_shim.training.versions import VersionError, Versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from engine_shim.sglang.learning.online_updates import OnlineUpdates
    from engine_shim.sglang.learning.student import LiveDrafter

_RETRY_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DeploymentCounters:
    """Counts the deployments.

    version: that serves, 0 as loaded.  deployed: changes so far.  state: what it does.
    learnt_from: as in proto StepReport.
    """

    version: int = 0
    deployed: int = 0
    state: str = "ready"
    learnt_from: int | None = None


class Deployment:
    """Deploys a trainer's versions in one engine.  signals_folder: which the trainer reads."""

    def __init__(self, signals_folder: Path, drafter: LiveDrafter) -> None:
        """Leaves the drafter in the folder.  Raises OSError, VersionError."""
        self.counters = DeploymentCounters()
        self._versions = Versions(signals_folder / VERSIONS_FOLDER)
        self._versions.adopt_base(drafter.shape, drafter.parameters, drafter.borrowed)
        self._weights = DrafterWeights(drafter.parameters, drafter.refresh)
        self._learnt = LearntVersions(self._versions)
        # The version in whose place a plan may still name the one that was learnt from it.
        self._replaced: int | None = None
        self._reading: _Reading | None = None
        self._retry_at = 0.0
        self._stopped = False

    def before_step(self, wanted: int | None) -> bool:
        """Runs as a decode step begins; True when other weights serve it than the one before.

        wanted: the plan's version, None without a plan.
        """
        if self._stopped or wanted is None:
            self._reading = None
            return False
        if wanted == self.counters.version:
            self._reading, self.counters.state, self._replaced = None, "ready", None
            return False
        if wanted == self._replaced:
            return False
        if not wanted:
            self._weights.serve_first()
            return self._changed(0)
        reading = self._reading
        if reading is None or reading.version != wanted:
            if monotonic() >= self._retry_at or self._failed_another(wanted):
                self._reading = _Reading(self._versions, wanted, self._weights.parameters)
            return False
        return reading.is_done and self._use(reading)

    def keep_learnt(
        self, online: OnlineUpdates, *, collecting: bool, others_serve: bool = False
    ) -> None:
        """Runs after `before_step`: says what online updates have made of the version that serves.

        collecting: and stores it as a version of its own, which serves from then on.  others_serve:
        what `before_step` returned.
        """
        counters = self.counters
        if others_serve:
            online.others_serve()
        if collecting and not self._stopped:
            stored = self._learnt.before_step(online, counters.version)
            if stored is not None:
                _log.info("version %d is what online updates made of %d", stored, counters.version)
                if self._replaced is None:
                    self._replaced = counters.version
                counters.version = stored
            elif self._learnt.failing:
                counters.state = f"what was learnt cannot be stored: {self._learnt.failing}"
        counters.learnt_from = counters.version if online.has_learnt else self._replaced

    def _use(self, reading: _Reading) -> bool:
        wanted, self._reading = reading.version, None
        if reading.found is None:
            self._retry_at = monotonic() + _RETRY_SECONDS
            state = f"version {wanted} cannot be used: {reading.why}"
            if state != self.counters.state:
                _log.error("%s", state)
            self.counters.state = state
            return False
        self._weights.serve(reading.found)
        return self._changed(wanted)

    def stop(self, why: str) -> None:
        """Ends the deployments; the present weights keep serving, and are reported."""
        self._stopped = True
        self.counters.state = why

    def _failed_another(self, wanted: int) -> bool:
        return not self.counters.state.startswith(f"version {wanted} ")

    def _changed(self, version: int) -> bool:
        _log.info("version %d of the drafter serves, after %d", version, self.counters.version)
        self.counters.version, self._replaced = version, None
        self.counters.deployed += 1
        self.counters.state = "ready"
        return True


class _Reading:
    """A version on its way from the disk.  found: its parameters, None for why."""

    def __init__(self, versions: Versions, version: int, like: Mapping[str, torch.Tensor]) -> None:
        self.version = version
        self.found: dict[str, torch.Tensor] | None = None
        self.why = ""
        self._versions = versions
        self._like = like
        self._thread = threading.Thread(target=self._read, name="speculation-draft", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """It has been read, or cannot be."""
        return not self._thread.is_alive()

    def _read(self) -> None:
        try:
            found = {
                name: part.to(self._like[name].device)
                for name, part in self._versions.load(self.version, self._like).items()
            }
        except (VersionError, OSError) as error:
            self.why = str(error)
        except Exception as error:  # noqa: BLE001 - no memory for it, say
            self.why = f"{type(error).__name__}: {error}"
        else:
            self.found = found
