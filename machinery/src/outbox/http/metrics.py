"""Prometheus metrics of the service, summed over gunicorn's workers."""

from __future__ import annotations

import os
import time

from flask import Flask, Response, g, request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported


class Metrics:
    """The metrics of one application.

    `http_request_duration_seconds`: a histogram of every completed request, by method, route template and status; its
    count is the number of requests. A service adds its own metrics to ``registry``.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Histogram(
            "http_request_duration_seconds",
            "Duration of requests by method, route and status",
            ["method", "route", "status"],
            registry=self.registry,
        )

    def register(self, app: Flask) -> None:
        """Time every request of the application."""

        @app.before_request
        def start() -> None:
            g.started_at_s = time.monotonic()

        @app.after_request
        def observe(response: Response) -> Response:
            # The route template instead of the path, and known methods only: clients must not create label values.
            route = request.url_rule.rule if request.url_rule else "unknown"
            method = request.method if request.method in METHODS else "other"
            duration_s = time.monotonic() - g.started_at_s
            self._requests.labels(method, route, response.status_code).observe(duration_s)
            return response

    def render(self) -> Response:
        """All metrics in Prometheus' text format."""
        registry = self.registry
        if FOLDER_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
