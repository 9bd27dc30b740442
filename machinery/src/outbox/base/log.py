"""Structured logs on stderr: text on a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING, cast

from outbox.base import terminal
from outbox.base.errors import Failure
from outbox.base.settings import Settings

if TYPE_CHECKING:
    import structlog


def configure(settings: Settings, *, is_personal: bool = False) -> None:
    """Set up structlog, once a process; standard library records go to the same place.

    ``is_personal``: events have personal data, so tracebacks have no messages and no values of variables.
    """
    import structlog

    text = settings.log_format == "text" or (settings.log_format == "auto" and sys.stderr.isatty())
    stream = terminal.guarded(sys.stderr)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    without_messages = structlog.processors.ExceptionRenderer(_frames)
    hiding: list[structlog.typing.Processor] = [without_messages] if is_personal else []
    renderer: list[structlog.typing.Processor] = hiding + (
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


def _frames(exc_info: structlog.typing.ExcInfo) -> str:
    """A traceback of classes and frames, and of the messages only ours: any other may repeat a value."""
    error: BaseException | None = exc_info[1]
    parts = list[str]()
    while error is not None:
        said = f": {error}" if isinstance(error, Failure) else ""
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.insert(0, f"Traceback (most recent call last):\n{frames}{type(error).__qualname__}{said}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\n".join(parts)


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    import structlog

    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(name))
