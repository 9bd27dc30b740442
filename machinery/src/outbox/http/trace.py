"""Trace context of requests: each log line of a traced request carries its trace id; a sampled request is logged."""

from __future__ import annotations

import structlog
from flask import Flask, Response, request

from outbox.base import log, trace

HEADER = "traceparent"

logger = log.get(__name__)


def register(app: Flask) -> None:
    """Bind the trace id of a request to its log lines, and log the response of a sampled request.

    The response is logged after the commit. If the process ends in between, only the sinks' lines exist.
    """

    @app.before_request
    def bind() -> None:
        trace_id = trace.trace_id(request.headers.get(HEADER))
        if trace_id is not None:
            structlog.contextvars.bind_contextvars(trace_id=trace_id)

    @app.after_request
    def log_sampled(response: Response) -> Response:
        if trace.is_sampled(request.headers.get(HEADER)):
            logger.info(
                "request completed",
                method=request.method,
                path=request.path,
                status=response.status_code,
                location=response.headers.get("Location"),
            )
        return response

    @app.teardown_request
    def unbind(_: BaseException | None) -> None:
        structlog.contextvars.unbind_contextvars("trace_id")  # the thread will serve other requests
