"""A recording as it lies on disk: segments of one engine, read one after the other.

What a kill has torn off, and what is damaged, is passed over and said; the rest is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.recording.errors import RecordingError
from controller.recording.events import Moment, Opening
from controller.recording.frames import TornError, blocks
from controller.recording.messages import moment_from_proto
from controller.recording.ring import found_in


class RecordingPart:
    """Reads one segment.  Raises RecordingError where not even its opening can be read.

    damage: why its end is missing, known once all moments were taken; "" for a whole one.  torn: it
    ends as a kill leaves it, nothing is wrong with what is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self.torn = False
        if path.exists() and not path.is_file():
            raise RecordingError(f"{path} is no file")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
        self._moments = self._walk(data)
        first = next(self._moments, None)
        if first is None or not isinstance(first.event, Opening):
            why = self.damage or "it does not begin with an opening"
            raise RecordingError(f"{path}: nothing in it can be read: {why}")
        self.began_at = first.seconds
        self.opening: Opening = first.event

    def moments(self) -> Iterator[Moment]:
        """Everything after the opening, once."""
        for moment in self._moments:
            if isinstance(moment.event, Opening):
                self.damage = "a second opening"
                return
            yield moment

    def _walk(self, data: bytes) -> Iterator[Moment]:
        try:
            for at, block in blocks(data):
                for record in block.records:
                    moment = moment_from_proto(record)
                    if moment is None:
                        self.damage = f"at byte {at}: a record of a kind that is not known here"
                        return
                    yield moment
        except TornError as error:
            self.damage, self.torn = str(error), True
        except RecordingError as error:
            self.damage = str(error)


@dataclass(frozen=True, slots=True)
class Recording:
    """Segments of one engine, oldest first."""

    engine_id: str
    paths: tuple[Path, ...]


def find(path: Path, engine_id: str = "") -> Recording:
    """A segment by its file, or an engine's segments in a directory.

    engine_id: which one, where a directory holds several.  Raises RecordingError.
    """
    if not path.is_dir():
        found = RecordingPart(path).opening.spec.engine_id
        if engine_id not in {"", found}:
            raise RecordingError(f"{path} is of engine {found}, not of {engine_id}")
        return Recording(found, (path,))
    try:
        segments = found_in(path)
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    engines = sorted({segment.engine_id for segment in segments})
    if not engines:
        raise RecordingError(f"{path} holds no recording")
    if engine_id and engine_id not in engines:
        raise RecordingError(f"{path} holds no engine {engine_id!r}, but {', '.join(engines)}")
    if len(engines) > 1 and not engine_id:
        raise RecordingError(f"{path} holds several engines: name one of {', '.join(engines)}")
    wanted = engine_id or engines[0]
    return Recording(wanted, tuple(s.path for s in segments if s.engine_id == wanted))
