"""Structured logs on stderr: text on a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, cast

from outbox.base import terminal
from outbox.base.settings import Settings

if TYPE_CHECKING:
    import structlog


def configure(settings: Settings) -> None:
    """Set up structlog, once a process; standard library records go to the same place."""
    import structlog

    text = settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())
    stream = terminal.guarded(sys.stderr)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(settings.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for chatty in ("alembic", "py4j"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """The logger of a module."""
    import structlog

    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(name))
