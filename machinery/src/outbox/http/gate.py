"""What every request passes before its route and after it, in any framework: token, trace and metrics; and health."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http import HTTPStatus
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import BaseModel
from sqlalchemy import Connection

from outbox.base import log, scraped, spans, trace
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.http import problems
from outbox.http.problems import HttpError
from outbox.migrations.migrate import is_current

SCHEME = "bearer"
REALM = "service"
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported
# The page of the API loads from its own package alone, and the browser refuses other hosts.
PAGE_POLICY = {"Content-Security-Policy": "default-src 'self' 'unsafe-inline' data:"}

logger = log.get(__name__)


class Metrics:
    """The metrics of one application, summed over gunicorn's workers.

    `http_request_duration_seconds`: a histogram of every completed request, by method, route template and status; its
    count is the number of requests. A service adds its own metrics to ``registry``.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "http_request_duration_seconds",
            "Duration of requests by method, route and status",
            ["method", "route", "status"],
            registry=self.registry,
        )

    def render(self, host: str) -> bytes:
        """All metrics in Prometheus' text format. Raises HttpError 421 if the request names another host."""
        if not scraped.is_own_name(host):
            raise HttpError(problems.of_status(HTTPStatus.MISDIRECTED_REQUEST, scraped.REFUSAL))
        registry = self.registry
        if FOLDER_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class Token:
    """The bearer token that every request must have, except those for the public paths."""

    def __init__(self, settings: Settings) -> None:
        """Raises Failure if the settings have no token: a service is never open by default."""
        self._token = settings.service_token.get_secret_value().encode()
        if not self._token:
            raise Failure(
                "OUTBOX_SERVICE_TOKEN is not set",
                "`outbox up` generates one, or set your own",
                code="service-token-missing",
            )

    def require(self, authorization: str | None) -> None:
        """Raises HttpError 401 unless this header of a request has the token."""
        scheme, _, sent = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or not hmac.compare_digest(sent.strip().encode(), self._token):
            raise HttpError(
                problems.of_status(HTTPStatus.UNAUTHORIZED, "the bearer token is missing or wrong"),
                {"WWW-Authenticate": f"{SCHEME.title()} realm={REALM}"},
            )


@contextmanager
def passing(
    metrics: Metrics, method: str, path: str, traceparent: str | None, *, is_public: bool
) -> Iterator[Callable[[str | None, int, str | None], None]]:
    """The passage of a request, whose span gives its log lines a trace id. A public request has no span: most are
    probes.

    Yields a function for the response: route template, status, ``Location``. It counts each, and logs that of a sampled
    request. The change is committed by then: if the process ends in between, the line is missing.
    """
    started_at_s, known = time.monotonic(), method if method in METHODS else "_OTHER"
    span = nullcontext(spans.Request(traceparent)) if is_public else spans.request(known, path, traceparent)
    with span as answered:

        def respond(route: str | None, status: int, location: str | None) -> None:
            answered.route, answered.status = route, status
            # The route template instead of the path, and known methods only: clients must not create label values.
            labels = (method if method in METHODS else "other", route or "unknown", status)
            metrics.requests.labels(*labels).observe(time.monotonic() - started_at_s)
            if trace.is_sampled(traceparent):
                logger.info("request completed", method=method, path=path, status=status, location=location)

        trace_id = trace.trace_id(answered.traceparent)
        with structlog.contextvars.bound_contextvars(**({} if trace_id is None else {"trace_id": trace_id})):
            yield respond


class Health(BaseModel):
    """The response of a healthy service; an unhealthy one responds with an error."""

    status: Literal["ok"] = "ok"


def require_current(connection: Connection) -> None:
    """Raises HttpError 503 if the database lacks migrations of this version."""
    if not is_current(connection, "source"):
        detail = "the database lacks migrations: run `outbox migrate`"
        raise HttpError(problems.of_status(HTTPStatus.SERVICE_UNAVAILABLE, detail), problems.RETRY_LATER)
