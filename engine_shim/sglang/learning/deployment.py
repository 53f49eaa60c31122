"""Puts a trainer's versions of the drafter into service between two steps.

    before_step     has a thread read the version that the plan names; once it is read, its values
                    are copied into the serving drafter, in place

No request is stopped or flushed, and no step waits for the disk.  If a version cannot be used, this
is reported and the current version keeps serving.  The version is tried again later, because its
file may arrive late.

If ranks share the drafter, rank 0 decides, and all ranks do the same before the same step (see
link/orders.py).  Each rank reads the version and keeps its share.  Once rank 0 has read it, the
ranks exchange their states, and switch together if all of them can.

While signals are collected, `LearntVersions` stores the result of online updates as versions.  A
trainer's rounds start from a version, and a failing version is rolled back to one, so the served
weights must exist as a file.  They are stored in the trainer's folder, on a thread, as soon as
updates rest and their acceptance has been judged.  The served weights do not change.  A trainer
deletes old versions after each round.  If no trainer runs, nothing else deletes them, so the engine
also deletes old versions whenever it stores one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import torch

from engine_shim.link.losses import reason_of
from engine_shim.link.orders import OrderKind, Orders
from engine_shim.sglang.api.transfer import launched
from engine_shim.sglang.learning.student import DrafterWeights, LiveDrafter
from engine_shim.sglang.training.versions import FOLDER as VERSIONS_FOLDER
from engine_shim.sglang.training.versions import Made, VersionError, Versions

if TYPE_CHECKING:
    from engine_shim.sglang.learning.online_updates import OnlineUpdates

Whole = dict[str, torch.Tensor]
_Result = TypeVar("_Result")

_RETRY_SECONDS: Final = 10.0
# Seconds between two questions whether the other ranks have read a version.
_ASK_SECONDS: Final = 0.1

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DeploymentCounters:
    """Counts the deployments.

    version: the serving version, 0 as loaded.  deployed: changes so far.  state: "ready" or the
    reason why a version cannot be used.  learnt_from: as in proto StepReport.
    """

    version: int = 0
    deployed: int = 0
    state: str = "ready"
    learnt_from: int | None = None


class Deployment:
    """Deploys a trainer's versions in one engine; every rank has one.

    signals_folder: the folder that the trainer reads.  orders: of this rank.
    """

    def __init__(
        self, signals_folder: Path, drafter: LiveDrafter, orders: Orders | None = None
    ) -> None:
        """Stores the drafter as the base version, on rank 0.  Raises OSError, VersionError."""
        self.counters = DeploymentCounters()
        self._shares = drafter.shares
        self._ranks = self._shares.peers
        self._versions = Versions(signals_folder / VERSIONS_FOLDER)
        if self._ranks.rank == 0:
            self._versions.adopt_base(drafter.shape, drafter.parameters, drafter.borrowed)
        self._like = {name: part.to("meta") for name, part in drafter.parameters.items()}
        self._weights = DrafterWeights(self._shares.live, drafter.refresh)
        self._learnt = LearntVersions(self._versions)
        # The version from which the serving one was learnt; a plan may still name it.
        self._replaced: int | None = None
        # The version that served before the last deployment; a plan may return to it.
        self._before = 0
        self._reading: _Work[Whole] | None = None
        self._retry_at = self._ask_at = 0.0
        self._stopped = self._has_changed = False
        self._error: Exception | None = None
        self._orders = orders or Orders()
        self._orders.register(OrderKind.READ, self._read)
        self._orders.register(OrderKind.SERVE, self._serve)

    def before_step(self, wanted: int | None) -> bool:
        """Runs on rank 0 when a decode step begins.

        wanted: the plan's version, None without a plan.  Returns whether the serving weights have
        changed since the previous step.  Raises the error that kept a rank from writing them.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._stopped or wanted is None:
            self._reading = None
        elif not self._orders.are_open:
            self._pursue(wanted)
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def keep_learnt(
        self, online: OnlineUpdates, *, collecting: bool, others_serve: bool = False
    ) -> None:
        """Runs after `before_step`: tracks what online updates have made of the serving version.

        collecting: whether to store the result as a new version, which then counts as serving.
        others_serve: the value that `before_step` returned.
        """
        counters = self.counters
        if others_serve:
            online.others_serve()
        if collecting and not self._stopped:
            stored = self._learnt.before_step(online, counters.version, self._needed())
            if stored is not None:
                _log.info("version %d is what online updates made of %d", stored, counters.version)
                if self._replaced is None:
                    self._replaced = counters.version
                counters.version = stored
            elif self._learnt.failing:
                counters.state = f"what was learnt cannot be stored: {self._learnt.failing}"
        counters.learnt_from = counters.version if online.has_learnt else self._replaced

    def _needed(self) -> set[int]:
        """Returns the versions that a plan may still name, without the serving one."""
        reading = self._reading
        return {self._before, self._replaced or 0, 0 if reading is None else reading.version}

    def stop(self, why: str) -> None:
        """Ends the deployments; the current weights keep serving and are still reported."""
        self._stopped = True
        self.counters.state = why

    def _pursue(self, wanted: int) -> None:
        reading = self._reading
        if wanted == self.counters.version:
            self._reading, self.counters.state, self._replaced = None, "ready", None
        elif wanted == self._replaced:
            # The plan is older than the version that was learnt from this one.
            return
        elif not wanted:
            self._orders.propose(OrderKind.SERVE, 0)
        elif reading is None or reading.version != wanted:
            if monotonic() >= self._retry_at or self._failed_another(wanted):
                self._orders.propose(OrderKind.READ, wanted)
        elif reading.is_done and monotonic() >= self._ask_at:
            self._orders.propose(OrderKind.SERVE, wanted)

    def _read(self, version: int) -> None:
        """Starts reading a version, on every rank."""
        work = partial(self._loaded, version)
        self._reading = _Work("speculation-draft", version, work, (VersionError, OSError))

    def _loaded(self, version: int) -> Whole:
        """Returns this rank's share of a version, on the drafter's device."""
        own = self._shares.of(self._versions.load(version, self._like))
        return {name: part.to(self._shares.live[name].device) for name, part in own.items()}

    def _serve(self, version: int) -> None:
        """Serves a version if all ranks have read it; every rank calls this in the same step."""
        reading, self._reading = self._reading, None
        if version:
            answers = self._ranks.told(self._answer(reading, version))
            if why := self._of_ranks(answers):
                self._cannot_be_used(version, why)
                return
            if reading is None or None in answers:
                self._reading, self._ask_at = reading, monotonic() + _ASK_SECONDS
                return
        error = self._written(None if reading is None else reading.result)
        failures = self._ranks.told("" if error is None else reason_of(error))
        if why := self._of_ranks(failures):
            self._error = error or RuntimeError(why)
            if self._ranks.several:
                # Some ranks have written it, and all ranks must serve one version: the first one.
                self._written(None)
                self.counters.version = 0
            return
        self._changed(version)

    def _answer(self, reading: _Work[Whole] | None, version: int) -> str | None:
        """Returns "" if this rank can serve the version, None while it reads, else the reason."""
        if self._stopped:
            return self.counters.state
        if reading is None or reading.version != version:
            return "this rank was not ordered to read it"
        return reading.why if reading.is_done else None

    def _of_ranks(self, answers: list[str | None] | list[str]) -> str:
        """Joins the reasons; names the rank of each if there are several ranks."""
        found = [(rank, why) for rank, why in enumerate(answers) if why]
        if not self._ranks.several:
            return found[0][1] if found else ""
        return "; ".join(f"rank {rank}: {why}" for rank, why in found)

    def _cannot_be_used(self, version: int, why: str) -> None:
        self._retry_at = monotonic() + _RETRY_SECONDS
        state = f"version {version} cannot be used: {why}"
        if state != self.counters.state and self._ranks.rank == 0:
            _log.error("%s", state)
        self.counters.state = state

    def _written(self, weights: Whole | None) -> Exception | None:
        """Writes this rank's weights, None for the first ones; returns the error, if any."""
        try:
            if weights is None:
                self._weights.serve_first()
            else:
                self._weights.serve(weights)
        except Exception as error:  # noqa: BLE001 - for example out of memory
            return error
        return None

    def _failed_another(self, wanted: int) -> bool:
        return not self.counters.state.startswith(f"version {wanted} ")

    def _changed(self, version: int) -> None:
        self._before = self.counters.version
        if self._ranks.rank == 0:
            _log.info("version %d of the drafter serves, after %d", version, self._before)
        self.counters.version, self._replaced = version, None
        self.counters.deployed += 1
        self.counters.state = "ready"
        self._has_changed = True


