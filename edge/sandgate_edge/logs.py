"""Log lines of the edge: one JSON object each on standard error, which the front renders for people.

What libraries log through the standard library joins in, so that nothing on standard error is not JSON.
"""

from __future__ import annotations

import logging
import sys

import structlog

__all__ = ["configure"]


def configure(level: str) -> None:
    """For the whole process; called once, before anything logs."""
    numeric = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=repr),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(numeric, logging.WARNING), handlers=[_Forward()], force=True)


class _Forward(logging.Handler):
    """A record of the standard library as a line of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event = record.getMessage()
            structlog.get_logger().log(record.levelno, event, logger=record.name, exc_info=record.exc_info)
        except Exception:
            self.handleError(record)
