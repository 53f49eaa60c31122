"""Puts a trainer's versions of the drafter into service between two steps.

    before_step     has a thread read the version that the plan names; once it is read, its values
                    are copied into the serving drafter, in place

No request is stopped or flushed, and no step waits for the disk.  If a version cannot be used, this
is reported and the current version keeps serving.  The version is tried again later, because its
file may arrive late.

If ranks share the drafter, rank 0 decides, and all ranks do the same before the same step (see
link/rank_commands.py).  Each rank reads the version and keeps its share.  Once rank 0 has read it,
the ranks exchange their states, and switch together if all of them can.

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

from engine_shim.link.lost_capabilities import error_reason
from engine_shim.link.rank_commands import RankCommandKind, RankCommands
from engine_shim.sglang.api.transfer import record_launched_work
from engine_shim.sglang.learning.student import DrafterWeights, LiveDrafter
from engine_shim.sglang.training.versions import FOLDER_NAME as VERSIONS_FOLDER
from engine_shim.sglang.training.versions import VersionError, VersionOrigin, Versions

if TYPE_CHECKING:
    from engine_shim.sglang.learning.online_updates import OnlineUpdates

Weights = dict[str, torch.Tensor]
_Result = TypeVar("_Result")

_RETRY_SECONDS: Final = 10.0
# Seconds between two questions whether the other ranks have read a version.
_ASK_PEERS_SECONDS: Final = 0.1

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
        self, signals_folder: Path, drafter: LiveDrafter, rank_commands: RankCommands | None = None
    ) -> None:
        """Stores the drafter as the base version, on rank 0.  Raises OSError, VersionError."""
        self.counters = DeploymentCounters()
        self._shares = drafter.shares
        self._peers = self._shares.peers
        self._versions = Versions(signals_folder / VERSIONS_FOLDER)
        if self._peers.rank == 0:
            self._versions.adopt_base(drafter.shape, drafter.parameters, drafter.borrowed)
        self._expected_parameters = {
            name: part.to("meta") for name, part in drafter.parameters.items()
        }
        self._weights = DrafterWeights(self._shares.live, drafter.refresh)
        self._learnt = LearntVersions(self._versions)
        # The version from which the serving one was learnt; a plan may still name it.
        self._replaced: int | None = None
        # The version that served before the last deployment; a plan may return to it.
        self._previous_version = 0
        self._read_task: _BackgroundTask[Weights] | None = None
        self._retry_at = self._ask_peers_at = 0.0
        self._is_stopped = self._has_changed = False
        self._error: Exception | None = None
        self._rank_commands = rank_commands or RankCommands()
        self._rank_commands.register(RankCommandKind.READ, self._start_reading)
        self._rank_commands.register(RankCommandKind.SERVE, self._serve_version)

    def before_step(self, planned_version: int | None) -> bool:
        """Runs on rank 0 when a decode step begins.

        planned_version: the plan's version, None without a plan.  Returns whether the serving
        weights have changed since the previous step.  Raises the error that kept a rank from
        writing them.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._is_stopped or planned_version is None:
            self._read_task = None
        elif not self._rank_commands.has_pending:
            self._pursue_version(planned_version)
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def store_learnt(
        self, online: OnlineUpdates, *, collecting: bool, is_replaced: bool = False
    ) -> None:
        """Runs after `before_step`: tracks what online updates have made of the serving version.

        collecting: whether to store the result as a new version, which then counts as serving.
        is_replaced: the value that `before_step` returned.
        """
        counters = self.counters
        if is_replaced:
            online.on_external_weights()
        if collecting and not self._is_stopped:
            stored_version = self._learnt.before_step(
                online, counters.version, self._needed_versions()
            )
            if stored_version is not None:
                _log.info(
                    "version %d is what online updates made of %d", stored_version, counters.version
                )
                if self._replaced is None:
                    self._replaced = counters.version
                counters.version = stored_version
            elif self._learnt.failure_reason:
                counters.state = f"what was learnt cannot be stored: {self._learnt.failure_reason}"
        counters.learnt_from = counters.version if online.has_learnt else self._replaced

    def _needed_versions(self) -> set[int]:
        """Returns the versions that a plan may still name, without the serving one."""
        read_task = self._read_task
        return {
            self._previous_version,
            self._replaced or 0,
            0 if read_task is None else read_task.version,
        }

    def stop(self, reason: str) -> None:
        """Ends the deployments; the current weights keep serving and are still reported."""
        self._is_stopped = True
        self.counters.state = reason

    def _pursue_version(self, planned_version: int) -> None:
        read_task = self._read_task
        if planned_version == self.counters.version:
            self._read_task, self.counters.state, self._replaced = None, "ready", None
        elif planned_version == self._replaced:
            # The plan is older than the version that was learnt from this one.
            return
        elif not planned_version:
            self._rank_commands.propose(RankCommandKind.SERVE, 0)
        elif read_task is None or read_task.version != planned_version:
            if monotonic() >= self._retry_at or self._failed_other_version(planned_version):
                self._rank_commands.propose(RankCommandKind.READ, planned_version)
        elif read_task.is_done and monotonic() >= self._ask_peers_at:
            self._rank_commands.propose(RankCommandKind.SERVE, planned_version)

    def _start_reading(self, version: int) -> None:
        """Starts reading a version, on every rank."""
        work = partial(self._load_share, version)
        self._read_task = _BackgroundTask(
            "speculation-draft", version, work, (VersionError, OSError)
        )

    def _load_share(self, version: int) -> Weights:
        """Returns this rank's share of a version, on the drafter's device."""
        share = self._shares.select_share(
            self._versions.load_parameters(version, self._expected_parameters)
        )
        return {name: part.to(self._shares.live[name].device) for name, part in share.items()}

    def _serve_version(self, version: int) -> None:
        """Serves a version if all ranks have read it; every rank calls this in the same step."""
        read_task, self._read_task = self._read_task, None
        if version:
            rank_answers = self._peers.all_gather(self._read_answer(read_task, version))
            if failure := self._join_reasons(rank_answers):
                self._report_unusable(version, failure)
                return
            if read_task is None or None in rank_answers:
                self._read_task, self._ask_peers_at = read_task, monotonic() + _ASK_PEERS_SECONDS
                return
        error = self._write_weights(None if read_task is None else read_task.result)
        failures = self._peers.all_gather("" if error is None else error_reason(error))
        if failure := self._join_reasons(failures):
            self._error = error or RuntimeError(failure)
            if self._peers.has_other_ranks:
                # Some ranks have written it, and all ranks must serve one version: the first one.
                self._write_weights(None)
                self.counters.version = 0
            return
        self._record_deployment(version)

    def _read_answer(self, read_task: _BackgroundTask[Weights] | None, version: int) -> str | None:
        """Returns "" if this rank can serve the version, None while it reads, else the reason."""
        if self._is_stopped:
            return self.counters.state
        if read_task is None or read_task.version != version:
            return "this rank was not ordered to read it"
        return read_task.failure_reason if read_task.is_done else None

    def _join_reasons(self, answers: list[str | None] | list[str]) -> str:
        """Joins the reasons; names the rank of each if there are several ranks."""
        rank_reasons = [(rank, reason) for rank, reason in enumerate(answers) if reason]
        if not self._peers.has_other_ranks:
            return rank_reasons[0][1] if rank_reasons else ""
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in rank_reasons)

    def _report_unusable(self, version: int, reason: str) -> None:
        self._retry_at = monotonic() + _RETRY_SECONDS
        state = f"version {version} cannot be used: {reason}"
        if state != self.counters.state and self._peers.rank == 0:
            _log.error("%s", state)
        self.counters.state = state

    def _write_weights(self, weights: Weights | None) -> Exception | None:
        """Writes this rank's weights, None for the first ones; returns the error, if any."""
        try:
            if weights is None:
                self._weights.serve_initial()
            else:
                self._weights.serve(weights)
        except Exception as error:  # noqa: BLE001 - for example out of memory
            return error
        return None

    def _failed_other_version(self, planned_version: int) -> bool:
        return not self.counters.state.startswith(f"version {planned_version} ")

    def _record_deployment(self, version: int) -> None:
        self._previous_version = self.counters.version
        if self._peers.rank == 0:
            _log.info("version %d of the drafter serves, after %d", version, self._previous_version)
        self.counters.version, self._replaced = version, None
        self.counters.deployed += 1
        self.counters.state = "ready"
        self._has_changed = True


