"""Logs are JSON lines on standard error, one per change and none per step; logging never blocks."""

import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from controller.util.log_handler import LineLimit, LogQueue

_SHARED: list[structlog.typing.Processor] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]

Line = MutableMapping[str, Any]

_limit = LineLimit()
_readers: list[Callable[[Line], None]] = []
_log = structlog.get_logger(__name__)


def configure(level: str) -> None:
    """Sets up the logs of structlog and of the standard library.  level: "info", for example."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = LogQueue(sys.stderr)
    handler.addFilter(_limit)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder(allow=["suppressed"])],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _show,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def show_to(reader: Callable[[Line], None]) -> None:
    """Calls `reader` with every line that is written from now on, on the thread that logs it."""
    _readers.append(reader)


def show_no_more_to(reader: Callable[[Line], None]) -> None:
    """Ends what `show_to` began."""
    _readers.remove(reader)


def suppressed_lines() -> int:
    """Returns the number of lines that were suppressed so far."""
    return _limit.suppressed


def tell_suppressed() -> None:
    """Logs the number of suppressed lines that no line has counted yet, by event."""
    if lines := _limit.untold():
        _log.warning("log_lines_suppressed", lines=lines)


def _show(_logger: object, _method: str, line: Line) -> Line:
    for reader in _readers:
        reader(line)
    return line
