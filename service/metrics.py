"""Prometheus metrics of the service, summed over gunicorn's workers."""

from __future__ import annotations

import os
import time

from flask import Flask, Response, g, request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
OUTCOMES = ("created", "refused", "repeated")
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # read by prometheus_client when it is imported


class Metrics:
    """The metrics of one application.

    `ledger_request_duration_seconds`: a histogram of every answered request, by method, route template and status; its
    count is the number of requests. `ledger_transfers_total`: requests of a transfer that the rules have answered, by
    outcome: `created`, `refused`, or `repeated`, which is an earlier answer given again for its Idempotency-Key. What
    was wrong before the rules were asked, or failed, is among the requests only.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Histogram(
            "ledger_request_duration_seconds",
            "Requests by route and status, and how long they took",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self.transfers = Counter(
            "ledger_transfers",
            f"Requests of a transfer that were answered, by outcome: {', '.join(OUTCOMES)}",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in OUTCOMES:
            self.transfers.labels(outcome)  # there from the start, so that the first of its kind is seen as an increase

    def register(self, app: Flask) -> None:
        """Time every request of the application."""

        @app.before_request
        def start() -> None:
            g.started_at_s = time.monotonic()

        @app.after_request
        def observe(response: Response) -> Response:
            # The rule, not the path: a label must not have a value for each account. Nor for each method that a
            # stranger makes up: refused requests are counted too.
            route = request.url_rule.rule if request.url_rule else "unknown"
            method = request.method if request.method in METHODS else "other"
            took_s = time.monotonic() - g.started_at_s
            self._requests.labels(method, route, response.status_code).observe(took_s)
            return response

    def render(self) -> Response:
        """All of it in Prometheus' text format."""
        registry = self._registry
        if FOLDER_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