class _Work(Generic[_Result]):
    """Runs a task for a version on its own thread.

    result: what `work` returned; None until then, and if it failed.  why: the reason of a failure.
    expected: errors whose message is sufficient without their type.
    """

    def __init__(
        self,
        name: str,
        version: int,
        work: Callable[[], _Result],
        expected: tuple[type[Exception], ...] = (),
    ) -> None:
        self.version = version
        self.result: _Result | None = None
        self.why = ""
        self._work, self._expected = work, expected
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.why = reason_of(error)

    @property
    def is_done(self) -> bool:
        """Whether the task has ended or could not start."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except self._expected as error:
            self.why = str(error)
        except Exception as error:  # noqa: BLE001 - for example out of memory, or a full disk
            self.why = reason_of(error)


class LearntVersions:
    """Stores the weights that one engine has learnt.

    failing: why they could not be stored; "" while nothing has failed.
    """

    def __init__(self, versions: Versions) -> None:
        self.failing = ""
        self._versions = versions
        self._storing: _Work[int] | None = None
        self._retry_at = 0.0

    def before_step(self, online: OnlineUpdates, serving: int, needed: set[int]) -> int | None:
        """Runs when a decode step begins, while signals are collected.  Does not wait.

        serving: the version from which the weights were learnt.  needed: other versions that must
        not be deleted.  Returns the new version of the served weights, once they are stored.
        """
        storing = self._storing
        if storing is None:
            if online.may_be_stored and monotonic() >= self._retry_at:
                weights = online.learnt_weights()
                copied = launched(next(iter(weights.values())).device)
                work = partial(self._store, weights, copied, {serving, *needed}, serving)
                self._storing = _Work("speculation-learnt", serving, work)
            return None
        if not storing.is_done:
            return None
        self._storing = None
        if storing.result is None:
            self._retry_at = monotonic() + _RETRY_SECONDS
            if storing.why != self.failing:
                _log.error("the result of online updates cannot be stored: %s", storing.why)
            self.failing = storing.why
            return None
        self.failing = ""
        # If they have changed in the meantime, the new weights are stored again.
        return storing.result if online.were_stored() else None

    def _store(self, weights: Whole, copied: torch.Event | None, kept: set[int], base: int) -> int:
        """Writes weights that were learnt from version `base`, and returns their version's number.

        copied: event of the copy on a GPU, None without one.  kept: versions that must not be
        deleted.
        """
        try:  # Delete old versions first, because the disk may be full.
            self._versions.forget(kept)
        except OSError as error:  # for example owned by another user
            _log.warning("old versions of the drafter cannot be deleted: %s", error)
        if copied is not None:
            copied.synchronize()
        return self._versions.publish(weights, Made(base, 0.0, 0.0, 0.0, 0, 0.0))