class _BackgroundTask(Generic[_Result]):
    """Runs a task for a version on its own thread.

    result: what `function` returned; None until then, and if it failed.  failure_reason: the reason
    of a failure.  expected_errors: errors whose message is sufficient without their type.
    """

    def __init__(
        self,
        name: str,
        version: int,
        function: Callable[[], _Result],
        expected_errors: tuple[type[Exception], ...] = (),
    ) -> None:
        self.version = version
        self.result: _Result | None = None
        self.failure_reason = ""
        self._function, self._expected_errors = function, expected_errors
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self.failure_reason = error_reason(error)

    @property
    def is_done(self) -> bool:
        """Whether the task has ended or could not start."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._function()
        except self._expected_errors as error:
            self.failure_reason = str(error)
        except Exception as error:  # noqa: BLE001 - for example out of memory, or a full disk
            self.failure_reason = error_reason(error)


class LearntVersions:
    """Stores the weights that one engine has learnt.

    failure_reason: why they could not be stored; "" while nothing has failed.
    """

    def __init__(self, versions: Versions) -> None:
        self.failure_reason = ""
        self._versions = versions
        self._store_task: _BackgroundTask[int] | None = None
        self._retry_at = 0.0

    def before_step(
        self, online: OnlineUpdates, serving_version: int, needed_versions: set[int]
    ) -> int | None:
        """Runs when a decode step begins, while signals are collected.  Does not wait.

        serving_version: the version from which the weights were learnt.  needed_versions: other
        versions that must not be deleted.  Returns the new version of the served weights, once they
        are stored.
        """
        store_task = self._store_task
        if store_task is None:
            if online.can_be_stored and monotonic() >= self._retry_at:
                weights = online.learnt_weights()
                copy_done = record_launched_work(next(iter(weights.values())).device)
                work = partial(
                    self._store,
                    weights,
                    copy_done,
                    {serving_version, *needed_versions},
                    serving_version,
                )
                self._store_task = _BackgroundTask("speculation-learnt", serving_version, work)
            return None
        if not store_task.is_done:
            return None
        self._store_task = None
        if store_task.result is None:
            self._retry_at = monotonic() + _RETRY_SECONDS
            if store_task.failure_reason != self.failure_reason:
                _log.error(
                    "the result of online updates cannot be stored: %s", store_task.failure_reason
                )
            self.failure_reason = store_task.failure_reason
            return None
        self.failure_reason = ""
        # If they have changed in the meantime, the new weights are stored again.
        return store_task.result if online.mark_stored() else None

    def _store(
        self,
        weights: Weights,
        copy_done: torch.Event | None,
        kept_versions: set[int],
        base_version: int,
    ) -> int:
        """Writes weights learnt from version `base_version`; returns the new version's number.

        copy_done: event of the copy on a GPU, None without one.  kept_versions: versions that must
        not be deleted.
        """
        try:  # Delete old versions first, because the disk may be full.
            self._versions.delete_old(kept_versions)
        except OSError as error:  # for example owned by another user
            _log.warning("old versions of the drafter cannot be deleted: %s", error)
        if copy_done is not None:
            copy_done.synchronize()
        return self._versions.publish(weights, VersionOrigin(base_version, 0.0, 0.0, 0.0, 0, 0.0))
