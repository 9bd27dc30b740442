"""Trace context of the requests: each log line of a request in a trace carries its id, and a sampled one is told."""

from __future__ import annotations

import structlog
from flask import Flask, Response, request

from outbox.base import log, trace

HEADER = "traceparent"

logger = log.get(__name__)


def register(app: Flask) -> None:
    """Bind the trace id of a request to what is logged in it, and log the answer of a sampled one.

    The answer comes after the commit. Should the process end in between, the line is missing, and the sinks' is there.
    """

    @app.before_request
    def bind() -> None:
        trace_id = trace.trace_id(request.headers.get(HEADER))
        if trace_id is not None:
            structlog.contextvars.bind_contextvars(trace_id=trace_id)

    @app.after_request
    def tell(response: Response) -> Response:
        if trace.is_sampled(request.headers.get(HEADER)):
            logger.info(
                "request answered",
                method=request.method,
                path=request.path,
                status=response.status_code,
                location=response.headers.get("Location"),
            )
        return response

    @app.teardown_request
    def unbind(_: BaseException | None) -> None:
        structlog.contextvars.unbind_contextvars("trace_id")  # the thread has other requests to come
