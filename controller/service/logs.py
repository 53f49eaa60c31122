"""Logs as JSON lines on standard error: one line per change, none per step, limited in number."""

import logging
import sys
from collections.abc import Sequence

import structlog

from controller.service.log_limit import LineLimit

_SHARED: list[structlog.typing.Processor] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]

_limit = LineLimit()
_log = structlog.get_logger(__name__)


def configure(level: str, also: Sequence[structlog.typing.Processor] = ()) -> None:
    """Sends structlog and the standard library's logs the same way.

    level: "info", say.  also: shown every line that is written.
    """
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
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_limit)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder(allow=["suppressed"])],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                *also,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def suppressed_lines() -> int:
    """Lines held back so far."""
    return _limit.suppressed


def tell_suppressed() -> None:
    """Says what was held back and not told of yet."""
    if lines := _limit.untold():
        _log.warning("log_lines_suppressed", lines=lines)
