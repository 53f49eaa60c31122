"""Saves the states of training on disk, one file for each engine and drafter.

A state is written if anything but its averages has changed, before a trainer gets the resulting
order, and when its session ends.  A file that cannot be read is logged and replaced.
"""

import asyncio
import hashlib
import threading
from dataclasses import replace
from pathlib import Path

import structlog

from controller.core.engine_spec import EngineSpec
from controller.core.errors import InvalidTrainingError
from controller.core.training.selective_training import (
    SelectiveTraining,
    TrainingState,
    from_json,
    to_json,
)
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.util.files import write_atomically

_SAVE_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class TrainingStateFiles:
    """Reads and writes states in a directory, which is created with the first file."""

    def __init__(self, directory: Path, registry: SessionRegistry) -> None:
        self._directory = directory
        self._registry = registry
        self._saved_states: dict[str, TrainingState] = {}
        # The event loop and its threads write.
        self._write_lock = threading.Lock()
        self._is_failing = False

    def load(self, spec: EngineSpec) -> TrainingState | None:
        """Returns the saved or present state of an engine's training; None without one."""
        path = self._path(spec)
        session_state = self._state_in_session(path)
        if session_state is not None:
            return session_state
        try:
            state = from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, InvalidTrainingError) as error:
            _log.error("training_state_not_read", path=str(path), error=str(error))
            return None
        self._saved_states[path.name] = _without_averages(state)
        return state

    def save_final(self, session: EngineSession) -> None:
        """Writes a session's state, averages included, when the session ends."""
        training, path = session.core.updates.training, self._path(session.spec)
        if training is not None and training.state.measured:
            self._write(path, training)
        # Only open sessions need the saved state: the file is read again for the next session.
        self._saved_states.pop(path.name, None)

    async def save_if_changed(self, session: EngineSession) -> None:
        """Writes a session's state if anything but its averages has changed."""
        training = session.core.updates.training
        path = self._path(session.spec)
        if training is None or self._saved_states.get(path.name) == _without_averages(
            training.state
        ):
            return
        if not training.state.measured and not training.state.round:
            return
        await asyncio.to_thread(self._write, path, training)

    def _write(self, path: Path, training: SelectiveTraining) -> None:
        """Writes the present state, one at a time, so that no older state replaces a newer one."""
        with self._write_lock:
            state = training.state
            try:
                write_atomically(path, to_json(state).encode())
            except OSError as error:
                if not self._is_failing:
                    _log.error("training_state_not_written", path=str(path), error=error.strerror)
                self._is_failing = True
                return
            self._is_failing = False
            self._record_saved(path, state)

    def _record_saved(self, path: Path, state: TrainingState) -> None:
        previous_state = self._saved_states.get(path.name)
        self._saved_states[path.name] = _without_averages(state)
        if previous_state is not None and previous_state.version != state.version:
            _log.info(
                "draft_version",
                version=state.version,
                before=previous_state.version,
                outcome=_version_reason(previous_state, state),
            )

    def _state_in_session(self, path: Path) -> TrainingState | None:
        """Returns the state of an older session of the same engine."""
        for session in self._registry:
            training = session.core.updates.training
            if training is not None and self._path(session.spec) == path:
                return training.state
        return None

    async def watch(self) -> None:
        """Writes changed states periodically, until cancelled."""
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            for session in self._registry:
                await self.save_if_changed(session)

    def _path(self, spec: EngineSpec) -> Path:
        target, drafter = spec.fingerprint, spec.learner
        parts = (
            spec.engine_id, target.target_model, target.target_revision, drafter.model,
            drafter.revision,
        )  # fmt: skip
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return self._directory / f"{name}.json"


def _version_reason(previous_state: TrainingState, state: TrainingState) -> str:
    """Names the reason why another version is to serve."""
    if state.history and state.history != previous_state.history:
        return state.history[-1].outcome
    return "learnt"


def _without_averages(state: TrainingState) -> TrainingState:
    """Returns the state without the numbers that change in every step."""
    return replace(state, measured=0, short=0.0, long=0.0)
